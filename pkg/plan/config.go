package plan

import (
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Config is the configuration as far as it decides what stands in the kernel.
// It is checked before it comes here: every value can work.
type Config struct {
	NodeName  string
	Families  []ip.Family // which to program, IPv4 first
	Scheduler string      // for virtual servers, never ""

	MasqueradeAll bool
	// MasqueradeExternalLocal masquerades external traffic under
	// externalTrafficPolicy Local too, for every Service; see
	// service.AnnotationMasquerade.
	MasqueradeExternalLocal bool

	MasqueradeMark uint32 // one bit; kubelet's and kube-proxy's is 0x4000
	LocalTraffic   LocalTraffic

	NodePortAddresses NodePortAddresses
	ExcludeCIDRs      []netip.Prefix // virtual servers in them are never touched
	StrictARP         bool
	UDPDrain          bool // endpoints that terminate and still serve keep their UDP flows
	// LocalhostNodePorts serves node ports to the node itself on its loopback
	// address as well, if NodePortAddresses selects that.
	LocalhostNodePorts bool

	SNAT SNAT
	VIPs VIPs

	LocalMark LocalMark // clear of MasqueradeMark; its Value clear of SNAT.Mark
}

// DetectLocalMode says how traffic of pods on this node is recognised.
type DetectLocalMode string

// The modes of kube-proxy's --detect-local-mode.
const (
	DetectNone                DetectLocalMode = "" // cannot be recognised
	DetectClusterCIDR         DetectLocalMode = "ClusterCIDR"
	DetectNodeCIDR            DetectLocalMode = "NodeCIDR" // the CIDRs come with the Node
	DetectBridgeInterface     DetectLocalMode = "BridgeInterface"
	DetectInterfaceNamePrefix DetectLocalMode = "InterfaceNamePrefix"
)

// LocalTraffic recognises traffic of pods. CIDRs or Interface are used
// according to Mode.
type LocalTraffic struct {
	Mode      DetectLocalMode
	CIDRs     []netip.Prefix // at most one per family
	Interface string         // the bridge's name, or the prefix of names
}

// NodePortAddresses selects the addresses that node ports are served on. The
// zero value selects every address of the node but loopback's.
type NodePortAddresses struct {
	Primary  bool           // only the Node's own, of each family
	Prefixes []netip.Prefix // only addresses within one of them, if any is of the address's family
}

// SNATMode says how traffic that must be masqueraded gets a path that is the
// same both ways.
type SNATMode string

// The modes.
const (
	SNATAuto   SNATMode = "auto"   // a SNAT source where one is known, else reply routing
	SNATSource SNATMode = "snat"   // only SNAT sources
	SNATFWMark SNATMode = "fwmark" // only reply routing
	SNATOff    SNATMode = "off"    // plain MASQUERADE, as kube-proxy does
)

// SNAT is the configuration of the symmetric paths.
type SNAT struct {
	Mode SNATMode
	// Sources maps an interface's name to the addresses, at most one of each
	// family, that traffic leaving by it is to carry.
	Sources map[string][]netip.Addr
	// Mark is the bits that reply routing uses, which need not be adjacent: n
	// of them tell 2^n-1 interfaces apart, the main table's among them.
	// Priority is that of its policy rules.
	Mark     uint32
	Priority int
}

// Claim says what of a VIP comes to this node.
type Claim string

// The ways to claim a VIP.
const (
	// ClaimAddress makes it an address on kube-ipvs0: all of its ports.
	ClaimAddress Claim = "address"
	// ClaimRoute makes the whole of it local, too, by a route. On an interface
	// an address costs the kernel a walk over all that are there, and a route
	// does not.
	ClaimRoute Claim = "route"
	// ClaimAuto is, for cluster IPs, ClaimAddress as long as addresses cost
	// little, and ClaimRoute from then on. For other VIPs it is ClaimRoute, as
	// SCTP names every IPv6 address of the node to its peer, but ports without a Service are left to pods and the node to reach elsewhere;
	// an address of another node is claimed as by ClaimPort.
	ClaimAuto Claim = "auto"
	// ClaimPort makes the ports of Services local, and leaves the others to
	// whoever else has the address.
	ClaimPort Claim = "port"
	// ClaimNone leaves them alone: who may write a Service may name any address
	// as its external IP (CVE-2020-8554).
	ClaimNone Claim = "none"
)

// VIPs says how VIPs are claimed. Cluster IPs are all the cluster's, and so
// claimed as a whole.
type VIPs struct {
	ClusterIPs    Claim // ClaimAddress, ClaimRoute or ClaimAuto
	LoadBalancers Claim // ClaimAuto, ClaimAddress, ClaimRoute or ClaimPort
	ExternalIPs   Claim // the same, or ClaimNone
	Ping          bool  // whether they answer to it
	// Mark is the bits that packets for a claimed port carry; Table is the
	// routing table that they are looked up in, and Priority that of the policy
	// rule that says so.
	Mark     uint32
	Table    int
	Priority int
}

// mayClaimPorts reports whether any VIP may be claimed port by port.
func (v *VIPs) mayClaimPorts() bool {
	byPort := func(c Claim) bool { return c == ClaimPort || c == ClaimAuto }
	return byPort(v.LoadBalancers) || byPort(v.ExternalIPs)
}

// mayShare reports whether a VIP may be local while ports of it leave the node.
func (v *VIPs) mayShare() bool { return v.LoadBalancers == ClaimAuto || v.ExternalIPs == ClaimAuto }

// mayBeLocal reports whether a VIP of a kind other than cluster IPs may be local
// as a whole, so that the node's own packets to it carry it as their source.
func (v *VIPs) mayBeLocal() bool {
	return v.LoadBalancers != ClaimPort || v.ExternalIPs != ClaimPort && v.ExternalIPs != ClaimNone
}
