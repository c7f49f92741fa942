//go:build prove

package prove

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// The oracle knows Services, endpoints, the configuration and the node's interfaces. It
// knows no sets, marks, rules or virtual servers.

// Kind classifies an address and port.
type Kind string

// The kinds.
const (
	ClusterIP    Kind = "cluster IP"
	ExternalIP   Kind = "external IP"
	LoadBalancer Kind = "load balancer IP"
	NodePort     Kind = "node port"
	OtherPort    Kind = "another port of a VIP"
	NodeItself   Kind = "the node's own"
	Elsewhere    Kind = "elsewhere"
)

// target is the part of a Service that a packet is sent to; svc is nil if there is none.
type target struct {
	kind    Kind
	svc     *service.Service
	port    *service.Port
	several bool     // several Services claim it
	vip     []Kind   // the kinds of VIP that the address is
	of      []string // the Services that have it
}

func (t target) String() string {
	if t.svc == nil {
		return string(t.kind)
	}
	policy := ""
	if t.svc.ExternalLocal && t.kind != ClusterIP {
		policy = ", Local"
	}
	return fmt.Sprintf("%s of %s%s", t.kind, t.svc.Name, policy)
}

// client is the kind of a client.
type client int

const (
	theNode client = iota // the ingress node itself
	aPod                  // on this node
	outside               // any client that enters by an uplink
)

// Fate is the required result of a connection.
type Fate string

// The fates.
const (
	MustAnswer Fate = "answered"
	MustRefuse Fate = "refused"
	MustDrop   Fate = "dropped"
	MustReach  Fate = "a program of the node's"
	MustLeave  Fate = "forwarded"
	MayAny     Fate = "anything"
)

// Want is the oracle's verdict on a class.
type Want struct {
	Fates     []Fate // any of these is right
	Endpoints []netip.AddrPort
	Client    bool   // endpoints may see the client's address
	Node      bool   // or an address of the node
	Back      bool   // the reply leaves by the request's ingress interface
	Sentence  string // from the API's documentation, or ours where the API does not define the result
}

func (w Want) String() string {
	var fates []string
	for _, f := range w.Fates {
		fates = append(fates, string(f))
	}
	text := strings.Join(fates, " or ")
	if slices.Contains(w.Fates, MustAnswer) {
		var sources []string
		if w.Client {
			sources = append(sources, "the client's")
		}
		if w.Node {
			sources = append(sources, "the node's")
		}
		text += fmt.Sprintf(" by %v, seen with %s address", w.Endpoints, strings.Join(sources, " or "))
	}
	return text
}

// The sentences.
const (
	sayCluster  = `"Cluster" routes traffic to all endpoints (ServiceSpec)`
	sayInternal = `internalTrafficPolicy "Local": "the proxy will assume that pods only want to talk to endpoints of the service on the same node as the pod, dropping the traffic if there are no local endpoints" (ServiceSpec)`
	sayLocal    = `externalTrafficPolicy "Local": "only deliver traffic to the node-local endpoints of the service, without masquerading the client source IP. Traffic mistakenly sent to a node with no endpoints will be dropped" (ServiceSpec)`
	sayInside   = `"traffic sent to an External IP or LoadBalancer IP from within the cluster will always get "Cluster" semantics" (ServiceSpec)`
	sayRanges   = `loadBalancerSourceRanges: "traffic through the cloud-provider load-balancer will be restricted to the specified client IPs" (ServiceSpec)`
	sayNone     = `a Service without endpoints refuses`
	sayVIP      = `a VIP answers on its Services' ports only; external addresses are their owner's on other ports (docs/concepts/vips.md)`
	sayNode     = `the node's own ports are not a Service's`
	sayHealth   = `healthCheckNodePort: "External systems (e.g. load-balancers) can use this port to determine if a given node holds endpoints for this service or not" (ServiceSpec); some do so on the load balancer IP (kubernetes#117621)`
	sayOther    = `packets that are for no Service are left alone`
)

