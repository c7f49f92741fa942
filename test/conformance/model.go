// Package conformance holds kube-ipvs to kube-proxy's IPVS mode: both run side
// by side against one API server, and after every change what they have put
// into their kernels is compared. What may differ, and why, is a table
// (Differences).
package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Change is one write to the API server: exactly one field is set.
type Change struct {
	Service       *Service `json:",omitempty"`
	DeleteService string   `json:",omitempty"`
	Slice         *Slice   `json:",omitempty"`
	DeleteSlice   string   `json:",omitempty"`
	Zone          *string  `json:",omitempty"` // of the Node; "": it has no such label
}

// Step is what changes at once; then both sides are compared.
type Step []Change

// Service is an API object in a shorter form.
type Service struct {
	Slot                int    // which one it is; names and numbers follow from it
	Type                string // ClusterIP, NodePort, LoadBalancer, ExternalName, Headless
	Families            string // "4", "6", "46" or "64"; the first is the primary one
	Ports               []Port
	ExternalIPs         []string  `json:",omitempty"`
	Ingress             []Ingress `json:",omitempty"`
	SourceRanges        []string  `json:",omitempty"`
	ExternalLocal       bool      `json:",omitempty"`
	InternalLocal       bool      `json:",omitempty"`
	AffinitySeconds     int32     `json:",omitempty"`
	NoNodePorts         bool      `json:",omitempty"` // allocateLoadBalancerNodePorts: false
	PublishNotReady     bool      `json:",omitempty"`
	TrafficDistribution string    `json:",omitempty"`
	NamedByOtherProxy   bool      `json:",omitempty"` // the label service-proxy-name
	LabelledHeadless    bool      `json:",omitempty"` // the label headless, which Services have no use for
}

// Port is one of a Service's. Its name, of which the protocol follows, binds it
// to ports of slices.
type Port struct {
	Name   string
	Number int32
}

// Protocol is TCP unless the name says otherwise.
func (p Port) Protocol() string { return protocolOf(p.Name) }

func protocolOf(portName string) string {
	switch portName {
	case "datagram":
		return "UDP"
	case "stream":
		return "SCTP"
	}
	return "TCP"
}

// Ingress is an entry of status.loadBalancer. Mode is VIP or Proxy; Hostname has
// a name in place of the IP.
type Ingress struct{ IP, Mode string }

// Slice is an EndpointSlice in a shorter form.
type Slice struct {
	Slot      int // the Service's
	Number    int // among the Service's slices of this family
	Family    string
	Ports     []SlicePort
	Endpoints []Endpoint

	NamedByOtherProxy bool `json:",omitempty"`
	LabelledHeadless  bool `json:",omitempty"`
}

// SlicePort is a target port; it is named, as its number may differ from slice
// to slice. Number 0 is none at all.
type SlicePort struct {
	Name   string
	Number int32
}

// Endpoint is one of Hosts, by its number, and its state.
type Endpoint struct {
	Host  int
	State string   // one of EndpointStates
	Zones []string `json:",omitempty"`
	Nodes []string `json:",omitempty"`
}

// EndpointStates are combinations of the three conditions, as controllers write
// them, and as they may be left out.
var EndpointStates = []string{"ready", "unset", "not ready", "terminating", "terminated", "ready and terminating"}

// Conditions are ready, serving, terminating; nil is not written.
func (e Endpoint) Conditions() (ready, serving, terminating *bool) {
	yes, no := new(true), new(false)
	switch e.State {
	case "ready":
		return yes, yes, no
	case "not ready":
		return no, no, no
	case "terminating":
		return no, yes, yes
	case "terminated":
		return no, no, yes
	case "ready and terminating":
		return yes, yes, yes
	}
	return nil, nil, nil
}

// Host is where an endpoint can be. Node is "" if the slice does not say.
type Host struct {
	IPv4, IPv6, Node string
}

// The two nodes; both programs believe to be on the first.
const (
	NodeName  = "conformant"
	OtherNode = "other"
	NodeIPv4  = "192.168.50.11"
	NodeIPv6  = "fd00:50::11"
)

// Hosts are pods, and the node itself, in whose network pods may be.
var Hosts = []Host{
	{"10.244.1.2", "fd00:244:1::2", NodeName},
	{"10.244.2.2", "fd00:244:2::2", OtherNode},
	{"10.244.1.3", "fd00:244:1::3", NodeName},
	{"10.244.2.3", "fd00:244:2::3", OtherNode},
	{"10.244.2.4", "fd00:244:2::4", ""},
	{NodeIPv4, NodeIPv6, NodeName},
}

// Name is the object's name.
func (s *Service) Name() string { return serviceName(s.Slot) }

func serviceName(slot int) string { return fmt.Sprintf("service-%d", slot) }

// Name is the object's name.
func (s *Slice) Name() string {
	return fmt.Sprintf("%s-ipv%s-%d", serviceName(s.Slot), strings.ToLower(s.Family), s.Number)
}

// ClusterIPs are the Service's own, in the order of its families.
func (s *Service) ClusterIPs() []string {
	var out []string
	for _, f := range s.Families {
		out = append(out, map[rune]string{
			'4': fmt.Sprintf("10.96.1.%d", 10+s.Slot), '6': fmt.Sprintf("fd00:10:96::1%d", s.Slot),
		}[f])
	}
	return out
}

// Exposed tells whether there is a way in from outside of the cluster.
func (s *Service) Exposed() bool {
	return s.Type == "NodePort" || s.Type == "LoadBalancer" || len(s.ExternalIPs) > 0 && s.Type == "ClusterIP"
}

