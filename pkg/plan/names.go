package plan

// OwnPrefix begins the names of chains and sets that kube-proxy does not have, except
// VIPAddresses and KUBE-IPVS-FILTER. Our other names are kube-proxy's in IPVS mode.
const OwnPrefix = "KUBE-IPVS-"

// IPTablesModePrefixes begin the names of chains that kube-proxy writes in iptables mode, in
// this or an earlier version. Of these we only have KUBE-SERVICES, and the kubelet has none.
var IPTablesModePrefixes = []string{
	"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-",
	"KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-SERVICES", "KUBE-PROXY-CANARY",
}
