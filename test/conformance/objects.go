package conformance

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Namespace is the namespace of all objects.
const Namespace = "default"

const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// Object returns the Service as an API object, with its status.
func (s *Service) Object() *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: s.Name(), Namespace: Namespace, Labels: labels(s.NamedByOtherProxy, s.LabelledHeadless)},
		Spec: corev1.ServiceSpec{
			Type:                     corev1.ServiceType(s.Type),
			SessionAffinity:          corev1.ServiceAffinityNone,
			PublishNotReadyAddresses: s.PublishNotReady,
		},
	}
	if s.Type == "ExternalName" {
		svc.Spec.ExternalName, svc.Spec.SessionAffinity = "elsewhere.example.com", ""
		return svc
	}
	s.setAddresses(&svc.Spec)
	s.setPolicies(&svc.Spec)
	for i, p := range s.Ports {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name: p.Name, Protocol: corev1.Protocol(p.Protocol()), Port: p.Number, NodePort: s.NodePort(i),
		})
	}
	s.setLoadBalancer(svc)
	return svc
}

func labels(otherProxy, headless bool) map[string]string {
	out := map[string]string{}
	if otherProxy {
		out[proxyNameLabel] = "another"
	}
	if headless {
		out[corev1.IsHeadlessService] = ""
	}
	return out
}

func (s *Service) setAddresses(spec *corev1.ServiceSpec) {
	policy := corev1.IPFamilyPolicySingleStack
	if len(s.Families) > 1 {
		policy = corev1.IPFamilyPolicyRequireDualStack
	}
	spec.IPFamilyPolicy = &policy
	for _, f := range s.Families {
		spec.IPFamilies = append(spec.IPFamilies, map[rune]corev1.IPFamily{'4': corev1.IPv4Protocol, '6': corev1.IPv6Protocol}[f])
	}
	spec.ClusterIPs = s.ClusterIPs()
	if s.Type == "Headless" {
		spec.Type, spec.ClusterIPs = corev1.ServiceTypeClusterIP, []string{corev1.ClusterIPNone}
	}
	spec.ClusterIP = spec.ClusterIPs[0]
	spec.ExternalIPs = s.ExternalIPs
}

func (s *Service) setPolicies(spec *corev1.ServiceSpec) {
	if s.Exposed() {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		if s.ExternalLocal {
			spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}
	}
	internal := corev1.ServiceInternalTrafficPolicyCluster
	if s.InternalLocal {
		internal = corev1.ServiceInternalTrafficPolicyLocal
	}
	spec.InternalTrafficPolicy = &internal
	if s.TrafficDistribution != "" {
		spec.TrafficDistribution = &s.TrafficDistribution
	}
	if s.AffinitySeconds > 0 {
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &s.AffinitySeconds}}
	}
}

func (s *Service) setLoadBalancer(svc *corev1.Service) {
	if s.Type != "LoadBalancer" {
		return
	}
	nodePorts := !s.NoNodePorts
	svc.Spec.AllocateLoadBalancerNodePorts = &nodePorts
	svc.Spec.LoadBalancerSourceRanges = s.SourceRanges
	if s.ExternalLocal {
		svc.Spec.HealthCheckNodePort = int32(31000 + s.Slot)
	}
	for _, in := range s.Ingress {
		mode := corev1.LoadBalancerIPMode(in.Mode)
		ingress := corev1.LoadBalancerIngress{IP: in.IP, IPMode: &mode}
		if in.Mode == "Hostname" {
			ingress = corev1.LoadBalancerIngress{Hostname: "balancer.example.com"}
		}
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, ingress)
	}
}

var addressTypes = map[string]discoveryv1.AddressType{
	"4": discoveryv1.AddressTypeIPv4, "6": discoveryv1.AddressTypeIPv6, "FQDN": discoveryv1.AddressTypeFQDN,
}

// Object returns the EndpointSlice as an API object.
func (s *Slice) Object() *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: s.Name(), Namespace: Namespace, Labels: labels(s.NamedByOtherProxy, s.LabelledHeadless)},
		AddressType: addressTypes[s.Family],
	}
	out.Labels[discoveryv1.LabelServiceName] = serviceName(s.Slot)
	for _, p := range s.Ports {
		protocol := corev1.Protocol(protocolOf(p.Name))
		port := discoveryv1.EndpointPort{Name: &p.Name, Protocol: &protocol}
		if p.Number != 0 {
			port.Port = &p.Number
		}
		out.Ports = append(out.Ports, port)
	}
	for _, e := range s.Endpoints {
		out.Endpoints = append(out.Endpoints, e.object(s.Family))
	}
	return out
}

func (e Endpoint) object(family string) discoveryv1.Endpoint {
	host := Hosts[e.Host]
	address := map[string]string{"4": host.IPv4, "6": host.IPv6, "FQDN": "host.example.com"}[family]
	out := discoveryv1.Endpoint{Addresses: []string{address}}
	out.Conditions.Ready, out.Conditions.Serving, out.Conditions.Terminating = e.Conditions()
	if host.Node != "" {
		out.NodeName = &host.Node
	}
	if len(e.Zones)+len(e.Nodes) > 0 {
		out.Hints = &discoveryv1.EndpointHints{}
		for _, z := range e.Zones {
			out.Hints.ForZones = append(out.Hints.ForZones, discoveryv1.ForZone{Name: z})
		}
		for _, n := range e.Nodes {
			out.Hints.ForNodes = append(out.Hints.ForNodes, discoveryv1.ForNode{Name: n})
		}
	}
	return out
}
