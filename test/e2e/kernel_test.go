//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// ipvsOptions maps ipvsadm's options to protocols.
var ipvsOptions = map[string]lab.Protocol{"-t": lab.TCP, "-u": lab.UDP, "--sctp-service": lab.SCTP}

// virtualServer is the key of a virtual server in ipvsadm's syntax.
type virtualServer struct {
	protocol lab.Protocol
	address  netip.AddrPort
}

func (vs virtualServer) String() string { return fmt.Sprintf("%s %s", vs.protocol, vs.address) }

// ipvsTable is the output of ipvsadm -Sn: for each virtual server its options, and those
// of its real servers by address.
type ipvsTable map[virtualServer]ipvsEntry

type ipvsEntry struct {
	options     string
	realServers map[netip.AddrPort]string
}

func readIPVS(node *lab.Node) ipvsTable {
	table := ipvsTable{}
	for _, line := range strings.Split(strings.TrimSpace(node.Exec("ipvsadm", "-Sn")), "\n") {
		words := strings.Fields(line)
		if len(words) < 3 || words[1] == "-f" {
			continue // a fwmark virtual server has no address
		}
		vs := virtualServer{ipvsOptions[words[1]], netip.MustParseAddrPort(words[2])}
		if words[0] == "-A" {
			table[vs] = ipvsEntry{strings.Join(words[3:], " "), map[netip.AddrPort]string{}}
			continue
		}
		table[vs].realServers[netip.MustParseAddrPort(words[4])] = strings.Join(words[5:], " ")
	}
	return table
}

func (e ipvsEntry) String() string { return fmt.Sprintf("[%s] %v", e.options, e.realServers) }

// active returns the number of real servers that get new connections.
func (e ipvsEntry) active() int {
	n := 0
	for _, options := range e.realServers {
		if !strings.Contains(options, "-w 0") {
			n++
		}
	}
	return n
}

// vips returns the VIPs that the node claims, as addresses on kube-ipvs0 or by port.
func vips(node *lab.Node) map[netip.Addr]bool {
	found := bound(node)
	for _, route := range claimRoutes(node) {
		found[netip.MustParseAddr(strings.Fields(route)[1])] = true
	}
	for _, family := range []string{"-4", "-6"} {
		out, err := node.TryExec("ip", family, "route", "show", "table", "local", "proto", "81")
		if err == nil && out != "" {
			for _, route := range sortedLines(out) {
				found[netip.MustParseAddr(strings.Fields(route)[1])] = true
			}
		}
	}
	return found
}

// claimRoutes returns the lines of the table of claimed ports.
func claimRoutes(node *lab.Node) []string {
	var lines []string
	for _, family := range []string{"-4", "-6"} {
		out, err := node.TryExec("ip", family, "route", "show", "table", "80080")
		if err == nil && out != "" { // the table does not exist yet
			lines = append(lines, sortedLines(out)...)
		}
	}
	return lines
}

// bound returns the addresses on kube-ipvs0.
func bound(node *lab.Node) map[netip.Addr]bool {
	found := map[netip.Addr]bool{}
	out, err := node.TryExec("ip", "-o", "address", "show", "dev", "kube-ipvs0")
	if err != nil {
		return found // the interface does not exist yet
	}
	for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
		if words := strings.Fields(line); len(words) > 3 {
			found[netip.MustParsePrefix(words[3]).Addr()] = true
		}
	}
	return found
}

// kernelState returns all state that a proxy programs as text. Equal states have equal
// texts: it omits numbers, counters and orders that the kernel chooses.
func kernelState(node *lab.Node) string {
	var text strings.Builder
	section := func(title string, lines []string) {
		fmt.Fprintf(&text, "### %s\n%s\n", title, strings.Join(lines, "\n"))
	}
	section("ipvs", sortedLines(node.Exec("ipvsadm", "-Sn")))
	section("sets", sortedLines(randomSeed.ReplaceAllString(node.Exec("ipset", "save"), "")))
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		section(program, rulesOf(node.Exec(program)))
	}
	for _, family := range []string{"ip", "ip6"} {
		out, err := node.TryExec("nft", "-s", "list", "table", family, "kube-ipvs")
		if err != nil {
			out = "none"
		}
		section("loopback, "+family, strings.Split(out, "\n"))
	}
	section("links", linksOf(node))
	section("claimed ports", claimRoutes(node))
	section("rules", strings.Split(node.Exec("ip", "rule")+node.Exec("ip", "-6", "rule"), "\n"))
	for _, name := range programmedSysctls {
		section(name, []string{node.ReadSysctl(name)})
	}
	return text.String()
}

// programmedSysctls excludes snat_reroute, which is 0 only while a proxy runs.
var programmedSysctls = []string{
	"net.ipv4.ip_forward", "net.ipv4.vs.conntrack", "net.ipv4.vs.expire_nodest_conn",
	"net.ipv4.vs.expire_quiescent_template", "net.ipv4.conf.all.src_valid_mark",
	"net.ipv4.conf.all.arp_ignore", "net.ipv4.conf.all.arp_announce",
	"net.netfilter.nf_conntrack_tcp_timeout_established", "net.netfilter.nf_conntrack_tcp_timeout_close_wait",
}

var (
	randomSeed = regexp.MustCompile(` initval 0x[0-9a-f]+`)
	counters   = regexp.MustCompile(`\[\d+:\d+\]`)
)

func sortedLines(text string) []string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	slices.Sort(lines)
	return lines
}

// rulesOf returns saved rules without counters and comments, in their order.
func rulesOf(saved string) []string {
	return slices.DeleteFunc(strings.Split(counters.ReplaceAllString(saved, ""), "\n"), func(line string) bool {
		return line == "" || strings.HasPrefix(line, "#")
	})
}

// linksOf returns the node's interfaces, and the addresses on kube-ipvs0.
func linksOf(node *lab.Node) []string {
	var names []string
	for _, line := range strings.Split(strings.TrimSpace(node.Exec("ip", "-o", "link")), "\n") {
		name, _, _ := strings.Cut(strings.Fields(line)[1], "@")
		names = append(names, name)
	}
	for ip := range bound(node) {
		names = append(names, ip.String())
	}
	slices.Sort(names)
	return names
}