// Oracle decides the results of a scenario's classes in one family.
type Oracle struct {
	*Scenario
	family ip.Family
	nodes  map[netip.Addr]bool // the node's addresses
	ports  []netip.Addr        // addresses with node ports
	bare   *trace.Node         // the node without any proxy
}

// NewOracle creates the oracle of a scenario.
func NewOracle(s *Scenario, family ip.Family) *Oracle {
	o := &Oracle{Scenario: s, family: family, nodes: map[netip.Addr]bool{}, bare: s.bare(family)}
	for _, l := range s.Node.Inventory.Links {
		for _, a := range l.Addresses {
			o.nodes[a.Prefix.Addr()] = true
			if a.Global && ip.Of(a.Prefix.Addr()) == family {
				o.ports = append(o.ports, a.Prefix.Addr())
			}
		}
	}
	chosen := s.Config.NodePortAddresses
	o.ports = slices.DeleteFunc(o.ports, func(a netip.Addr) bool {
		if chosen.Primary {
			return a != o.primary()
		}
		ofFamily := 0
		for _, p := range chosen.Prefixes {
			if ip.Of(p.Addr()) == family {
				ofFamily++
				if p.Contains(a) {
					return false
				}
			}
		}
		return ofFamily > 0
	})
	return o
}

// primary is the node's own address.
func (o *Oracle) primary() netip.Addr {
	for _, a := range o.Node.Addresses {
		if ip.Of(a) == o.family {
			return a
		}
	}
	for _, r := range o.Node.Inventory.Defaults {
		if r.Family != o.family || r.Table != routing.TableMain {
			continue
		}
		for _, l := range o.Node.Inventory.Links {
			for _, a := range l.Addresses {
				if l.Name == r.Link && a.Global && ip.Of(a.Prefix.Addr()) == o.family {
					return a.Prefix.Addr()
				}
			}
		}
	}
	return netip.Addr{}
}

// target returns the Service and port at a destination.
func (o *Oracle) target(protocol ip.Protocol, to netip.AddrPort) target {
	t := target{kind: Elsewhere}
	for i := range o.Services {
		s := &o.Services[i]
		if !s.Has(o.family) {
			continue
		}
		kinds := map[Kind][]netip.Addr{ClusterIP: s.ClusterIPs, ExternalIP: s.ExternalIPs, LoadBalancer: s.LoadBalancers}
		for _, kind := range []Kind{ClusterIP, ExternalIP, LoadBalancer} {
			if !slices.Contains(kinds[kind], to.Addr()) || kind == ExternalIP && o.Config.VIPs.ExternalIPs == plan.ClaimNone {
				continue
			}
			t.vip, t.of = append(t.vip, kind), append(t.of, s.Name.String())
			for j := range s.Ports {
				if p := &s.Ports[j]; p.Protocol == protocol && p.Port == to.Port() {
					t.take(kind, s, p)
				}
			}
		}
		if slices.Contains(o.ports, to.Addr()) {
			for j := range s.Ports {
				if p := &s.Ports[j]; p.Protocol == protocol && p.NodePort == to.Port() && p.NodePort != 0 {
					t.take(NodePort, s, p)
				}
			}
		}
	}
	switch {
	case t.svc != nil:
	case o.nodes[to.Addr()]:
		t.kind = NodeItself
	case len(t.vip) > 0:
		t.kind = OtherPort
	}
	return t
}

// take records that a Service has the destination. If a Service has an address as an external
// IP and as a LoadBalancer IP, only the latter counts, because source ranges apply to it.
func (t *target) take(kind Kind, s *service.Service, p *service.Port) {
	if t.svc != nil && t.svc != s {
		t.several = true
	}
	if t.svc == s && t.kind == ClusterIP {
		return
	}
	t.kind, t.svc, t.port = kind, s, p
}

// client classifies the client, by how the request enters.
func (o *Oracle) client(in string) client {
	switch {
	case in == "":
		return theNode
	case o.isUplink(o.family, in), o.leadsOut(in):
		return outside
	}
	return aPod
}

// leadsOut reports whether a link is a physical one or a tunnel, by which no pod of this node sends.
func (o *Oracle) leadsOut(link string) bool {
	l, _ := o.bare.Link(link)
	return l.Type == "device" && !l.Loopback || l.Type == "xfrm"
}

