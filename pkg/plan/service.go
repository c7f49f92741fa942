package plan

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// ServicePlan is the desired state of one Service.
type ServicePlan struct {
	VirtualServers []VirtualServer  // sorted by key; keys are unique
	Internal       []InternalServer // sorted by key; see AssignMarks
	VIPs           []VIP            // VIPs to claim; sorted, without duplicates
	Members        []Member         // of sets; sorted by set and entry
	Rejected       []string         // fields that are not served, with the reason; sorted
	HealthCheck    HealthCheck
	NoLocal        NoLocalEndpoints
	Deps           Deps
}

// NoLocalEndpoints holds the traffic policies under which this node has no endpoint while
// other nodes have some.
type NoLocalEndpoints struct{ Internal, External bool }

// Precedence decides between Services that want the same address and port. The lowest value
// gets it, and among equals the oldest Service.
type Precedence uint8

// The precedences, from the highest. The API server allocates an address or port only once, so
// another Service that names it conflicts with the owner. Anyone who may write a Service can name
// any address as its external IP (CVE-2020-8554), even before it is allocated.
const (
	FromAllocator Precedence = iota // a cluster IP or node port
	FromStatus                      // a load balancer IP, written by a controller
	FromSpec                        // an external IP
)

// VirtualServer is a virtual server with its real servers.
type VirtualServer struct {
	Key        ipvs.Key
	Precedence Precedence
	ipvs.VirtualServer
	// Endpoints lists all endpoints, in any state, sorted by address and port, without
	// duplicates. The real servers are those with IsRealServer. The list is immutable.
	Endpoints []Endpoint
}

// Endpoint is an endpoint of a virtual server, with its settings as a real server. Package
// reconcile keeps the endpoints of all Services, so this is small and has no pointers.
type Endpoint struct {
	Addr           ip.Packed
	Flags          EndpointFlags
	Port           uint16
	Weight         int32  // of a real server; 0: it keeps its flows and gets no new ones
	MaxConnections uint32 // of a real server; 0: no limit
}

// EndpointFlags is a set of properties of an Endpoint.
type EndpointFlags uint8

const (
	// IsRealServer: it is a real server of the virtual server.
	IsRealServer EndpointFlags = 1 << iota
	// IsEndpoint: it exists, in any state. Connections to an endpoint that is no longer a
	// real server may still be served.
	IsEndpoint
	// IsUnreachable: it is on an unreachable node. Connections to it are not drained.
	IsUnreachable
)

// Dest returns the address and port.
func (e Endpoint) Dest() netip.AddrPort { return netip.AddrPortFrom(e.Addr.Addr(), e.Port) }

// RealServer returns the settings of a real server.
func (e Endpoint) RealServer() ipvs.RealServer {
	return ipvs.RealServer{Weight: int(e.Weight), MaxConnections: e.MaxConnections}
}

// active reports whether any real server of a list accepts new connections.
func active(list []Endpoint) bool {
	return slices.ContainsFunc(list, func(e Endpoint) bool { return e.Flags&IsRealServer != 0 && e.Weight > 0 })
}

// Member is an entry of a set, and its mark in a set of marks. The set's name
// determines the family.
type Member struct {
	Set   string
	Entry ipset.Entry
	Mark  uint32
}

// HealthCheck is a Service's health check node port (0: none), and the number of ready
// node-local endpoints, which it reports. All addresses of the node serve it, or only Addresses
// if it is Restricted.
type HealthCheck struct {
	Port       uint16
	Restricted bool
	Addresses  []netip.Addr
	ReadyHere  int
}

// ForService computes the plan of one Service on this node.
func ForService(cfg *Config, facts *Facts, s *service.Service) ServicePlan {
	b := serviceBuilder{cfg: cfg, facts: facts, service: s, seen: map[ipvs.Key]bool{}}
	if s.HealthCheckNodePort != 0 {
		b.addHealthCheck()
	}
	for _, family := range cfg.Families {
		// The cluster IPs determine the families of a Service. In another family it has
		// no endpoints and serves no node port or external IP.
		if !s.Has(family) {
			continue
		}
		for i := range s.Ports {
			b.addPort(family, &s.Ports[i])
		}
		b.addHealthCheckPort(family)
	}
	b.plan.sort()
	return b.plan
}

// serviceBuilder builds a ServicePlan. Methods named add… append to it.
type serviceBuilder struct {
	cfg     *Config
	facts   *Facts
	service *service.Service
	plan    ServicePlan
	seen    map[ipvs.Key]bool

	// Of the port and family being planned.
	eps   chosen
	lists []endpointList
}

