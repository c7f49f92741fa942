package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// nodeOf extracts the plan's input from a Node. The error names unusable fields; the
// other fields are used.
func nodeOf(n *corev1.Node) (plan.Node, error) {
	var out plan.Node
	if n == nil {
		return out, nil
	}
	var errs []error
	out.Zone = n.Labels[corev1.LabelTopologyZone]
	for _, c := range n.Spec.PodCIDRs {
		prefix, err := netip.ParsePrefix(c)
		if err != nil {
			errs = append(errs, fmt.Errorf("spec.podCIDRs: %q is not a CIDR", c))
			continue
		}
		out.PodCIDRs = append(out.PodCIDRs, prefix.Masked())
	}
	var invalid, err error
	out.Addresses, invalid = NodeAddresses(n)
	out.SNATSources, err = snatSources(n.Annotations[service.AnnotationSNATSources])
	return out, errors.Join(append(errs, invalid, err)...)
}

// NodeAddresses returns the internal and then the external addresses of a Node, as in
// Node.status.addresses. The error names the invalid ones, which are missing.
func NodeAddresses(n *corev1.Node) ([]netip.Addr, error) {
	var out []netip.Addr
	var errs []error
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for _, a := range n.Status.Addresses {
			if a.Type != kind {
				continue
			}
			addr := ip.ParseAddr(a.Address)
			if !addr.IsValid() || addr.Zone() != "" {
				errs = append(errs, fmt.Errorf("status.addresses: %q is not an IP address", a.Address))
				continue
			}
			out = append(out, addr)
		}
	}
	return out, errors.Join(errs...)
}

// snatSources parses the annotation.
func snatSources(text string) (map[string][]netip.Addr, error) {
	if text == "" {
		return nil, nil
	}
	out := map[string][]netip.Addr{}
	var errs []error
	for _, item := range strings.Split(text, ",") {
		link, address, ok := strings.Cut(strings.TrimSpace(item), "=")
		addr, err := netip.ParseAddr(address)
		if !ok || err != nil || link == "" {
			errs = append(errs, fmt.Errorf("metadata.annotations[%s]: %q is not INTERFACE=ADDRESS", service.AnnotationSNATSources, item))
			continue
		}
		key, _ := routing.LinkKey(link)
		out[key] = append(out[key], addr.Unmap())
	}
	return out, errors.Join(errs...)
}
