package plan

// OwnPrefix begins the names of chains and sets that kube-proxy does not have, except
// VIPAddresses and KUBE-IPVS-FILTER. Our other names are kube-proxy's in IPVS mode.
const OwnPrefix = "KUBE-IPVS-"

// IPTablesModePrefixes begin the names of chains that kube-proxy writes in iptables mode, in
// this or an earlier version. Of these we only have ChainServices, and the kubelet has none.
var IPTablesModePrefixes = []string{
	"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-",
	"KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", ChainServices, ChainProxyCanary,
}

// Chains that kube-proxy has too, under the same names. ChainProxyCanary is only kube-proxy's.
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
	ChainProxyCanary  = "KUBE-PROXY-CANARY"
)

// Our own chains that more than one function names. A chain that a single function writes and
// jumps to is a literal there.
const (
	chainClaim     = "KUBE-IPVS-CLAIM"
	chainDemand    = "KUBE-IPVS-DEMAND"
	chainForeign   = "KUBE-IPVS-FOREIGN"
	chainInside    = "KUBE-IPVS-INSIDE"
	chainInternal  = "KUBE-IPVS-INTERNAL"
	chainLocalhost = "KUBE-IPVS-LOCALHOST"
)