// knownPod reports whether the node can recognize an address as a pod's by the
// configuration. Without such a configuration, every client except the node may be a pod.
func (o *Oracle) knownPod(src netip.Addr, in string) (known, told bool) {
	inside := func(cidrs []netip.Prefix) (bool, bool) {
		found := false
		for _, c := range cidrs {
			if ip.Of(c.Addr()) == o.family {
				found = true
				if c.Contains(src) {
					return true, true
				}
			}
		}
		return false, found
	}
	switch lt := o.Config.LocalTraffic; lt.Mode {
	case plan.DetectClusterCIDR:
		return inside(lt.CIDRs)
	case plan.DetectNodeCIDR:
		return inside(o.Node.PodCIDRs)
	case plan.DetectBridgeInterface:
		return in == lt.Interface, true
	case plan.DetectInterfaceNamePrefix:
		return strings.HasPrefix(in, lt.Interface) && in != "", true
	}
	return in != "", false
}

// eligible returns the endpoints that may answer, on this node or anywhere: the ready
// ones or, if there are none, those that are terminating and still serve (KEP-1669).
func (o *Oracle) eligible(p *service.Port, here bool) []netip.AddrPort {
	pick := func(accept func(service.Endpoint) bool) []netip.AddrPort {
		var out []netip.AddrPort
		for _, e := range p.Endpoints {
			if ip.Of(e.Addr.Addr()) == o.family && (!here || e.Node == o.Config.NodeName) && accept(e) && !slices.Contains(out, e.Addr) {
				out = append(out, e.Addr)
			}
		}
		return out
	}
	ready := pick(func(e service.Endpoint) bool { return e.Ready })
	if len(ready) == 0 {
		return pick(func(e service.Endpoint) bool { return e.Serving && e.Terminating })
	}
	if here {
		return ready
	}
	return o.hinted(p, ready)
}

// hinted returns the endpoints that hints assign to this node or, failing that, its zone,
// if all ready ones have such hints (KEP-3015, KEP-2433).
func (o *Oracle) hinted(p *service.Port, ready []netip.AddrPort) []netip.AddrPort {
	for _, by := range []struct {
		hints func(service.Endpoint) []string
		here  string
	}{
		{func(e service.Endpoint) []string { return e.NodeHints() }, o.Config.NodeName},
		{func(e service.Endpoint) []string { return e.ZoneHints() }, o.Node.Zone},
	} {
		var named []netip.AddrPort
		all := true
		for _, e := range p.Endpoints {
			if !slices.Contains(ready, e.Addr) || !e.Ready {
				continue
			}
			all = all && len(by.hints(e)) > 0
			if slices.Contains(by.hints(e), by.here) {
				named = append(named, e.Addr)
			}
		}
		if all && len(named) > 0 && by.here != "" {
			return named
		}
	}
	return ready
}

// Want returns the required result of a class.
func (o *Oracle) Want(c *Class) Want {
	w := o.want(c)
	if o.strays(c) && !slices.Contains(w.Fates, MustDrop) {
		w.Fates = append(w.Fates, MustDrop)
	}
	if c.In != "" && (o.isBranch(o.family, c.In) || c.target.kind == NodeItself && o.leavesUnserved(c)) {
		w.Fates = append(w.Fates, MustLeave)
	}
	return w
}

// leavesUnserved reports whether a CNI's policy rule by input interface routes packets for
// the node itself out of the node, with or without a proxy.
func (o *Oracle) leavesUnserved(c *Class) bool {
	way, ok := o.bare.RouteOf(c.From, c.To.Addr(), c.In)
	return ok && !way.Local
}

