package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// defaultAffinitySeconds is the API server's default for ClientIP affinity.
const defaultAffinitySeconds = corev1.DefaultClientIPServiceAffinitySeconds

// maxAffinitySeconds is the API's upper limit, one day.
const maxAffinitySeconds = 86400

// APIServer is the Service through which Pods reach the API server. The API server
// creates it and its EndpointSlice of the same name. Pods that use the API
// server cannot start without it.
var APIServer = types.NamespacedName{Namespace: corev1.NamespaceDefault, Name: "kubernetes"}

// Selector selects the Services that are ours: as in kube-proxy, those without the
// label that names another proxy.
func Selector() labels.Selector { return selector }

// EndpointSliceSelector excludes slices of headless Services. As in kube-proxy, it does
// not evaluate the proxy label: the controller copies it from the Service to its slices
// with a delay.
func EndpointSliceSelector() labels.Selector { return sliceSelector }

// Built once: every Service and EndpointSlice is matched against them.
var (
	selector      = absent(labelProxyName)
	sliceSelector = absent(corev1.IsHeadlessService)
)

const labelProxyName = "service.kubernetes.io/service-proxy-name"

// HasLabel reports whether a label of a Service or EndpointSlice is evaluated by the
// proxy.
func HasLabel(key string) bool {
	return key == discoveryv1.LabelServiceName || key == labelProxyName || key == corev1.IsHeadlessService
}

func absent(key string) labels.Selector {
	s := labels.NewSelector()
	// A constant key with no values is always a valid requirement.
	if r, err := labels.NewRequirement(key, selection.DoesNotExist, nil); err == nil {
		s = s.Add(*r)
	}
	return s
}

// Proxied reports whether a Service gets virtual servers: it is not headless, not of
// type ExternalName, and not another proxy's.
func Proxied(svc *corev1.Service) bool {
	return svc.Spec.ClusterIP != corev1.ClusterIPNone &&
		svc.Spec.ClusterIP != "" &&
		svc.Spec.Type != corev1.ServiceTypeExternalName &&
		Selector().Matches(labels.Set(svc.Labels))
}

// ServiceOf returns the Service that an EndpointSlice belongs to. It returns false for
// slices that are not ours: headless, of host names, or without an owner.
func ServiceOf(slice *discoveryv1.EndpointSlice) (types.NamespacedName, bool) {
	name := slice.Labels[discoveryv1.LabelServiceName]
	ours := name != "" && slice.AddressType != discoveryv1.AddressTypeFQDN &&
		EndpointSliceSelector().Matches(labels.Set(slice.Labels))
	return types.NamespacedName{Namespace: slice.Namespace, Name: name}, ours
}

// builder collects errors about an object while the rest of it is built.
type builder struct {
	kind, namespace, name string // of the object
	errs                  []error
}

func (b *builder) errorf(field, format string, args ...any) {
	b.errs = append(b.errs, fmt.Errorf("%s %s/%s: %s: %s", b.kind, b.namespace, b.name, field, fmt.Sprintf(format, args...)))
}

// Build builds the model of a Service from its API object and its EndpointSlices, in
// any order. The error lists every unusable field with the name of its object. The
// returned Service omits these fields and is to be programmed even if there is an
// error.
func Build(svc *corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) (Service, error) {
	parsed := make([]*Slice, len(endpointSlices))
	for i, slice := range endpointSlices {
		parsed[i] = parseSlice(slice)
	}
	return build(svc).with(parsed, &Scratch{})
}

// build parses the fields of a Service, without endpoints.
func build(svc *corev1.Service) *fields {
	b := &builder{kind: "Service", namespace: svc.Namespace, name: svc.Name}
	f := &fields{}
	f.Service = Service{
		Name:                types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name},
		UID:                 svc.UID,
		Created:             svc.CreationTimestamp.Time,
		ClusterIPs:          b.clusterIPs(svc),
		ExternalIPs:         b.externalIPs(svc),
		LoadBalancers:       b.loadBalancers(svc),
		SourceRanges:        b.sourceRanges(svc),
		ExternalLocal:       externalLocal(svc),
		Masquerade:          b.flag(svc, AnnotationMasquerade),
		InternalLocal:       svc.Spec.InternalTrafficPolicy != nil && *svc.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal,
		Scheduling:          b.scheduling(svc),
		AffinitySeconds:     b.affinity(svc),
		OnePacket:           b.flag(svc, AnnotationOnePacket),
		MaxConnections:      b.maxConnections(svc),
		HealthCheckNodePort: b.healthCheckNodePort(svc),
	}
	s := &f.Service
	if s.OnePacket && s.AffinitySeconds > 0 {
		b.annotationf(AnnotationOnePacket, "cannot be combined with session affinity")
		s.OnePacket = false
	}
	s.ExternalIPs = b.served(s, "spec.externalIPs", s.ExternalIPs)
	s.LoadBalancers = b.served(s, "status.loadBalancer.ingress", s.LoadBalancers)
	f.errs, b.errs = b.errs, nil
	f.weights = b.weights(svc)
	s.Ports = b.ports(svc)
	f.errsOfPorts = b.errs
	return f
}

