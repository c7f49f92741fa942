package plan

import (
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// SetName is the name of a set in IPv4; see In for IPv6. The names are kube-proxy's, except those
// that begin with KUBE-IPVS-. KUBE-IPVS-IPS is kube-proxy's too.
type SetName string

// The sets that rules match or add members to, and Draining.
const (
	LoopBack           SetName = "KUBE-LOOP-BACK"                 // endpoint, port, endpoint: a pod that reaches itself
	ClusterIP          SetName = "KUBE-CLUSTER-IP"                // cluster IPs by port
	ExternalIP         SetName = "KUBE-EXTERNAL-IP"               // external IPs, externalTrafficPolicy Cluster
	ExternalIPLocal    SetName = "KUBE-EXTERNAL-IP-LOCAL"         // external IPs, externalTrafficPolicy Local
	LoadBalancer       SetName = "KUBE-LOAD-BALANCER"             // load balancer IPs
	LoadBalancerLocal  SetName = "KUBE-LOAD-BALANCER-LOCAL"       // those with externalTrafficPolicy Local
	LoadBalancerFW     SetName = "KUBE-LOAD-BALANCER-FW"          // those with loadBalancerSourceRanges
	SourceCIDR         SetName = "KUBE-LOAD-BALANCER-SOURCE-CIDR" // the allowed source ranges of LoadBalancerFW
	SourceIP           SetName = "KUBE-LOAD-BALANCER-SOURCE-IP"   // the allowed sources of the node's own packets
	NodePortTCP        SetName = "KUBE-NODE-PORT-TCP"
	NodePortLocalTCP   SetName = "KUBE-NODE-PORT-LOCAL-TCP"
	NodePortUDP        SetName = "KUBE-NODE-PORT-UDP"
	NodePortLocalUDP   SetName = "KUBE-NODE-PORT-LOCAL-UDP"
	NodePortSCTP       SetName = "KUBE-NODE-PORT-SCTP-HASH"
	NodePortLocalSCTP  SetName = "KUBE-NODE-PORT-LOCAL-SCTP-HASH"
	HealthCheckPort    SetName = "KUBE-HEALTH-CHECK-NODE-PORT"
	VIPAddresses       SetName = "KUBE-IPVS-IPS"             // VIPs that are local as a whole, by an address or a route
	PortVIPs           SetName = "KUBE-IPVS-PORT-IPS"        // VIPs claimed by port
	Refused            SetName = "KUBE-IPVS-REFUSED"         // ports of PortVIPs without an endpoint
	NodePorts          SetName = "KUBE-IPVS-NODE-PORT"       // every node address and node port that is served
	SharedVIPs         SetName = "KUBE-IPVS-SHARED-IPS"      // local VIPs whose other ports leave the node
	NoLocalEndpoint    SetName = "KUBE-IPVS-NO-LOCAL"        // externalTrafficPolicy Local, no endpoint on this node
	Local              SetName = "KUBE-IPVS-LOCAL"           // externalTrafficPolicy Local, with the fwmark for internal clients
	ReplyRoutedSources SetName = "KUBE-IPVS-REPLY-SRC"       // sources whose masqueraded flows take reply routing
	DivertedSources    SetName = "KUBE-IPVS-DIVERTED"        // sources that policy rules of other programs route by another table than main
	BranchSources      SetName = "KUBE-IPVS-BRANCH"          // pods routed by input interface
	DemandedLocalhost  SetName = "KUBE-IPVS-DEMAND-LO"       // loopback addresses to whose node ports a client sent a packet; see Demands
	DemandedInternal   SetName = "KUBE-IPVS-DEMAND-INTERNAL" // addresses of Local to which an internal client sent a packet; see Demands
	DemandedVIPs       SetName = "KUBE-IPVS-DEMAND-IPS"      // shared VIPs to or from which a packet needed rules on demand; see Demands

	// Draining records the fwmark virtual servers that accept no new connections, each
	// as VIP, port and the fwmark in the form of an address. No rule matches it, and no
	// Service adds members: it is package reconcile's record of retired virtual servers.
	Draining SetName = "KUBE-IPVS-DRAIN"
)

var setTypes = []struct {
	name SetName
	kind ipset.Type
}{
	{LoopBack, ipset.HashIPPortIP},
	{ClusterIP, ipset.HashIPPort},
	{ExternalIP, ipset.HashIPPort},
	{ExternalIPLocal, ipset.HashIPPort},
	{LoadBalancer, ipset.HashIPPort},
	{LoadBalancerLocal, ipset.HashIPPort},
	{LoadBalancerFW, ipset.HashIPPort},
	{SourceCIDR, ipset.HashIPPortNet},
	{SourceIP, ipset.HashIPPortIP},
	{NodePortTCP, ipset.BitmapPort},
	{NodePortLocalTCP, ipset.BitmapPort},
	{NodePortUDP, ipset.BitmapPort},
	{NodePortLocalUDP, ipset.BitmapPort},
	{NodePortSCTP, ipset.HashIPPort},
	{NodePortLocalSCTP, ipset.HashIPPort},
	{HealthCheckPort, ipset.BitmapPort},
	{VIPAddresses, ipset.HashIP},
	{PortVIPs, ipset.HashIP},
	{SharedVIPs, ipset.HashIP},
	{Refused, ipset.HashIPPort},
	{NodePorts, ipset.HashIPPort},
	{NoLocalEndpoint, ipset.HashIPPort},
	{Local, ipset.HashIPPortMark},
	{ReplyRoutedSources, ipset.HashNet},
	{DivertedSources, ipset.HashNet},
	{BranchSources, ipset.HashNet},
	{DemandedVIPs, ipset.HashIP},
	{DemandedLocalhost, ipset.HashIP},
	{DemandedInternal, ipset.HashIP},
	{Draining, ipset.HashIPPortIP},
}

// NodePortSets returns the sets of a protocol's node ports: of all, and of those that preserve
// the client address (externalTrafficPolicy Local).
func NodePortSets(p ip.Protocol) (all, local SetName) {
	switch p {
	case ip.UDP:
		return NodePortUDP, NodePortLocalUDP
	case ip.SCTP:
		return NodePortSCTP, NodePortLocalSCTP
	}
	return NodePortTCP, NodePortLocalTCP
}

// EntryOf returns the entry of a virtual server in the sets of addresses and ports.
func EntryOf(k ipvs.Key) ipset.Entry {
	return ipset.Entry{Addr: k.Addr, Port: k.Port, Protocol: k.Protocol}
}

// KeyOf returns the virtual server at the address and port of an entry. It ignores the entry's
// other fields.
func KeyOf(e ipset.Entry) ipvs.Key {
	return ipvs.Key{Protocol: e.Protocol, Addr: e.Addr, Port: e.Port}
}

// NodePortEntry returns the entry of a node port in NodePortSets: bitmaps of ports, except for
// SCTP, whose sets hold address and port.
func NodePortEntry(key ipvs.Key) ipset.Entry {
	if key.Protocol == ip.SCTP {
		return EntryOf(key)
	}
	return ipset.Entry{Port: key.Port}
}

// KubeProxySets returns the names of the sets of a family that kube-proxy also has.
func KubeProxySets(f ip.Family) []string {
	var names []string
	for _, t := range setTypes {
		if t.name == VIPAddresses || !strings.HasPrefix(string(t.name), OwnPrefix) {
			names = append(names, t.name.In(f))
		}
	}
	return names
}

// maxSetName is IPSET_MAXNAMELEN without the terminating zero.
const maxSetName = 31

// In returns the set's name in a family: KUBE-X, or KUBE-6-X truncated to the kernel's
// limit, as in kube-proxy.
func (n SetName) In(f ip.Family) string {
	if f == ip.IPv4 {
		return string(n)
	}
	name := "KUBE-6-" + strings.TrimPrefix(string(n), "KUBE-")
	if len(name) > maxSetName {
		name = name[:maxSetName]
	}
	return name
}

// SetsInUse holds the names of sets that have, or had, members. Rules that match a set
// are written once it is in use, so a node has no rule that none of its Services needs.
// A nil SetsInUse means all sets.
type SetsInUse map[string]bool

// Has reports whether a set is in use in a family.
func (u SetsInUse) Has(set SetName, f ip.Family) bool { return u == nil || u[set.In(f)] }

// Owning are the sets whose members prove that the virtual server of an address and port is
// ours: before a virtual server is added, one of them lists it.
var Owning = []SetName{ClusterIP, LoadBalancer, ExternalIP, ExternalIPLocal, NodePorts}

// Sets returns every set of a family.
func Sets(f ip.Family) []ipset.Set {
	sets := make([]ipset.Set, len(setTypes))
	for i, t := range setTypes {
		sets[i] = ipset.Set{Name: t.name.In(f), Type: t.kind, Family: f}
		if t.kind == ipset.BitmapPort {
			sets[i].Family = 0
		}
	}
	return sets
}