// strays reports whether a request enters by another interface than the route back to the
// client, so that a strict reverse-path check drops it under any proxy. It returns false for
// a request of an external client to a Service if replies leave by the request's interface,
// unless the client is a neighbor on another interface.
func (o *Oracle) strays(c *Class) bool {
	if c.In == "" {
		return false
	}
	back, ok := o.bare.RouteOf(netip.Addr{}, c.From, "lo")
	switch {
	case o.isBranch(o.family, c.In):
		return true
	case c.target.svc != nil && c.State == "" && o.podLink(o.bare, c.From) == c.In:
		return false // a pod's own interface, even if only a policy rule by interface finds the pod there
	case !ok || back.Link == c.In && o.bare.PassesReversePath(c.From, c.To.Addr(), c.In):
		return false
	case c.target.svc == nil || c.target.kind == ClusterIP || c.State != "":
		return true
	}
	return back.Dst.Bits() > 0 || !o.repliesByENI(c.In)
}

func (o *Oracle) want(c *Class) Want {
	t := c.target
	switch {
	case t.several, o.isVIP(c.From):
		// Under kube-proxy, packets from a VIP are martians.
		return Want{Fates: []Fate{MayAny}}
	case c.State == trace.Related:
		return o.wantError(c, t)
	case t.kind == NodeItself:
		return Want{Fates: []Fate{MustReach}, Sentence: sayNode}
	case t.kind == Elsewhere:
		return Want{Fates: []Fate{MustLeave, MustDrop, MustReach}, Sentence: sayOther}
	case t.kind == OtherPort:
		return o.wantOtherPort(c, t)
	}
	w := o.wantServed(c, t)
	if c.State == trace.Invalid {
		return o.wantInvalid(c, w)
	}
	return o.wantWay(c, t, w)
}

// wantError is for an ICMP error about a connection: if the address is a VIP, IPVS must
// see it.
func (o *Oracle) wantError(c *Class, t target) Want {
	if len(t.vip) > 0 || o.nodes[c.To.Addr()] {
		return Want{Fates: []Fate{MustReach}, Sentence: "an error about a connection finds it"}
	}
	return Want{Fates: []Fate{MayAny}}
}

// isHealthCheck reports whether a packet is for the health check node port of a Service.
func (o *Oracle) isHealthCheck(c *Class) bool {
	return c.Protocol == ip.TCP && slices.ContainsFunc(o.Services, func(s service.Service) bool {
		return s.HealthCheckNodePort == c.To.Port() && s.HealthCheckNodePort != 0
	})
}

// wantOtherPort is for a port of a VIP that no Service has. A cluster IP refuses. An
// external address belongs to another device: internal clients reach its other ports
// beyond the node, or are refused.
func (o *Oracle) wantOtherPort(c *Class, t target) Want {
	w := Want{Fates: []Fate{MustRefuse}, Sentence: sayVIP}
	external := !slices.Contains(t.vip, ClusterIP)
	echo := c.Protocol == trace.ICMP || c.Protocol == trace.ICMPv6
	inside := o.client(c.In) != outside
	switch {
	case o.isHealthCheck(c) && !o.claims(t, plan.ClaimPort):
		w = Want{Fates: []Fate{MustReach}, Sentence: sayHealth}
		if !o.claims(t, plan.ClaimAddress, plan.ClaimRoute, plan.ClaimAuto) {
			w.Fates = append(w.Fates, MustRefuse) // claimed in both ways
		}
	case external && inside && echo:
		w.Fates = []Fate{MustLeave, MustReach}
	case external && inside && o.claims(t, plan.ClaimPort, plan.ClaimAuto):
		w.Fates = []Fate{MustLeave}
	case external && inside:
		w.Fates = []Fate{MustLeave, MustRefuse}
	case echo && o.Config.VIPs.Ping:
		w.Fates = []Fate{MustReach}
	}
	if c.State == trace.Invalid {
		w.Fates = append(w.Fates, MustReach, MustDrop, MustLeave) // the node's TCP responds with a RST
	}
	return w
}

// claims reports whether every claim of an address is one of some modes. ClaimPort and, for
// internal clients, ClaimAuto leave the ports without a Service to the device that has the address.
func (o *Oracle) claims(t target, modes ...plan.ClaimMode) bool {
	for _, kind := range t.vip {
		claim := map[Kind]plan.ClaimMode{ExternalIP: o.Config.VIPs.ExternalIPs, LoadBalancer: o.Config.VIPs.LoadBalancers, ClusterIP: o.Config.VIPs.ClusterIPs}[kind]
		if !slices.Contains(modes, claim) {
			return false
		}
	}
	return true
}

