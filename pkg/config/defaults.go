package config

import (
	"cmp"
	"net"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

const (
	proxyKind = "KubeProxyConfiguration"
	modeIPVS  = "ipvs"

	// HealthzPort and MetricsPort are the default ports, which are kube-proxy's too.
	HealthzPort = 10256
	MetricsPort = 10249

	defaultScheduler = "rr"
	// defaultFlagMinSyncPeriod is the default of ipvs.minSyncPeriod without a file.
	// With a file it is 0. kube-proxy differs in the same way, so users may rely on it.
	defaultFlagMinSyncPeriod = time.Second
)

// setProxyDefaults fills in unset fields with kube-proxy's defaults. Only mode differs:
// its default is ipvs.
func setProxyDefaults(c *proxyv1alpha1.KubeProxyConfiguration) {
	c.TypeMeta = metav1.TypeMeta{APIVersion: proxyv1alpha1.SchemeGroupVersion.String(), Kind: proxyKind}
	c.Mode = cmp.Or(c.Mode, modeIPVS)
	c.DetectLocalMode = cmp.Or(c.DetectLocalMode, "ClusterCIDR")
	c.ConfigSyncPeriod.Duration = cmp.Or(c.ConfigSyncPeriod.Duration, 15*time.Minute)
	setDefault(&c.OOMScoreAdj, -999)
	setListenDefaults(c)
	setModeDefaults(c)
	setConntrackDefaults(&c.Conntrack)

	c.ClientConnection.ContentType = cmp.Or(c.ClientConnection.ContentType, contentTypes[0])
	c.ClientConnection.QPS = cmp.Or(c.ClientConnection.QPS, 5)
	c.ClientConnection.Burst = cmp.Or(c.ClientConnection.Burst, 10)
	if c.FeatureGates == nil {
		c.FeatureGates = map[string]bool{}
	}
	logsapi.SetRecommendedLoggingConfiguration(&c.Logging)
}

// setListenDefaults sets the listening addresses, in the family of the bind address.
func setListenDefaults(c *proxyv1alpha1.KubeProxyConfiguration) {
	c.BindAddress = cmp.Or(c.BindAddress, "0.0.0.0")
	any, loopback := "0.0.0.0", "127.0.0.1"
	if ip.ParseAddr(c.BindAddress).Is6() {
		any, loopback = "::", "::1"
	}
	c.HealthzBindAddress = withPort(cmp.Or(c.HealthzBindAddress, any), HealthzPort)
	c.MetricsBindAddress = withPort(cmp.Or(c.MetricsBindAddress, loopback), MetricsPort)
}

// withPort appends the port to a bare address or CIDR, and returns anything else
// unchanged.
func withPort(s string, port int) string {
	if _, err := ip.ParsePrefix(s); err == nil || ip.ParseAddr(s).IsValid() {
		return net.JoinHostPort(s, strconv.Itoa(port))
	}
	return s
}

// setModeDefaults sets the defaults of all modes. Those of other modes matter only
// where the configuration is shown.
func setModeDefaults(c *proxyv1alpha1.KubeProxyConfiguration) {
	for _, period := range []*metav1.Duration{&c.IPVS.SyncPeriod, &c.IPTables.SyncPeriod, &c.NFTables.SyncPeriod} {
		period.Duration = cmp.Or(period.Duration, 30*time.Second)
	}
	for _, period := range []*metav1.Duration{&c.IPTables.MinSyncPeriod, &c.NFTables.MinSyncPeriod} {
		period.Duration = cmp.Or(period.Duration, time.Second)
	}
	setDefault(&c.IPTables.MasqueradeBit, 14)
	setDefault(&c.NFTables.MasqueradeBit, 14)
	setDefault(&c.IPTables.LocalhostNodePorts, true)
}

func setConntrackDefaults(c *proxyv1alpha1.KubeProxyConntrackConfiguration) {
	setDefault(&c.MaxPerCore, 32768)
	setDefault(&c.Min, 131072)
	setDefault(&c.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	// An hour instead of the kernel's minute: a socket may stay half closed for long,
	// and its last packets must still be translated.
	setDefault(&c.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})
}

// setDefault sets a nil pointer.
func setDefault[T any](p **T, value T) {
	if *p == nil {
		*p = ptr.To(value)
	}
}