// endpointList is a result of endpointsOf: the list for a selection of active endpoints. Virtual
// servers of a port with the same active endpoints share it.
type endpointList struct {
	active positions
	list   []Endpoint
}

// addPort plans one port in one family. An address in several of the Service's lists is served
// once, as the first of: cluster IP, external IP, load balancer IP, node port.
func (b *serviceBuilder) addPort(family ip.Family, p *service.Port) {
	b.eps, b.lists = choose(b.facts, family, p.Endpoints), b.lists[:0]
	b.addNoLocal()
	b.addDepsOnEndpoints(p)
	b.addClusterIPs(family, p)
	b.addExternalIPs(family, p)
	b.addLoadBalancers(family, p)
	b.addNodePorts(family, p)
	b.addHairpin(p)
}

func (b *serviceBuilder) addNoLocal() {
	if len(b.eps.local) == 0 && len(b.eps.cluster) > 0 {
		b.plan.NoLocal.Internal = b.plan.NoLocal.Internal || b.service.InternalLocal
		b.plan.NoLocal.External = b.plan.NoLocal.External || b.service.ExternalLocal
	}
}

// addDepsOnEndpoints records that the plan depends on zone hints, or on endpoints that
// may be on unreachable nodes.
func (b *serviceBuilder) addDepsOnEndpoints(p *service.Port) {
	for i := range p.Endpoints {
		e := &p.Endpoints[i]
		if len(e.ZoneHints()) > 0 {
			b.plan.Deps |= OnZone
		}
		if notServing(e) {
			b.plan.Deps |= OnUnreachableNodes
		}
	}
}

func (b *serviceBuilder) addClusterIPs(family ip.Family, p *service.Port) {
	endpoints := b.eps.cluster
	if b.service.InternalLocal && !b.fallsBack() {
		// Without a node-local endpoint the connection is refused (KEP-2086,
		// kubernetes#121371).
		endpoints = b.eps.local
	}
	for _, a := range ofFamily(b.service.ClusterIPs, family) {
		key := ipvs.Key{Protocol: p.Protocol, Addr: a, Port: p.Port}
		if b.servedOnDummy(key) {
			// Other ports of the address may be served by IPVS: this one must not be refused.
			b.addMember(ClusterIP, EntryOf(key))
			continue
		}
		if b.addVirtualServer(key, FromAllocator, endpoints) {
			b.addMember(ClusterIP, EntryOf(key))
			b.addVIP(b.claimClusterIP(), b.last())
		}
	}
}

// fallsBack reports whether clients at cluster IPs get endpoints of other nodes although
// internalTrafficPolicy is Local: as in kube-proxy, only if the node has none and external clients
// get such endpoints too.
func (b *serviceBuilder) fallsBack() bool {
	return b.cfg.RemoteFallback && len(b.eps.local) == 0 && b.service.External() && !b.service.ExternalLocal
}

// claimClusterIP returns how to claim a cluster IP, and records the facts it depends
// on.
func (b *serviceBuilder) claimClusterIP() ClaimMode {
	if b.cfg.VIPs.ClusterIPs != ClaimAuto {
		return b.cfg.VIPs.ClusterIPs
	}
	return b.claimWhole()
}

// claimWhole returns the cheaper way to make a whole VIP local.
func (b *serviceBuilder) claimWhole() ClaimMode {
	b.plan.Deps |= OnServiceCount
	if b.facts.PreferRoutes {
		return ClaimRoute
	}
	return ClaimAddress
}

// externalEndpoints returns the endpoints for external traffic. Under externalTrafficPolicy Local
// these are the node-local ones. On a node without any, they are the cluster's, and noLocal is true:
// they are for internal clients only. See ruleset.externalLocal for external ones.
func (b *serviceBuilder) externalEndpoints() (endpoints positions, noLocal bool) {
	if b.service.ExternalLocal && len(b.eps.local) > 0 {
		return b.eps.local, false
	}
	return b.eps.cluster, b.service.ExternalLocal && len(b.eps.cluster) > 0
}

// keepsClient reports whether external traffic reaches the endpoints with the client's
// address.
func (b *serviceBuilder) keepsClient() bool {
	return b.service.ExternalLocal && !b.service.Masquerade && !b.cfg.MasqueradeExternalLocal
}

