package manifest

import (
	"cmp"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// The functions here set the defaults that an API server would set, for the fields that
// the proxy reads.

func defaultService(s *corev1.Service) {
	s.Namespace = cmp.Or(s.Namespace, corev1.NamespaceDefault)
	spec := &s.Spec
	spec.Type = cmp.Or(spec.Type, corev1.ServiceTypeClusterIP)
	for i := range spec.Ports {
		defaultServicePort(&spec.Ports[i])
	}
	defaultAffinity(spec)
	if spec.InternalTrafficPolicy == nil && spec.Type != corev1.ServiceTypeExternalName {
		spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyCluster)
	}
	if hasExternalPolicy(s) {
		spec.ExternalTrafficPolicy = cmp.Or(spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	defaultClusterIPs(spec)
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		defaultLoadBalancer(s)
	}
}

func defaultServicePort(p *corev1.ServicePort) {
	p.Protocol = cmp.Or(p.Protocol, corev1.ProtocolTCP)
	if p.TargetPort == (intstr.IntOrString{}) || p.TargetPort == intstr.FromString("") {
		p.TargetPort = intstr.FromInt32(p.Port)
	}
}

func defaultAffinity(spec *corev1.ServiceSpec) {
	spec.SessionAffinity = cmp.Or(spec.SessionAffinity, corev1.ServiceAffinityNone)
	if spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return
	}
	c := spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(corev1.DefaultClientIPServiceAffinitySeconds)},
		}
	}
}

// defaultClusterIPs copies the two fields to each other if one is empty, and derives
// the families from the addresses.
func defaultClusterIPs(spec *corev1.ServiceSpec) {
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if spec.ClusterIP == "" && len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	if len(spec.IPFamilies) > 0 || spec.ClusterIP == corev1.ClusterIPNone {
		return
	}
	for _, s := range spec.ClusterIPs {
		// An invalid address is reported later.
		if a, err := netip.ParseAddr(s); err == nil {
			spec.IPFamilies = append(spec.IPFamilies, familyOf(a))
		}
	}
}

func defaultLoadBalancer(s *corev1.Service) {
	if s.Spec.AllocateLoadBalancerNodePorts == nil {
		s.Spec.AllocateLoadBalancerNodePorts = ptr.To(true)
	}
	ingress := s.Status.LoadBalancer.Ingress
	for i := range ingress {
		if ingress[i].IP != "" && ingress[i].IPMode == nil {
			ingress[i].IPMode = ptr.To(corev1.LoadBalancerIPModeVIP)
		}
	}
}

// hasExternalPolicy reports whether spec.externalTrafficPolicy applies to a Service.
func hasExternalPolicy(s *corev1.Service) bool {
	t := s.Spec.Type
	return t == corev1.ServiceTypeNodePort || t == corev1.ServiceTypeLoadBalancer ||
		t == corev1.ServiceTypeClusterIP && len(s.Spec.ExternalIPs) > 0
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

// defaultSlice leaves conditions unset: unset has a meaning of its own.
func defaultSlice(s *discoveryv1.EndpointSlice) {
	s.Namespace = cmp.Or(s.Namespace, corev1.NamespaceDefault)
	for i := range s.Ports {
		p := &s.Ports[i]
		p.Name = ptr.To(ptr.Deref(p.Name, ""))
		p.Protocol = ptr.To(ptr.Deref(p.Protocol, corev1.ProtocolTCP))
	}
}

func defaultNode(n *corev1.Node) {
	if len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR != "" {
		n.Spec.PodCIDRs = []string{n.Spec.PodCIDR}
	}
	if n.Spec.PodCIDR == "" && len(n.Spec.PodCIDRs) > 0 {
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	}
}
