// Package conformance compares kube-ipvs with kube-proxy's IPVS mode. Both run side by
// side against one API server, and the test compares their kernels after every change. A
// table lists the allowed differences and the reasons (Differences).
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

// Step is a set of changes that are made together. Afterwards both kernels are compared.
type Step []Change

// Service is a short form of the API object.
type Service struct {
	Slot                int    // identifies the Service; determines names and numbers
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
	LabelledHeadless    bool      `json:",omitempty"` // the label headless, which has no effect on Services
}

// Port is a port of a Service. Its name determines its protocol, and binds it to ports of
// slices.
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

// Ingress is an entry of status.loadBalancer. Mode is VIP, Proxy, or Hostname for a host
// name in place of the IP.
type Ingress struct{ IP, Mode string }

// Slice is a short form of an EndpointSlice.
type Slice struct {
	Slot      int // of the Service
	Number    int // index among the Service's slices of this family
	Family    string
	Ports     []SlicePort
	Endpoints []Endpoint

	NamedByOtherProxy bool `json:",omitempty"`
	LabelledHeadless  bool `json:",omitempty"`
}

// SlicePort is a target port. It is identified by name, because its number may differ
// from slice to slice. Number 0 means no port.
type SlicePort struct {
	Name   string
	Number int32
}

// Endpoint is one of Hosts, by its index, and its state.
type Endpoint struct {
	Host  int
	State string   // one of EndpointStates
	Zones []string `json:",omitempty"`
	Nodes []string `json:",omitempty"`
}

// EndpointStates are combinations of the three conditions, set as controllers set them,
// or omitted.
var EndpointStates = []string{"ready", "unset", "not ready", "terminating", "terminated", "ready and terminating"}

// Conditions returns ready, serving and terminating. nil means that the condition is not
// written.
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

// Host is a possible location of an endpoint. Node is "" if the slice does not name one.
type Host struct {
	IPv4, IPv6, Node string
}

// The two nodes. Both programs are configured to be on the first.
const (
	NodeName  = "conformant"
	OtherNode = "other"
	NodeIPv4  = "192.168.50.11"
	NodeIPv6  = "fd00:50::11"
)

// Hosts are pods, and the node itself for pods on the host network.
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

// ClusterIPs returns the Service's cluster IPs in the order of its families.
func (s *Service) ClusterIPs() []string {
	var out []string
	for _, f := range s.Families {
		out = append(out, map[rune]string{
			'4': fmt.Sprintf("10.96.1.%d", 10+s.Slot), '6': fmt.Sprintf("fd00:10:96::1%d", s.Slot),
		}[f])
	}
	return out
}

// Exposed reports whether external clients can reach the Service.
func (s *Service) Exposed() bool {
	return s.Type == "NodePort" || s.Type == "LoadBalancer" || len(s.ExternalIPs) > 0 && s.Type == "ClusterIP"
}

// NodePort returns the node port of the port with an index, or 0.
func (s *Service) NodePort(place int) int32 {
	if s.Type == "NodePort" || s.Type == "LoadBalancer" && !s.NoNodePorts {
		return FirstNodePort + int32(10*s.Slot+place)
	}
	return 0
}

// FirstNodePort is the node port of the first port of the first Service.
const FirstNodePort = 30000

// Served reports whether a proxy serves the Service.
func (s *Service) Served() bool {
	return !s.NamedByOtherProxy && s.Type != "ExternalName" && s.Type != "Headless"
}

// World is the content of the API server.
type World struct {
	Zone     string
	Services map[string]*Service
	Slices   map[string]*Slice
}

// NewWorld returns an empty World.
func NewWorld() *World {
	return &World{Services: map[string]*Service{}, Slices: map[string]*Slice{}}
}

// Apply records a change.
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

// Claim is a Service that wants an address and port.
type Claim struct {
	Service *Service
	Port    Port
	Kind    string // cluster IP, external IP, load balancer, node port
}

// Claims returns the Services that want an address and port.
func (w *World) Claims(protocol string, at netip.AddrPort) []Claim {
	var out []Claim
	for _, s := range w.Services {
		if s.Served() {
			out = append(out, s.claims(protocol, at)...)
		}
	}
	return out
}