func (b *serviceBuilder) addExternalIPs(family ip.Family, p *service.Port) {
	set := ExternalIP
	if b.keepsClient() {
		set = ExternalIPLocal
	}
	for _, a := range ofFamily(b.service.ExternalIPs, family) {
		if b.cfg.VIPs.ExternalIPs == ClaimNone {
			b.reject("spec.externalIPs", "%s: external IPs are not served (--claim-external-ips none)", a)
			continue
		}
		key, precedence := ipvs.Key{Protocol: p.Protocol, Addr: a, Port: p.Port}, FromSpec
		if slices.Contains(b.service.LoadBalancers, a) {
			precedence = FromStatus
		}
		if b.mayServe("spec.externalIPs", key, precedence, p.Endpoints) && b.addExternal(key, precedence, false) {
			b.addMember(set, EntryOf(key))
			b.claimShared(b.cfg.VIPs.ExternalIPs, b.last())
		}
	}
}

func (b *serviceBuilder) addLoadBalancers(family ip.Family, p *service.Port) {
	for _, a := range ofFamily(b.service.LoadBalancers, family) {
		key := ipvs.Key{Protocol: p.Protocol, Addr: a, Port: p.Port}
		if b.mayServe("status.loadBalancer.ingress", key, FromStatus, p.Endpoints) && b.addExternal(key, FromStatus, false) {
			b.addMember(LoadBalancer, EntryOf(key))
			if b.keepsClient() {
				b.addMember(LoadBalancerLocal, EntryOf(key))
			}
			b.claimShared(b.cfg.VIPs.LoadBalancers, b.last())
		}
		// This includes an address already served as an external IP: listing it twice
		// must not lift the restriction.
		if b.seen[key] {
			b.addSourceRanges(family, key)
		}
	}
}

// addExternal adds a virtual server for an address other than a cluster IP. It returns
// false if the address is already served.
func (b *serviceBuilder) addExternal(key ipvs.Key, precedence Precedence, nodePort bool) bool {
	endpoints, noLocal := b.externalEndpoints()
	if !b.addVirtualServer(key, precedence, endpoints) {
		return false
	}
	if noLocal {
		b.addMember(NoLocalEndpoint, EntryOf(key))
	}
	b.addInternal(key, precedence, nodePort)
	return true
}

func (b *serviceBuilder) addNodePorts(family ip.Family, p *service.Port) {
	if p.NodePort == 0 {
		return
	}
	b.plan.Deps |= OnNodePorts
	for _, a := range ofFamily(b.facts.NodePorts, family) {
		key := ipvs.Key{Protocol: p.Protocol, Addr: a, Port: p.NodePort}
		if a.IsLoopback() {
			b.addLocalhost(key)
			continue
		}
		if b.addExternal(key, FromAllocator, true) {
			b.addMember(NodePorts, EntryOf(key))
			b.addNodePortMembers(family, key)
		}
	}
}

// addLocalhost adds a node port of the loopback address. Its only client is the node,
// which gets all endpoints under any policy. Without an endpoint the port is left to
// the kernel, which refuses it: IPVS would send its refusal to the replaced source of
// the request (package nft). A process of the node that listens on the port keeps it, as under
// kube-proxy. A port that the kernel may give to clients is left to them: IPVS would treat the
// SYN-ACK for such a client as a request; see clientPortWarnings.
func (b *serviceBuilder) addLocalhost(key ipvs.Key) {
	b.plan.Deps |= OnLoopback
	if b.facts.listensAtLoopback(key) {
		b.reject("spec.ports.nodePort", "%s: a program on node %s listens on this port", key, b.facts.NodeName)
		return
	}
	if slices.ContainsFunc(b.facts.ClientPorts, func(r routing.PortRange) bool { return r.Has(key.Port) }) {
		return
	}
	endpoints := b.eps.cluster
	if b.cfg.LocalMark.Value == 0 {
		endpoints, _ = b.externalEndpoints()
	}
	if len(endpoints) > 0 && b.addVirtualServer(key, FromAllocator, endpoints) {
		b.addMember(NodePorts, EntryOf(key))
	}
}

// addNodePortMembers fills kube-proxy's node port sets.
func (b *serviceBuilder) addNodePortMembers(family ip.Family, key ipvs.Key) {
	set, local := NodePortSets(key.Protocol)
	entry := NodePortEntry(key)
	b.addMember(set, entry, family)
	if b.keepsClient() {
		b.addMember(local, entry, family)
	}
}

