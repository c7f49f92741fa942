package config

import (
	"k8s.io/apimachinery/pkg/util/validation/field"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// CompatKubeProxy is the profile that changes every default which differs from
// kube-proxy's IPVS mode. Flags and fields that are set take precedence.
const CompatKubeProxy = "kube-proxy"

// compatProfiles are the values of --compat; empty means the defaults.
var compatProfiles = []string{CompatKubeProxy}

// setOwnCompat fills in the profile's values. It must be called before settings are
// written over them. It does nothing for other profiles.
func setOwnCompat(c *KubeIPVSConfiguration, profile string) {
	if profile != CompatKubeProxy {
		return
	}
	for _, s := range settings {
		s.setCompat(c)
	}
}

// setProxyCompat does the same for fields of the KubeProxyConfiguration that
// have no effect in kube-proxy's IPVS mode, but do in kube-ipvs.
func setProxyCompat(c *proxyv1alpha1.KubeProxyConfiguration, profile string) {
	if profile == CompatKubeProxy {
		setDefault(&c.IPTables.LocalhostNodePorts, false)
	}
}

// compat checks the profile's name.
func (b *builder) compat() {
	switch b.own.Compat {
	case "", CompatKubeProxy:
	default:
		b.errs = append(b.errs, field.NotSupported(b.path("compat"), b.own.Compat, compatProfiles))
	}
}

// ownFromFlags returns the document that results from the flags alone. A flag that was
// not given has the profile's value.
func (o *Options) ownFromFlags() (*KubeIPVSConfiguration, error) {
	own := &KubeIPVSConfiguration{}
	setOwnCompat(own, o.own.Compat)
	setOwnDefaults(own)
	return own, o.overOwn(own)
}

// proxyFromFlags does the same for the other document.
func (o *Options) proxyFromFlags() *proxyv1alpha1.KubeProxyConfiguration {
	proxy := o.proxy.DeepCopy()
	if !o.set("iptables-localhost-nodeports") {
		proxy.IPTables.LocalhostNodePorts = nil
		setProxyCompat(proxy, o.own.Compat)
		setDefault(&proxy.IPTables.LocalhostNodePorts, true)
	}
	return proxy
}