// claims returns the Service's claims, without addresses of a family that the Service
// does not have: no proxy serves these.
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

// has reports whether the Service has the address's family.
func (s *Service) has(a netip.Addr) bool {
	family := "4"
	if a.Is6() {
		family = "6"
	}
	return strings.Contains(s.Families, family)
}

// balancers returns the LoadBalancer IPs that the node serves.
func (s *Service) balancers() []string {
	var out []string
	for _, in := range s.Ingress {
		if s.Type == "LoadBalancer" && in.Mode == "VIP" {
			out = append(out, in.IP)
		}
	}
	return out
}

// NodeAddresses are the addresses of the node, on all interfaces.
var NodeAddresses = []string{NodeIPv4, NodeIPv6, "10.244.1.1", "fd00:244:1::1"}

// NodeAddress reports whether an address is one of the node's.
func NodeAddress(a netip.Addr) bool {
	return slices.Contains(NodeAddresses, a.String()) || a.Is6() && a.IsLinkLocalUnicast()
}

// onlyOtherRanges reports whether the Service has source ranges, but none of an address's
// family and none for all clients.
func (s *Service) onlyOtherRanges(a netip.Addr) bool {
	same := func(r string) bool { return strings.Contains(r, ":") == a.Is6() }
	all := func(r string) bool { return strings.HasSuffix(r, "/0") }
	return len(s.SourceRanges) > 0 && !slices.ContainsFunc(s.SourceRanges, same) && !slices.ContainsFunc(s.SourceRanges, all)
}

// admitsNode reports whether the source ranges contain the node's own address of a family.
func (s *Service) admitsNode(family netip.Addr) bool {
	node := netip.MustParseAddr(NodeIPv4)
	if family.Is6() {
		node = netip.MustParseAddr(NodeIPv6)
	}
	return slices.ContainsFunc(s.SourceRanges, func(r string) bool { return netip.MustParsePrefix(r).Contains(node) })
}

// isClusterIP reports whether an address is a cluster IP of a Service.
func (w *World) isClusterIP(a netip.Addr) bool {
	for _, s := range w.Services {
		if s.Served() && slices.Contains(s.ClusterIPs(), a.String()) {
			return true
		}
	}
	return false
}

// servesHere reports whether a claim has an endpoint on this node that may answer: a ready one,
// or one that terminates and serves.
func (w *World) servesHere(c Claim, at netip.Addr) bool {
	for key, copies := range w.copies(c, at) {
		if Hosts[key[0]].Node == NodeName && key[1] != 0 && slices.ContainsFunc(valid(copies), Endpoint.serves) {
			return true
		}
	}
	return false
}

// valid returns the descriptions of an endpoint that may take effect: those as not terminating,
// if there are any.
func valid(copies []Endpoint) []Endpoint {
	live := slices.DeleteFunc(slices.Clone(copies), Endpoint.terminates)
	if len(live) == 0 {
		return copies
	}
	return live
}

// disputed reports whether an endpoint of a claim is in several slices that disagree:
// either two that do not terminate describe it differently, or all terminate and describe
// it differently.
func (w *World) disputed(c Claim, at netip.Addr) bool {
	for _, copies := range w.copies(c, at) {
		live := valid(copies)
		if slices.ContainsFunc(live, func(e Endpoint) bool { return !e.says(live[0]) }) {
			return true
		}
	}
	return false
}

// copies returns a claim's endpoints in all slices of a family, by host and port.
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

// serves reports whether the endpoint is ready or serving. A condition that is not written means
// that it is.
func (e Endpoint) serves() bool {
	ready, serving, _ := e.Conditions()
	return ready == nil || *ready || serving != nil && *serving
}

// says reports whether two endpoints have the same state and hints.
func (e Endpoint) says(other Endpoint) bool {
	state := func(e Endpoint) string { return strings.ReplaceAll(e.State, "unset", "ready") }
	return state(e) == state(other) && slices.Equal(e.Zones, other.Zones) && slices.Equal(e.Nodes, other.Nodes)
}