// addSourceRanges restricts a load balancer VIP, unless a range of its family contains every
// address. If its family has no range, such a range of the other family counts: users write
// 0.0.0.0/0 alone for "any client". If a range contains the node's address, the
// node is allowed, with any source that its packets carry.
func (b *serviceBuilder) addSourceRanges(family ip.Family, key ipvs.Key) {
	ranges := filter(b.service.SourceRanges, func(p netip.Prefix) bool { return ip.Of(p.Addr()) == family })
	decisive := ranges
	if len(ranges) == 0 {
		decisive = b.service.SourceRanges
	}
	unrestricted := slices.ContainsFunc(decisive, func(p netip.Prefix) bool { return p.Bits() == 0 })
	if len(b.service.SourceRanges) == 0 || unrestricted {
		return
	}
	b.plan.Deps |= OnPrimary
	b.addMember(LoadBalancerFW, EntryOf(key))
	for _, r := range ranges {
		e := EntryOf(key)
		e.Net = r
		b.addMember(SourceCIDR, e)
	}
	if node, ok := b.facts.Primary[family]; ok && containsAny(ranges, node) {
		for _, a := range b.nodeSources(key.Addr) {
			e := EntryOf(key)
			e.Addr2 = a
			b.addMember(SourceIP, e)
		}
	}
}

// nodeSources returns the sources that the node's own packets to a VIP can have: the
// VIP, if it is local; otherwise any address of the node, depending on the route.
func (b *serviceBuilder) nodeSources(vip netip.Addr) []netip.Addr {
	var out []netip.Addr
	if b.cfg.VIPs.mayBeLocal() {
		out = append(out, vip)
	}
	if b.cfg.VIPs.mayClaimPorts() {
		b.plan.Deps |= OnNodeIPs
		for a := range b.facts.NodeIPs {
			if ip.Of(a) == ip.Of(vip) && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
				out = append(out, a)
			}
		}
	}
	return out
}

// addHairpin lets node-local endpoints reach themselves through any VIP: such a packet
// must be masqueraded, or the pod would reply to itself directly. It lists those that are not
// ready too, because connections outlive readiness.
func (b *serviceBuilder) addHairpin(p *service.Port) {
	for _, at := range b.eps.here {
		dest := b.eps.all[at].Addr
		b.addMember(LoopBack, ipset.Entry{
			Addr: dest.Addr(), Port: dest.Port(), Protocol: p.Protocol, Addr2: dest.Addr(),
		})
	}
}

// readyHere returns the number of node-local endpoints that are ready for some port. A
// dual-stack pod is one endpoint with an address of each family, so each family is
// counted separately, as in kube-proxy. The counts differ only briefly; the greater one
// is returned. Endpoints of a family that the Service does not have get no traffic.
func (b *serviceBuilder) readyHere() int {
	here := map[ip.Family]map[netip.Addr]struct{}{ip.IPv4: {}, ip.IPv6: {}}
	for _, p := range b.service.Ports {
		for i := range p.Endpoints {
			if e := &p.Endpoints[i]; e.Ready && b.facts.onNode(e) && b.service.Has(ip.Of(e.Addr.Addr())) {
				here[ip.Of(e.Addr.Addr())][e.Addr.Addr()] = struct{}{}
			}
		}
	}
	return max(len(here[ip.IPv4]), len(here[ip.IPv6]))
}

// addHealthCheck serves the health check node port on the addresses of node ports if
// --nodeport-addresses restricts them, as kube-proxy does: on none if the node has none of them.
// Otherwise it is served on all addresses, VIPs included.
func (b *serviceBuilder) addHealthCheck() {
	check := HealthCheck{Port: b.service.HealthCheckNodePort, ReadyHere: b.readyHere()}
	if b.cfg.NodePortAddresses.restricts() {
		b.plan.Deps |= OnNodePorts
		check.Restricted, check.Addresses = true, b.facts.NodePorts
	}
	b.plan.HealthCheck = check
}

func (b *serviceBuilder) addHealthCheckPort(family ip.Family) {
	if port := b.service.HealthCheckNodePort; port != 0 {
		b.addMember(HealthCheckPort, ipset.Entry{Port: port}, family)
	}
}

// addVirtualServer adds a virtual server. It returns false if the key is already served.
func (b *serviceBuilder) addVirtualServer(key ipvs.Key, precedence Precedence, endpoints positions) bool {
	if b.seen[key] {
		return false
	}
	b.seen[key] = true
	vs := VirtualServer{
		Key: key, Precedence: precedence, VirtualServer: b.onePacket(key.Protocol, virtualServer(b.cfg, b.service)),
		Endpoints: b.endpointsOf(key.Protocol, endpoints),
	}
	b.plan.VirtualServers = append(b.plan.VirtualServers, vs)
	return true
}

