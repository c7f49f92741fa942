//go:build e2e

package e2e

import (
	"net/netip"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// ipvsOptions are the words by which ipvsadm tells the protocols apart.
var ipvsOptions = map[string]lab.Protocol{"-t": lab.TCP, "-u": lab.UDP, "--sctp-service": lab.SCTP}

// virtualServer is one as ipvsadm names it.
type virtualServer struct {
	protocol lab.Protocol
	address  netip.AddrPort
}

// ipvsTable is what ipvsadm -Sn prints: of each virtual server the words that
// describe it, and those of its real servers, by their addresses.
type ipvsTable map[virtualServer]ipvsEntry

type ipvsEntry struct {
	options     string
	realServers map[netip.AddrPort]string
}

func readIPVS(node *lab.Node) ipvsTable {
	table := ipvsTable{}
	for _, line := range strings.Split(strings.TrimSpace(node.Exec("ipvsadm", "-Sn")), "\n") {
		words := strings.Fields(line)
		if len(words) < 3 {
			continue
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

// active counts the real servers that get new connections.
func (e ipvsEntry) active() int {
	n := 0
	for _, options := range e.realServers {
		if !strings.Contains(options, "-w 0") {
			n++
		}
	}
	return n
}

// vips lists the addresses that stand on kube-ipvs0.
func vips(node *lab.Node) map[netip.Addr]bool {
	found := map[netip.Addr]bool{}
	out, err := node.TryExec("ip", "-o", "address", "show", "dev", "kube-ipvs0")
	if err != nil {
		return found // there is no such interface yet
	}
	for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
		if words := strings.Fields(line); len(words) > 3 {
			found[netip.MustParsePrefix(words[3]).Addr()] = true
		}
	}
	return found
}
