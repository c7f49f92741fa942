package plan

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Config is the part of the configuration that determines the kernel's state. It has
// been validated.
type Config struct {
	NodeName string
	// NodeAddress overrides the Node object's address of its family, as kube-proxy's
	// --bind-address does. The zero Addr overrides none.
	NodeAddress netip.Addr

	Families  []ip.Family // to program, IPv4 first
	Scheduler string      // for virtual servers, never ""
	// MissingScheduler is the configured scheduler if the kernel does not have it;
	// Scheduler is used instead.
	MissingScheduler string

	MasqueradeAll bool
	// MasqueradeExternalLocal masquerades external traffic under
	// externalTrafficPolicy Local too, for every Service; see
	// service.AnnotationMasquerade.
	MasqueradeExternalLocal bool

	MasqueradeMark uint32 // one bit; kubelet's and kube-proxy's is 0x4000
	LocalTraffic   LocalTraffic

	NodePortAddresses NodePortAddresses
	ExcludeCIDRs      []netip.Prefix // in these ranges, a set that lists only a node port does not prove a virtual server to be ours; Services there are served
	StrictARP         bool
	// RemoteFallback uses endpoints of other nodes where a traffic policy is Local and the node
	// has none, as kube-proxy does; see serviceBuilder.fallsBack and ruleset.dropsExternal.
	RemoteFallback bool
	UDPDrain       bool // endpoints that are terminating but still serving keep their UDP flows
	// LeaveToInputPolicy leaves Service traffic to the policy of filter INPUT instead of
	// accepting it there.
	LeaveToInputPolicy bool
	// LocalhostNodePorts also serves node ports on the loopback address, for the node
	// itself, if NodePortAddresses selects that address.
	LocalhostNodePorts bool

	SNAT SNAT
	VIPs VIPs

	LocalMark LocalMark // shares no bit with MasqueradeMark; its Value shares none with SNAT.Mark
}

// DetectLocalMode is how traffic from pods on this node is recognized.
type DetectLocalMode string

// The modes of kube-proxy's --detect-local-mode.
const (
	DetectNone                DetectLocalMode = "" // not recognized
	DetectClusterCIDR         DetectLocalMode = "ClusterCIDR"
	DetectNodeCIDR            DetectLocalMode = "NodeCIDR" // the CIDRs of the Node
	DetectBridgeInterface     DetectLocalMode = "BridgeInterface"
	DetectInterfaceNamePrefix DetectLocalMode = "InterfaceNamePrefix"
)

// LocalTraffic recognizes traffic from pods. Mode determines whether CIDRs or Interface
// is used.
type LocalTraffic struct {
	Mode      DetectLocalMode
	CIDRs     []netip.Prefix // at most one per family
	Interface string         // name of the bridge, or prefix of interface names
}

// NodePortAddresses selects the addresses on which node ports are served. The zero
// value selects every node address except loopback.
type NodePortAddresses struct {
	Primary  bool           // only the Node's own address of each family
	Prefixes []netip.Prefix // only addresses in these prefixes; a family without a prefix is not restricted
}

// restricts reports whether health check node ports are served on these addresses only. As in
// kube-proxy, one prefix of length 0 opens them on all addresses.
func (a NodePortAddresses) restricts() bool {
	return a.Primary || len(a.Prefixes) > 0 && !slices.ContainsFunc(a.Prefixes, func(p netip.Prefix) bool { return p.Bits() == 0 })
}

// SNATMode is how request and reply of masqueraded traffic stay on one interface.
type SNATMode string

// The modes.
const (
	SNATAuto   SNATMode = "auto"   // a SNAT source if one is known, else reply routing
	SNATSource SNATMode = "snat"   // only SNAT sources
	SNATFWMark SNATMode = "fwmark" // only reply routing
	SNATOff    SNATMode = "off"    // plain MASQUERADE, as kube-proxy does
)

// SNAT configures SNAT by interface and reply routing.
type SNAT struct {
	Mode SNATMode
	// Sources maps an interface, by routing.LinkKey, to its SNAT sources, at most one per
	// family.
	Sources map[string][]netip.Addr
	// Gateways maps an interface, by routing.LinkKey, to the gateways of its network, at most
	// one per family. It has no effect on the primary interface and on ENIs. See Gateway.
	Gateways map[string][]netip.Addr
	// Mark holds the bits that reply routing uses. They need not be adjacent; n bits
	// distinguish 2^n-1 interfaces, including the primary one. Priority is the
	// priority of the policy rules.
	Mark     uint32
	Priority int
}

// ClaimMode is how packets for a VIP reach IPVS on the node.
type ClaimMode string

// The ways to claim a VIP.
const (
	// ClaimAddress makes the VIP an address on kube-ipvs0, with all ports.
	ClaimAddress ClaimMode = "address"
	// ClaimRoute also makes the whole VIP local, by a route. To add an address the
	// kernel walks all addresses of the interface; to add a route it does not.
	ClaimRoute ClaimMode = "route"
	// ClaimAuto is, for cluster IPs, ClaimAddress while addresses are cheap, then ClaimRoute.
	// Other VIPs get ClaimPort if they are addresses of other nodes, else ClaimRoute, with which
	// packets from pods and the node to ports without a Service leave the node. They do not get
	// ClaimAddress, because SCTP announces every IPv6 address of the node to its peer.
	ClaimAuto ClaimMode = "auto"
	// ClaimPort makes only the ports of Services local and leaves the others to the
	// device that has the address.
	ClaimPort ClaimMode = "port"
	// ClaimNone does not claim external IPs: anyone who may write a Service can name
	// any address as its external IP (CVE-2020-8554).
	ClaimNone ClaimMode = "none"
)

// VIPs configures how VIPs are claimed. Cluster IPs belong to the cluster and are
// claimed as a whole.
type VIPs struct {
	ClusterIPs    ClaimMode // ClaimAddress, ClaimRoute or ClaimAuto
	LoadBalancers ClaimMode // ClaimAuto, ClaimAddress, ClaimRoute or ClaimPort
	ExternalIPs   ClaimMode // as LoadBalancers, or ClaimNone
	Ping          bool      // whether VIPs answer pings
	// Mark holds the bits that packets for a claimed port carry. Table is the routing
	// table for these packets, Priority the priority of the policy rule that selects
	// it.
	Mark     uint32
	Table    int
	Priority int
}

// mayClaimPorts reports whether any VIP may be claimed port by port.
func (v *VIPs) mayClaimPorts() bool {
	byPort := func(c ClaimMode) bool { return c == ClaimPort || c == ClaimAuto }
	return byPort(v.LoadBalancers) || byPort(v.ExternalIPs)
}

// mayShare reports whether a VIP may be local while packets for some of its ports leave
// the node.
func (v *VIPs) mayShare() bool { return v.LoadBalancers == ClaimAuto || v.ExternalIPs == ClaimAuto }

// mayBeLocal reports whether a VIP other than a cluster IP may be local as a whole. The
// node's own packets to such a VIP have it as their source.
func (v *VIPs) mayBeLocal() bool {
	return v.LoadBalancers != ClaimPort || v.ExternalIPs != ClaimPort && v.ExternalIPs != ClaimNone
}