func (o *Oracle) mainUplink() string {
	for _, r := range o.Node.Inventory.Defaults {
		if r.Family == o.family && r.Table == routing.TableMain {
			return r.Link
		}
	}
	return ""
}

// wantServed is for a new connection to a Service's port.
func (o *Oracle) wantServed(c *Class, t target) Want {
	everywhere, here := o.eligible(t.port, false), o.eligible(t.port, true)
	who := o.client(c.In)
	pod, told := o.knownPod(c.From, c.In)
	answered := func(by []netip.AddrPort, client, node bool, sentence string) Want {
		if len(by) == 0 {
			return Want{Fates: []Fate{MustRefuse}, Sentence: sayNone}
		}
		hairpin := slices.ContainsFunc(by, func(a netip.AddrPort) bool { return a.Addr() == c.From })
		return Want{Fates: []Fate{MustAnswer}, Endpoints: by, Client: client, Node: node || hairpin, Sentence: sentence}
	}
	if t.kind == ClusterIP {
		by, sentence := everywhere, sayCluster
		if t.svc.InternalLocal {
			by, sentence = here, sayInternal
		}
		kept := (pod || !told) && who != theNode && !o.Config.MasqueradeAll
		return answered(by, kept, !kept, sentence)
	}
	if slices.Contains(t.vip, LoadBalancer) && t.kind != NodePort && !o.allowed(c, t.svc) {
		return Want{Fates: []Fate{MustDrop}, Sentence: sayRanges}
	}
	switch {
	case !t.svc.ExternalLocal:
		return answered(everywhere, false, true, sayCluster)
	case who == outside && len(here) == 0 && len(everywhere) > 0:
		return Want{Fates: []Fate{MustDrop}, Sentence: sayLocal}
	case who == outside, who == aPod && told && !pod && len(here) > 0: // the configuration says that it is outside the cluster
		masquerade := t.svc.Masquerade || o.Config.MasqueradeExternalLocal
		return answered(here, !masquerade, masquerade, sayLocal)
	case who == aPod && told && !pod:
		w := answered(everywhere, true, true, sayInside)
		w.Fates = append(w.Fates, MustDrop)
		return w
	}
	return answered(everywhere, true, true, sayInside)
}

// allowed evaluates source ranges. The node is allowed if a range contains its address.
func (o *Oracle) allowed(c *Class, s *service.Service) bool {
	all := func(p netip.Prefix) bool { return p.Bits() == 0 }
	same := func(p netip.Prefix) bool { return ip.Of(p.Addr()) == o.family }
	if len(s.SourceRanges) == 0 || !slices.ContainsFunc(s.SourceRanges, same) && slices.ContainsFunc(s.SourceRanges, all) {
		return true
	}
	from := c.From
	if c.In == "" {
		from = o.primary()
	}
	return slices.ContainsFunc(s.SourceRanges, func(p netip.Prefix) bool {
		return ip.Of(p.Addr()) == o.family && (p.Bits() == 0 || p.Contains(from))
	})
}

// wantInvalid is for packets that conntrack cannot assign to a connection, so that their
// source is not translated. They must not be forwarded if the connection would be
// masqueraded, and may be forwarded if it keeps the client's address.
func (o *Oracle) wantInvalid(c *Class, w Want) Want {
	w.Sentence = "an endpoint sees no other source than the connection's"
	if c.target.kind == ClusterIP || len(o.eligible(c.target.port, false)) == 0 {
		// Only pods connect to cluster IPs for long, and keep their addresses.
		w.Fates = []Fate{MayAny}
	}
	if w.Client && slices.Contains(w.Fates, MustAnswer) {
		w.Fates = append(w.Fates, MustDrop)
		return w
	}
	w.Fates = append([]Fate{MustDrop, MustRefuse}, w.Fates...)
	w.Fates = slices.DeleteFunc(w.Fates, func(f Fate) bool { return f == MustAnswer })
	return w
}