// endpointsOf returns the endpoints of a virtual server. Real servers are those that get new
// connections (active) and, with UDPDrain, those that are terminating and keep their UDP flows
// (kubernetes#134143). Other UDP real servers are removed at once. The end of a UDP flow is not
// visible, so the flow of a client that keeps sending would never leave a deleted endpoint. The
// result may be that of another virtual server of the port; it must not be changed.
func (b *serviceBuilder) endpointsOf(protocol ip.Protocol, active positions) []Endpoint {
	for _, known := range b.lists {
		if slices.Equal(known.active, active) {
			return known.list
		}
	}
	c := &b.eps
	out, rest := make([]Endpoint, len(c.all)), active
	for i := range c.all {
		from, e := &c.all[i], &out[i]
		e.Addr, e.Port, e.Flags = ip.Pack(from.Addr.Addr()), from.Addr.Port(), IsEndpoint
		if len(rest) > 0 && rest[0] == uint32(i) {
			rest = rest[1:]
			e.Flags |= IsRealServer
			e.Weight, e.MaxConnections = max(from.Weight, 1), b.service.MaxConnections
		}
	}
	if protocol == ip.UDP && b.cfg.UDPDrain {
		for _, at := range c.terminating {
			out[at].Flags |= IsRealServer
		}
	}
	for _, at := range c.unreachable {
		out[at].Flags |= IsUnreachable
	}
	b.lists = append(b.lists, endpointList{active, out})
	return out
}

// onePacket enables per-datagram scheduling if the Service requests it.
func (b *serviceBuilder) onePacket(protocol ip.Protocol, vs ipvs.VirtualServer) ipvs.VirtualServer {
	if b.service.OnePacket && protocol == ip.UDP {
		vs.Flags |= ipvs.FlagOnePacket
	}
	return vs
}

func virtualServer(cfg *Config, s *service.Service) ipvs.VirtualServer {
	vs := ipvs.VirtualServer{Scheduler: s.Scheduling.Scheduler, Flags: s.Scheduling.Flags}
	if vs.Scheduler == "" {
		vs.Scheduler, vs.Flags = cfg.Scheduler, ipvs.DefaultFlags(cfg.Scheduler)
	}
	if s.AffinitySeconds > 0 {
		vs.Flags |= ipvs.FlagPersistent
		vs.Timeout = s.AffinitySeconds
	}
	return vs
}

// last returns the virtual server that was added last.
func (b *serviceBuilder) last() *VirtualServer {
	return &b.plan.VirtualServers[len(b.plan.VirtualServers)-1]
}

// addMember adds an entry to the set of the entry's family. The family of an entry
// without an address is passed as an argument.
func (b *serviceBuilder) addMember(set SetName, e ipset.Entry, family ...ip.Family) {
	f := ip.IPv4
	switch {
	case e.Addr.IsValid():
		f = ip.Of(e.Addr)
	case len(family) > 0:
		f = family[0]
	}
	b.plan.Members = append(b.plan.Members, Member{Set: set.In(f), Entry: e})
}

// sort makes equal plans equal values and removes duplicates.
func (p *ServicePlan) sort() {
	slices.SortFunc(p.VirtualServers, func(a, b VirtualServer) int { return a.Key.Compare(b.Key) })
	slices.SortFunc(p.Internal, func(a, b InternalServer) int { return a.Key.Compare(b.Key) })
	slices.SortFunc(p.VIPs, compareVIPs)
	p.VIPs = slices.Compact(p.VIPs)
	slices.SortFunc(p.Members, compareMembers)
	p.Members = slices.Compact(p.Members)
	slices.Sort(p.Rejected)
	p.Rejected = slices.Compact(p.Rejected)
}

func compareMembers(a, b Member) int {
	return cmp.Or(cmp.Compare(a.Set, b.Set),
		a.Entry.Addr.Compare(b.Entry.Addr), cmp.Compare(a.Entry.Protocol, b.Entry.Protocol),
		cmp.Compare(a.Entry.Port, b.Entry.Port), a.Entry.Addr2.Compare(b.Entry.Addr2),
		a.Entry.Net.Addr().Compare(b.Entry.Net.Addr()), cmp.Compare(a.Entry.Net.Bits(), b.Entry.Net.Bits()), cmp.Compare(a.Mark, b.Mark))
}

func ofFamily(list []netip.Addr, f ip.Family) []netip.Addr {
	return filter(list, func(a netip.Addr) bool { return ip.Of(a) == f })
}