func (b *builder) clusterIPs(svc *corev1.Service) []netip.Addr {
	if len(svc.Spec.ClusterIPs) > 0 {
		return b.addresses("spec.clusterIPs", svc.Spec.ClusterIPs)
	}
	return b.address(nil, svc.Spec.ClusterIP, func() string { return "spec.clusterIP" })
}

// served removes addresses of families that the Service does not have.
func (b *builder) served(s *Service, field string, list []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(list, func(a netip.Addr) bool {
		if s.Has(ip.Of(a)) {
			return false
		}
		b.errorf(field, "%s is %s, but the Service has no cluster IP of this family", a, ip.Of(a))
		return true
	})
}

// addresses parses a list without duplicates.
func (b *builder) addresses(field string, list []string) []netip.Addr {
	var out []netip.Addr
	for i, s := range list {
		out = b.address(out, s, func() string { return fmt.Sprintf("%s[%d]", field, i) })
	}
	return out
}

// address parses one address and appends it to a list that does not contain it yet. The
// name of the field is only needed for an error.
func (b *builder) address(list []netip.Addr, s string, field func() string) []netip.Addr {
	a, err := parseAddr(s)
	if err != nil {
		b.errorf(field(), "%v", err)
		return list
	}
	if slices.Contains(list, a) {
		return list
	}
	return append(list, a)
}

// parseAddr parses an address that can be a VIP or an endpoint.
func parseAddr(s string) (netip.Addr, error) {
	a := ip.ParseAddr(s)
	switch {
	case !a.IsValid():
		return a, fmt.Errorf("%q is not an IP address", s)
	case a.Zone() != "":
		return a, fmt.Errorf("%q has a zone", s)
	case a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast() && a.Is6(), a == broadcast:
		return a, fmt.Errorf("%q is unspecified, loopback, link-local, multicast or broadcast and cannot be served", s)
	}
	return a, nil
}

// broadcast is the limited broadcast address.
var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// externalIPs returns the addresses of spec.externalIPs. Link-local addresses are
// rejected, as by the API server: they belong to the link or to the machine, such as a
// cloud's metadata service with its credentials at 169.254.169.254.
func (b *builder) externalIPs(svc *corev1.Service) []netip.Addr {
	const field = "spec.externalIPs"
	return slices.DeleteFunc(b.addresses(field, svc.Spec.ExternalIPs), func(a netip.Addr) bool {
		if a.IsLinkLocalUnicast() {
			b.errorf(field, "%s is link-local and cannot be served", a)
		}
		return a.IsLinkLocalUnicast()
	})
}

// loadBalancers returns the addresses of the load balancer's status whose traffic
// reaches the node with the address unchanged (ipMode VIP, the default; KEP-1860). As in
// kube-proxy, the type of the Service does not matter: the API server clears the status of other
// types from 1.27.
func (b *builder) loadBalancers(svc *corev1.Service) []netip.Addr {
	leftToCloud := b.leftToCloud(svc)
	var vips []netip.Addr
	for i, in := range svc.Status.LoadBalancer.Ingress {
		proxied := leftToCloud || in.IPMode != nil && *in.IPMode != corev1.LoadBalancerIPModeVIP
		if in.IP != "" && !proxied {
			vips = b.address(vips, in.IP, func() string { return fmt.Sprintf("status.loadBalancer.ingress[%d].ip", i) })
		}
	}
	return vips
}

// leftToCloud reads AnnotationIPMode. An ipMode in the status applies independently of it.
func (b *builder) leftToCloud(svc *corev1.Service) bool {
	mode, set := svc.Annotations[AnnotationIPMode]
	switch mode {
	case string(corev1.LoadBalancerIPModeProxy):
		return true
	case string(corev1.LoadBalancerIPModeVIP):
	default:
		if set {
			b.annotationf(AnnotationIPMode, "invalid value %q, want Proxy or VIP", mode)
		}
	}
	return false
}

