package lab

import (
	"fmt"
	"strings"
)

// dumped are the commands whose output shows a node's state.
var dumped = []string{
	"ip address", "ip rule", "ip route show table all", "ip -6 rule", "ip -6 route show table all", "ip neigh",
	"ipvsadm -Ln", "ipvsadm -Lnc", "ipset list", "iptables-save -c", "ip6tables-save -c", "nft list tables",
	"conntrack -L", "conntrack -f ipv6 -L",
}

var dumpedSysctls = []string{
	"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding",
	"net.ipv4.conf.all.rp_filter", "net.ipv4.conf.default.rp_filter",
	"net.ipv4.conf.all.src_valid_mark", "net.ipv4.conf.all.arp_ignore", "net.ipv4.conf.all.arp_announce",
	"net.ipv4.conf.all.route_localnet",
	"net.ipv4.vs.conntrack", "net.ipv4.vs.conn_reuse_mode", "net.ipv4.vs.expire_nodest_conn",
	"net.ipv4.vs.expire_quiescent_template", "net.ipv4.vs.snat_reroute",
	"net.netfilter.nf_conntrack_tcp_be_liberal",
}

// Dump formats the node's state.
func (n *Node) Dump() string {
	var text strings.Builder
	for _, command := range dumped {
		words := strings.Fields(command)
		out, err := n.TryExec(words[0], words[1:]...)
		if err != nil {
			out = err.Error()
		}
		fmt.Fprintf(&text, "### %s\n%s\n", command, out)
	}
	fmt.Fprintf(&text, "### sysctl\n%s\n", n.dumpSysctls())
	for _, proxy := range n.proxies {
		fmt.Fprintf(&text, "### log of %s\n%s\n", proxy.Name, proxy.Log())
	}
	return text.String()
}

func (n *Node) dumpSysctls() string {
	var text strings.Builder
	for _, name := range dumpedSysctls {
		value, err := n.readSysctl(name)
		if err != nil {
			value = err.Error()
		}
		fmt.Fprintf(&text, "%s = %s\n", name, value)
	}
	return text.String()
}
