package manifest

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// checker collects the errors of one object. It validates the fields that the proxy
// relies on as an API server would. Defaults must have been set.
type checker struct{ errs field.ErrorList }

func (c *checker) invalid(path *field.Path, value any, want string) {
	c.errs = append(c.errs, field.Invalid(path, value, want))
}

func (c *checker) required(path *field.Path, why string) {
	c.errs = append(c.errs, field.Required(path, why))
}

// names validates a value by one of the API's rules for names.
func (c *checker) names(path *field.Path, value string, form func(string) []string) {
	for _, want := range form(value) {
		c.invalid(path, value, want)
	}
}

// oneOf validates a value against a list.
func oneOf[T ~string](c *checker, path *field.Path, value T, supported ...T) {
	if !slices.Contains(supported, value) {
		c.errs = append(c.errs, field.NotSupported(path, value, supported))
	}
}

func (c *checker) protocol(path *field.Path, p corev1.Protocol) {
	oneOf(c, path, p, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

func (c *checker) port(path *field.Path, port int32) {
	for _, want := range validation.IsValidPortNum(int(port)) {
		c.invalid(path, port, want)
	}
}

// ip parses an address and reports whether it is valid.
func (c *checker) ip(path *field.Path, s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		c.invalid(path, s, "must be an IP address, such as 10.0.0.1 or fd00::1")
		return a, false
	}
	return a, true
}

// unicast validates an address that any host can send to.
func (c *checker) unicast(path *field.Path, s string) (netip.Addr, bool) {
	a, ok := c.ip(path, s)
	if ok && (a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast()) {
		c.invalid(path, s, "must not be unspecified, loopback, link-local or multicast")
		return a, false
	}
	return a, ok
}

func (c *checker) cidr(path *field.Path, s string) {
	if p, err := netip.ParsePrefix(s); err != nil || p.Addr().Is4In6() {
		c.invalid(path, s, "must be a CIDR, such as 10.0.0.0/8 or fd00::/8")
	}
}

// metadata validates the identity of a namespaced object.
func (c *checker) metadata(namespace, name string, form func(string) []string) {
	path := field.NewPath("metadata")
	c.names(path.Child("namespace"), namespace, validation.IsDNS1123Label)
	if name == "" {
		c.required(path.Child("name"), "")
		return
	}
	c.names(path.Child("name"), name, form)
}

func (c *checker) slice(s *discoveryv1.EndpointSlice) {
	c.metadata(s.Namespace, s.Name, validation.IsDNS1123Subdomain)
	if s.Labels[discoveryv1.LabelServiceName] == "" {
		c.required(field.NewPath("metadata", "labels").Key(discoveryv1.LabelServiceName), "names the Service of the endpoints")
	}
	path := field.NewPath("addressType")
	if s.AddressType == "" {
		c.required(path, "must be IPv4 or IPv6")
	} else {
		oneOf(c, path, s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	}
	c.slicePorts(s.Ports)
	for i := range s.Endpoints {
		c.endpoint(field.NewPath("endpoints").Index(i), &s.Endpoints[i], s.AddressType)
	}
}

func (c *checker) slicePorts(ports []discoveryv1.EndpointPort) {
	seen := map[string]bool{}
	for i, p := range ports {
		path := field.NewPath("ports").Index(i)
		if *p.Name != "" {
			c.names(path.Child("name"), *p.Name, validation.IsDNS1123Label)
		}
		if seen[*p.Name] {
			c.errs = append(c.errs, field.Duplicate(path.Child("name"), *p.Name))
		}
		seen[*p.Name] = true
		c.protocol(path.Child("protocol"), *p.Protocol)
		if p.Port != nil {
			c.port(path.Child("port"), *p.Port)
		}
	}
}

func (c *checker) endpoint(path *field.Path, e *discoveryv1.Endpoint, addressType discoveryv1.AddressType) {
	if len(e.Addresses) == 0 {
		c.required(path.Child("addresses"), "must have an address")
	}
	for i, s := range e.Addresses {
		c.endpointAddress(path.Child("addresses").Index(i), s, addressType)
	}
	if e.NodeName != nil {
		c.names(path.Child("nodeName"), *e.NodeName, validation.IsDNS1123Subdomain)
	}
	if e.Hints == nil {
		return
	}
	for i, zone := range e.Hints.ForZones {
		c.names(path.Child("hints", "forZones").Index(i).Child("name"), zone.Name, validation.IsValidLabelValue)
	}
	for i, node := range e.Hints.ForNodes {
		c.names(path.Child("hints", "forNodes").Index(i).Child("name"), node.Name, validation.IsDNS1123Subdomain)
	}
}

// endpointAddress validates an address against the slice's type. Host names are
// accepted: their slices are not used.
func (c *checker) endpointAddress(path *field.Path, s string, addressType discoveryv1.AddressType) {
	if addressType == discoveryv1.AddressTypeFQDN {
		return
	}
	a, ok := c.unicast(path, s)
	if ok && addressType != "" && string(familyOf(a)) != string(addressType) {
		c.invalid(path, s, "must be "+string(addressType)+", the slice's addressType")
	}
}

func (c *checker) node(n *corev1.Node) {
	path := field.NewPath("spec")
	for i, s := range n.Spec.PodCIDRs {
		c.cidr(path.Child("podCIDRs").Index(i), s)
	}
	if len(n.Spec.PodCIDRs) > 0 && n.Spec.PodCIDR != n.Spec.PodCIDRs[0] {
		c.invalid(path.Child("podCIDR"), n.Spec.PodCIDR, "must be the first of spec.podCIDRs")
	}
	for i, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			c.ip(field.NewPath("status", "addresses").Index(i).Child("address"), strings.TrimSpace(a.Address))
		}
	}
}
