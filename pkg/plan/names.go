package plan

import "slices"

// OwnPrefix begins the names of our own chains and sets. Of kube-proxy's names, VIPAddresses,
// ChainIPVSFilter and ChainIPVSOutFilter begin with it too. Our other names are those of its IPVS mode.
const OwnPrefix = "KUBE-IPVS-"

// ServiceChainPrefixes begin the names of the chains that kube-proxy writes for single Services
// and endpoints in iptables mode, in this or an earlier version. Only kube-proxy has such chains.
var ServiceChainPrefixes = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-"}

// IPTablesModePrefixes begin the names of chains that kube-proxy writes in iptables mode, in
// this or an earlier version. Of these we only have ChainServices, and the kubelet has none.
var IPTablesModePrefixes = append(slices.Clone(ServiceChainPrefixes),
	ChainNodePorts, "KUBE-EXTERNAL-SERVICES", ChainServices, ChainProxyCanary)

// ReplacedPrefixes begin the names of the chains that our rules replace: our own, and those that
// kube-proxy leaves in iptables mode.
var ReplacedPrefixes = append([]string{OwnPrefix}, IPTablesModePrefixes...)

// Chains that only kube-proxy has.
const (
	ChainNodePorts     = "KUBE-NODEPORTS"       // in iptables mode; not ChainNodePort
	ChainIPVSOutFilter = "KUBE-IPVS-OUT-FILTER" // in IPVS mode
	ChainProxyCanary   = "KUBE-PROXY-CANARY"
)

// Chains that kube-proxy has too, under the same names.
const (
	ChainServices     = "KUBE-SERVICES"
	ChainLoadBalancer = "KUBE-LOAD-BALANCER"
	ChainNodePort     = "KUBE-NODE-PORT"
	ChainMarkMasq     = "KUBE-MARK-MASQ"
	ChainPostrouting  = "KUBE-POSTROUTING"
	ChainForward      = "KUBE-FORWARD"
	ChainFirewall     = "KUBE-PROXY-FIREWALL"
	ChainSourceRanges = "KUBE-SOURCE-RANGES-FIREWALL"
	ChainIPVSFilter   = "KUBE-IPVS-FILTER"
)

// Our own chains that several functions refer to. A chain that a single function writes and
// jumps to is a literal there.
const (
	chainClaim     = "KUBE-IPVS-CLAIM"
	chainDemand    = "KUBE-IPVS-DEMAND"
	chainForeign   = "KUBE-IPVS-FOREIGN"
	chainInside    = "KUBE-IPVS-INSIDE"
	chainInternal  = "KUBE-IPVS-INTERNAL"
	chainLocalhost = "KUBE-IPVS-LOCALHOST"
)