// sourceRanges returns nil only if every source is allowed. If no range of the list is
// usable it returns one range that matches no real source: the Service must not become
// open to all.
func (b *builder) sourceRanges(svc *corev1.Service) []netip.Prefix {
	if len(svc.Spec.LoadBalancerSourceRanges) == 0 {
		return nil
	}
	var out []netip.Prefix
	for i, s := range svc.Spec.LoadBalancerSourceRanges {
		p, err := ip.ParsePrefix(strings.TrimSpace(s)) // the API server accepts spaces around it
		if err != nil {
			b.errorf(fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i), "%v", err)
			continue
		}
		out = append(out, p)
	}
	if len(out) == 0 {
		return []netip.Prefix{noSource}
	}
	return out
}

// noSource is a range that matches no packet.
var noSource = netip.PrefixFrom(broadcast, 32)

// externalLocal reports whether externalTrafficPolicy is Local and, as in kube-proxy, counts: the
// Service is reachable externally by its type or by external IPs. The API server rejects the field for
// others.
func externalLocal(svc *corev1.Service) bool {
	byType := svc.Spec.Type == corev1.ServiceTypeLoadBalancer || svc.Spec.Type == corev1.ServiceTypeNodePort
	return (byType || len(svc.Spec.ExternalIPs) > 0) && svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

func (b *builder) affinity(svc *corev1.Service) uint32 {
	if svc.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	c := svc.Spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return uint32(defaultAffinitySeconds)
	}
	t := *c.ClientIP.TimeoutSeconds
	if t <= 0 || t > maxAffinitySeconds {
		b.errorf("spec.sessionAffinityConfig.clientIP.timeoutSeconds",
			"%d is not between 1 and %d, using %d", t, maxAffinitySeconds, defaultAffinitySeconds)
		return uint32(defaultAffinitySeconds)
	}
	return uint32(t)
}

// flag reads a boolean annotation.
func (b *builder) flag(svc *corev1.Service, annotation string) bool {
	text, set := svc.Annotations[annotation]
	if !set {
		return false
	}
	value, err := strconv.ParseBool(text)
	if err != nil {
		b.annotationf(annotation, "invalid value %q, want true or false", text)
	}
	return value
}

func (b *builder) healthCheckNodePort(svc *corev1.Service) uint16 {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer ||
		svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return 0
	}
	p := svc.Spec.HealthCheckNodePort
	if !portValid(p, true) {
		b.errorf("spec.healthCheckNodePort", "%d is not a port", p)
		return 0
	}
	return uint16(p)
}

// port validates a port number of an element of a list; zero is valid if the field is
// optional.
func (b *builder) port(list string, i int, field string, n int32, optional bool) (uint16, bool) {
	if portValid(n, optional) {
		return uint16(n), true
	}
	b.errorf(fmt.Sprintf("%s[%d]%s", list, i, field), "%d is not a port", n)
	return 0, false
}

func portValid(n int32, optional bool) bool { return n == 0 && optional || n >= 1 && n <= 65535 }

// ports returns the ports without endpoints.
func (b *builder) ports(svc *corev1.Service) []Port {
	var out []Port
	for i := range svc.Spec.Ports {
		port, ok := b.servicePort(i, &svc.Spec.Ports[i])
		if !ok {
			continue
		}
		if slices.ContainsFunc(out, func(p Port) bool { return p.Protocol == port.Protocol && p.Port == port.Port }) {
			b.errorf(fmt.Sprintf("spec.ports[%d]", i), "%s %d appears twice", port.Protocol, port.Port)
			continue
		}
		if out == nil {
			out = make([]Port, 0, len(svc.Spec.Ports))
		}
		out = append(out, port)
	}
	return out
}

func (b *builder) servicePort(i int, p *corev1.ServicePort) (Port, bool) {
	protocol, err := parseProtocol(p.Protocol)
	if err != nil {
		b.errorf(fmt.Sprintf("spec.ports[%d].protocol", i), "%v", err)
		return Port{}, false
	}
	number, ok := b.port("spec.ports", i, ".port", p.Port, false)
	if !ok {
		return Port{}, false
	}
	// An unusable node port does not affect the rest of the port.
	nodePort, _ := b.port("spec.ports", i, ".nodePort", p.NodePort, true)
	return Port{Name: p.Name, Protocol: protocol, Port: number, NodePort: nodePort}, true
}

func parseProtocol(p corev1.Protocol) (ip.Protocol, error) {
	if p == "" {
		return ip.TCP, nil
	}
	return ip.ParseProtocol(string(p))
}
