package lab

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
)

// kubeProxyNAT are the rules of kube-proxy's IPVS mode that match a LoadBalancer IP.
const kubeProxyNAT = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
`

// KubeProxyRules programs a node as kube-proxy's IPVS mode does for the "address:port" of
// one load balancer over TCP and its endpoints.
func KubeProxyRules(n *Node, vip string, endpoints ...string) {
	n.lab.t.Helper()
	service, err := netip.ParseAddrPort(vip)
	n.lab.must(err, "virtual server")
	n.Sysctl("net.ipv4.vs.conntrack", "1")
	n.Link(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "kube-ipvs0"}})
	n.Address("kube-ipvs0", service.Addr().String())

	family, restore := "inet", "iptables-restore"
	if service.Addr().Is6() {
		family, restore = "inet6", "ip6tables-restore"
	}
	n.Exec("ipset", "create", "KUBE-LOAD-BALANCER", "hash:ip,port", "family", family)
	n.Exec("ipset", "add", "KUBE-LOAD-BALANCER", fmt.Sprintf("%s,tcp:%d", service.Addr(), service.Port()))
	n.Feed(kubeProxyNAT, restore, "-w", "--noflush")

	var table strings.Builder
	fmt.Fprintf(&table, "-A -t %s -s rr\n", vip)
	for _, endpoint := range endpoints {
		fmt.Fprintf(&table, "-a -t %s -r %s -m -w 1\n", vip, endpoint)
	}
	n.Feed(table.String(), "ipvsadm", "-R")
}
