package manifest

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxAffinitySeconds is the API's limit: a day.
const maxAffinitySeconds = 86400

var specPath = field.NewPath("spec")

func (c *checker) service(s *corev1.Service) {
	c.metadata(s.Namespace, s.Name, validation.IsDNS1123Label)
	spec := &s.Spec
	oneOf(c, specPath.Child("type"), spec.Type,
		corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	c.clusterIPs(spec)
	c.servicePorts(spec)
	for i, s := range spec.ExternalIPs {
		c.unicast(specPath.Child("externalIPs").Index(i), s)
	}
	c.affinity(spec)
	c.policies(s)
	c.loadBalancer(s)
}

// clusterIPs checks that there are one or two, at most one per family. An API server
// would allocate one; here it must be given.
func (c *checker) clusterIPs(spec *corev1.ServiceSpec) {
	path := specPath.Child("clusterIPs")
	switch {
	case spec.ClusterIP == "":
		c.required(specPath.Child("clusterIP"), "without an API server, an address or None must be given")
		return
	case spec.ClusterIPs[0] != spec.ClusterIP:
		c.invalid(path.Index(0), spec.ClusterIPs[0], "must be the same as spec.clusterIP")
	case len(spec.ClusterIPs) > 2:
		c.errs = append(c.errs, field.TooMany(path, len(spec.ClusterIPs), 2))
	}
	var families []corev1.IPFamily
	for i, s := range spec.ClusterIPs {
		a, ok := c.unicast(path.Index(i), s)
		if !ok {
			return
		}
		families = append(families, familyOf(a))
	}
	if len(families) == 2 && families[0] == families[1] {
		c.invalid(path.Index(1), spec.ClusterIPs[1], "must be of the other family")
	}
	c.ipFamilies(spec.IPFamilies, families)
}

// ipFamilies compares the families with those of the addresses.
func (c *checker) ipFamilies(given, found []corev1.IPFamily) {
	path := specPath.Child("ipFamilies")
	if len(given) != len(found) {
		c.invalid(path, given, "must have one for each of spec.clusterIPs")
		return
	}
	for i := range given {
		if given[i] != found[i] {
			c.invalid(path.Index(i), given[i], "must be "+string(found[i])+", as the cluster IP is")
		}
	}
}

func (c *checker) servicePorts(spec *corev1.ServiceSpec) {
	path := specPath.Child("ports")
	if len(spec.Ports) == 0 {
		c.required(path, "must have a port")
	}
	type number struct {
		protocol corev1.Protocol
		port     int32
	}
	names, ports, nodePorts := map[string]bool{}, map[number]bool{}, map[number]bool{}
	for i := range spec.Ports {
		p, at := &spec.Ports[i], path.Index(i)
		c.servicePort(at, p, spec)
		if names[p.Name] && p.Name != "" {
			c.errs = append(c.errs, field.Duplicate(at.Child("name"), p.Name))
		}
		if ports[number{p.Protocol, p.Port}] {
			c.errs = append(c.errs, field.Duplicate(at.Child("port"), p.Port))
		}
		if p.NodePort != 0 && nodePorts[number{p.Protocol, p.NodePort}] {
			c.errs = append(c.errs, field.Duplicate(at.Child("nodePort"), p.NodePort))
		}
		names[p.Name], ports[number{p.Protocol, p.Port}], nodePorts[number{p.Protocol, p.NodePort}] = true, true, true
	}
}

// servicePort validates one port. A node port of 0 means none.
func (c *checker) servicePort(path *field.Path, p *corev1.ServicePort, spec *corev1.ServiceSpec) {
	switch {
	case p.Name != "":
		c.names(path.Child("name"), p.Name, validation.IsDNS1123Label)
	case len(spec.Ports) > 1:
		c.required(path.Child("name"), "each port needs a name if there is more than one")
	}
	c.protocol(path.Child("protocol"), p.Protocol)
	c.port(path.Child("port"), p.Port)
	if p.TargetPort.Type == intstr.Int {
		// Defaulted from the port, whose error has been reported.
		if p.TargetPort.IntVal != p.Port {
			c.port(path.Child("targetPort"), p.TargetPort.IntVal)
		}
	} else {
		c.names(path.Child("targetPort"), p.TargetPort.StrVal, validation.IsValidPortName)
	}
	if p.NodePort == 0 {
		return
	}
	c.port(path.Child("nodePort"), p.NodePort)
	if spec.Type == corev1.ServiceTypeClusterIP {
		c.errs = append(c.errs, field.Forbidden(path.Child("nodePort"), "may only be set if spec.type is NodePort or LoadBalancer"))
	}
}

func (c *checker) affinity(spec *corev1.ServiceSpec) {
	oneOf(c, specPath.Child("sessionAffinity"), spec.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	if spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return
	}
	seconds := *spec.SessionAffinityConfig.ClientIP.TimeoutSeconds
	if seconds < 1 || seconds > maxAffinitySeconds {
		c.invalid(specPath.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), seconds, "must be from 1 to 86400")
	}
}

func (c *checker) policies(s *corev1.Service) {
	spec := &s.Spec
	external := specPath.Child("externalTrafficPolicy")
	if hasExternalPolicy(s) {
		oneOf(c, external, spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	} else if spec.ExternalTrafficPolicy != "" {
		c.invalid(external, spec.ExternalTrafficPolicy, "must not be set for a Service that is not reachable externally")
	}
	if p := spec.InternalTrafficPolicy; p != nil {
		oneOf(c, specPath.Child("internalTrafficPolicy"), *p, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	}
	if d := spec.TrafficDistribution; d != nil {
		oneOf(c, specPath.Child("trafficDistribution"), *d,
			corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode)
	}
}

func (c *checker) loadBalancer(s *corev1.Service) {
	spec := &s.Spec
	if port := spec.HealthCheckNodePort; port != 0 {
		path := specPath.Child("healthCheckNodePort")
		c.port(path, port)
		if spec.Type != corev1.ServiceTypeLoadBalancer || spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
			c.errs = append(c.errs, field.Forbidden(path, "may only be set if spec.type is LoadBalancer and spec.externalTrafficPolicy is Local"))
		}
	}
	ranges := specPath.Child("loadBalancerSourceRanges")
	if len(spec.LoadBalancerSourceRanges) > 0 && spec.Type != corev1.ServiceTypeLoadBalancer {
		c.errs = append(c.errs, field.Forbidden(ranges, "may only be set if spec.type is LoadBalancer"))
	}
	for i, cidr := range spec.LoadBalancerSourceRanges {
		// The API accepts surrounding spaces.
		c.cidr(ranges.Index(i), strings.TrimSpace(cidr))
	}
	for i, ingress := range s.Status.LoadBalancer.Ingress {
		path := field.NewPath("status", "loadBalancer", "ingress").Index(i)
		if ingress.IP == "" {
			continue
		}
		c.unicast(path.Child("ip"), ingress.IP)
		if m := ingress.IPMode; m != nil {
			oneOf(c, path.Child("ipMode"), *m, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)
		}
	}
}