// wantWay adds the results for paths on which no reply is possible.
func (o *Oracle) wantWay(c *Class, t target, w Want) Want {
	if o.client(c.In) != outside {
		if by := o.fabric(o.family)(c.From); by != "" && by != o.mainUplink() && !o.repliesByENI(c.In) {
			w.Fates = append(w.Fates, MustDrop) // docs/concepts/eni.md: plain MASQUERADE where no source is known
		}
		return w
	}
	pod, told := o.knownPod(c.From, c.In)
	switch {
	case t.kind == ClusterIP && (pod || !told):
		// No client sends that: pods of another node connect through their own node.
		w.Fates = []Fate{MayAny}
	case c.In == o.mainUplink() || t.kind != ClusterIP && o.repliesByENI(c.In):
		w.Back = true
	}
	return w
}

// repliesByENI reports whether replies leave by the ingress interface of the request
// (docs/concepts/eni.md).
func (o *Oracle) repliesByENI(in string) bool {
	return o.Config.SNAT.Mode == plan.SNATAuto || o.Config.SNAT.Mode == plan.SNATFWMark
}

// Judge compares the evaluator's result with the oracle's. It returns the difference, or
// "".
func (o *Oracle) Judge(c *Class, x *trace.Explanation, w Want) string {
	fate := fateOf(x)
	switch {
	case slices.Contains(w.Fates, MayAny):
		return ""
	case !slices.Contains(w.Fates, fate):
		return fmt.Sprintf("%s (%s)", fate, x.Verdict)
	case fate != MustAnswer:
		return ""
	}
	var by []netip.AddrPort
	for i := range x.RealServers {
		b := &x.RealServers[i]
		if b.Weight == 0 {
			continue
		}
		endpoint := netip.MustParseAddrPort(b.RealServer)
		by = append(by, endpoint)
		if !slices.Contains(w.Endpoints, endpoint) {
			return fmt.Sprintf("%s may answer, which is none of %v", endpoint, w.Endpoints)
		}
		if what := o.judgeSource(c, b, w, endpoint); what != "" {
			return fmt.Sprintf("by %s: %s", endpoint, what)
		}
	}
	for _, e := range w.Endpoints {
		if !slices.Contains(by, e) && !(len(w.Fates) > 1 && len(by) > 0) {
			return fmt.Sprintf("%s never answers", e)
		}
	}
	return ""
}

func (o *Oracle) judgeSource(c *Class, b *trace.ServerPath, w Want, endpoint netip.AddrPort) string {
	seen := netip.MustParseAddr(b.SeenSource)
	switch {
	case w.Back && b.ReplyLeavesBy != c.In && b.ReplyLeavesBy != "":
		return fmt.Sprintf("the answer leaves by %s", b.ReplyLeavesBy)
	case o.nodes[endpoint.Addr()]:
		return "" // traffic within the node's own network is not masqueraded
	case w.Node && (o.nodes[seen] || o.fabric(o.family)(seen) == b.LeavesBy && o.isUplink(o.family, b.LeavesBy)) && !o.isVIP(seen) && (seen != c.From || c.In == ""):
		return ""
	case w.Client && seen == c.From && (seen != endpoint.Addr() || c.State == trace.Invalid):
		return "" // an endpoint drops packets from its own address
	case w.Client && c.In == "" && (o.nodes[seen] || seen == c.To.Addr()):
		return "" // a local VIP is also an address of the node
	}
	return fmt.Sprintf("it sees %s", seen)
}

func (o *Oracle) isVIP(a netip.Addr) bool {
	return !o.nodes[a] && slices.ContainsFunc(o.Services, func(s service.Service) bool {
		return slices.Contains(slices.Concat(s.ClusterIPs, s.ExternalIPs, s.LoadBalancers), a)
	})
}

func fateOf(x *trace.Explanation) Fate {
	switch x.Verdict.Outcome {
	case trace.Answered, trace.Sent:
		return MustAnswer
	case trace.Refused:
		return MustRefuse
	case trace.Unserved:
		if x.Link == "lo" {
			return MustReach
		}
		return MustLeave
	}
	return MustDrop
}