// NodePort is that of a port by its place, 0 if it has none.
func (s *Service) NodePort(place int) int32 {
	if s.Type == "NodePort" || s.Type == "LoadBalancer" && !s.NoNodePorts {
		return FirstNodePort + int32(10*s.Slot+place)
	}
	return 0
}

// FirstNodePort is that of the first port of the first Service.
const FirstNodePort = 30000

// Served tells whether a proxy has anything to do for it.
func (s *Service) Served() bool {
	return !s.NamedByOtherProxy && s.Type != "ExternalName" && s.Type != "Headless"
}

// World is what the API server holds.
type World struct {
	Zone     string
	Services map[string]*Service
	Slices   map[string]*Slice
}

// NewWorld is empty.
func NewWorld() *World {
	return &World{Services: map[string]*Service{}, Slices: map[string]*Slice{}}
}

// Apply notes a change.
func (w *World) Apply(c Change) {
	switch {
	case c.Service != nil:
		w.Services[c.Service.Name()] = c.Service
	case c.DeleteService != "":
		delete(w.Services, c.DeleteService)
	case c.Slice != nil:
		w.Slices[c.Slice.Name()] = c.Slice
	case c.DeleteSlice != "":
		delete(w.Slices, c.DeleteSlice)
	case c.Zone != nil:
		w.Zone = *c.Zone
	}
}

// Claim is one Service's wish for an address and port.
type Claim struct {
	Service *Service
	Port    Port
	Kind    string // cluster IP, external IP, load balancer, node port
}

// Claims lists who wants an address and port.
func (w *World) Claims(protocol string, at netip.AddrPort) []Claim {
	var out []Claim
	for _, s := range w.Services {
		if s.Served() {
			out = append(out, s.claims(protocol, at)...)
		}
	}
	return out
}

// claims leaves out addresses of a family that the Service has not: nobody serves
// these for it.
func (s *Service) claims(protocol string, at netip.AddrPort) []Claim {
	var out []Claim
	if !s.has(at.Addr()) {
		return nil
	}
	for i, p := range s.Ports {
		if p.Protocol() != protocol {
			continue
		}
		claim := func(kind string, port int32, addresses []string) {
			if port == int32(at.Port()) && slices.Contains(addresses, at.Addr().String()) {
				out = append(out, Claim{s, p, kind})
			}
		}
		claim("cluster IP", p.Number, s.ClusterIPs())
		claim("external IP", p.Number, s.ExternalIPs)
		claim("load balancer", p.Number, s.balancers())
		if s.NodePort(i) == int32(at.Port()) && NodeAddress(at.Addr()) {
			out = append(out, Claim{s, p, "node port"})
		}
	}
	return out
}

// has tells whether the Service is of the address's family.
func (s *Service) has(a netip.Addr) bool {
	family := "4"
	if a.Is6() {
		family = "6"
	}
	return strings.Contains(s.Families, family)
}

// balancers are the load balancer's IPs that the node has to serve.
func (s *Service) balancers() []string {
	var out []string
	for _, in := range s.Ingress {
		if s.Type == "LoadBalancer" && in.Mode == "VIP" {
			out = append(out, in.IP)
		}
	}
	return out
}

// NodeAddresses are those of the node, on all of its interfaces.
var NodeAddresses = []string{NodeIPv4, NodeIPv6, "10.244.1.1", "fd00:244:1::1"}

// NodeAddress tells whether an address is one of the node's.
func NodeAddress(a netip.Addr) bool {
	return slices.Contains(NodeAddresses, a.String()) || a.Is6() && a.IsLinkLocalUnicast()
}

// onlyOtherRanges tells whether there are source ranges, but none of an address's
// family.
func (s *Service) onlyOtherRanges(a netip.Addr) bool {
	same := func(r string) bool { return strings.Contains(r, ":") == a.Is6() }
	return len(s.SourceRanges) > 0 && !slices.ContainsFunc(s.SourceRanges, same)
}

// disputed tells whether an endpoint of a claim is in several slices, and it is
// open which of them is right: those that do not terminate say different things,
// or all terminate and say different things.
func (w *World) disputed(c Claim, at netip.Addr) bool {
	for _, copies := range w.copies(c, at) {
		live := slices.DeleteFunc(slices.Clone(copies), Endpoint.terminates)
		if len(live) == 0 {
			live = copies
		}
		if slices.ContainsFunc(live, func(e Endpoint) bool { return !e.says(live[0]) }) {
			return true
		}
	}
	return false
}

// copies are a claim's endpoints, by host and port, in all slices of a family.
func (w *World) copies(c Claim, at netip.Addr) map[[2]int32][]Endpoint {
	out := map[[2]int32][]Endpoint{}
	for _, s := range w.Slices {
		if s.Slot != c.Service.Slot || s.LabelledHeadless || s.Family != map[bool]string{false: "4", true: "6"}[at.Is6()] {
			continue
		}
		for _, p := range s.Ports {
			if p.Name != c.Port.Name {
				continue
			}
			for _, e := range s.Endpoints {
				key := [2]int32{int32(e.Host), p.Number}
				out[key] = append(out[key], e)
			}
		}
	}
	return out
}

func (e Endpoint) terminates() bool {
	_, _, terminating := e.Conditions()
	return terminating != nil && *terminating
}

// says tells whether two endpoints are in the same state with the same hints.
func (e Endpoint) says(other Endpoint) bool {
	state := func(e Endpoint) string { return strings.ReplaceAll(e.State, "unset", "ready") }
	return state(e) == state(other) && slices.Equal(e.Zones, other.Zones) && slices.Equal(e.Nodes, other.Nodes)
}
