//go:build prove

package prove

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// layouts are the networks of random scenarios: lines of a scenario's network, and the
// subnets of this node's pods. The pods have .44 to .47 of these.
var layouts = []struct {
	network string
	pods    []string
	cidr    string
}{
	{"link lo 127.0.0.1/8\nlink eth0 192.0.2.11/24\nlink cni0 10.244.1.1/24\ndefault dev eth0 via 192.0.2.1", []string{"10.244.1."}, "10.244.0.0/16"},
	{eniNetwork("10.12.98.10/24", 1536, 512), []string{"10.12.98."}, "10.12.0.0/16"},
	{eniNetwork("", 2000, 1000), []string{"10.12.98."}, "10.12.98.0/24"},
	{eniNetwork("10.12.97.49/32", 2048, 512), []string{"10.12.98."}, ""},
	{eniNetwork("10.12.98.10/24", 111, 20), []string{"10.12.98."}, "10.12.98.0/24"},
}

// eniNetwork has pods on an ENI, as CNIs route them.
func eniNetwork(address string, from, to int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "link lo 127.0.0.1/8\nlink eth0 10.12.97.49/24\nlink eth1 %s\n", address)
	b.WriteString("default dev eth0 via 10.12.97.1\ndefault dev eth1 via 10.12.98.1 table 1003\n")
	for i := 44; i < 48; i++ {
		fmt.Fprintf(&b, "route 10.12.98.%d/32 dev veth%d\nrule %d to 10.12.98.%d lookup 254\nrule %d from 10.12.98.%d lookup 1003\n", i, i, to, i, from, i)
	}
	return b.String()
}

// Draw returns a scenario of one or two Services on one of the layouts, in IPv4, IPv6 or both,
// and the family whose packets are evaluated.
func Draw(t *rapid.T) (*Scenario, ip.Family) {
	layout := layouts[rapid.IntRange(0, len(layouts)-1).Draw(t, "layout")]
	families := [][]ip.Family{{ip.IPv4}, {ip.IPv6}, {ip.IPv4, ip.IPv6}, {ip.IPv6, ip.IPv4}}[rapid.IntRange(0, 3).Draw(t, "families")]
	s := &Scenario{Name: "random"}
	set := scenario.Settings{Network: inFamilies(layout.network, families)}
	for _, f := range families {
		set.Families = append(set.Families, f.String())
	}
	if layout.cidr != "" && rapid.Bool().Draw(t, "cluster CIDR") {
		set.DetectLocal, set.ClusterCIDRs = plan.DetectClusterCIDR, translations(layout.cidr, families)
	}
	set.MasqueradeAll = rapid.IntRange(0, 7).Draw(t, "masquerade all") == 7
	for i := range rapid.IntRange(1, 2).Draw(t, "services") {
		s.Services = append(s.Services, drawService(t, i, layout.pods, families))
	}
	s.Configure(&set)
	s.complete()
	v := &s.Config.VIPs
	claims := []plan.ClaimMode{plan.ClaimAuto, plan.ClaimAddress, plan.ClaimRoute, plan.ClaimPort}
	v.LoadBalancers = claims[rapid.IntRange(0, 3).Draw(t, "claim of load balancers")]
	v.ExternalIPs = claims[rapid.IntRange(0, 3).Draw(t, "claim of external IPs")]
	s.Config.SNAT.Mode = []plan.SNATMode{plan.SNATAuto, plan.SNATFWMark, plan.SNATSource, plan.SNATOff}[rapid.IntRange(0, 3).Draw(t, "SNAT mode")]
	for _, claim := range []plan.ClaimMode{v.LoadBalancers, v.ExternalIPs} {
		s.Name += " claim " + string(claim)
	}
	return s, families[rapid.IntRange(0, len(families)-1).Draw(t, "family of packets")]
}

// inFamilies returns a network of IPv4 in one or two families. An interface has addresses of
// all of them.
func inFamilies(network string, families []ip.Family) string {
	var b strings.Builder
	for line := range strings.Lines(network) {
		words := strings.Fields(line)
		if words[0] != "link" {
			for _, f := range families {
				b.WriteString(translation(words, f) + "\n")
			}
			continue
		}
		b.WriteString(strings.Join(words[:2], " "))
		for _, address := range words[2:] {
			b.WriteString(" " + strings.Join(translations(address, families), " "))
		}
		b.WriteString("\n")
	}
	return b.String()
}

// translation translates the addresses and prefixes among words.
func translation(words []string, f ip.Family) string {
	out := slices.Clone(words)
	for i, w := range words {
		if strings.Count(w, ".") == 3 {
			out[i] = translations(w, []ip.Family{f})[0]
		}
	}
	return strings.Join(out, " ")
}

// translations returns an address or a prefix of IPv4 in each family. In IPv6, each byte
// becomes a group of 16 bits below fd00::/64.
func translations(text string, families []ip.Family) []string {
	var out []string
	for _, f := range families {
		switch address, bits, isPrefix := strings.Cut(text, "/"); {
		case f == ip.IPv4:
			out = append(out, text)
		case text == "127.0.0.1/8":
			out = append(out, "::1/128")
		case isPrefix:
			n, err := strconv.Atoi(bits)
			if err != nil {
				panic(err)
			}
			out = append(out, fmt.Sprintf("%s/%d", inIPv6(address), 64+2*n))
		default:
			out = append(out, inIPv6(address).String())
		}
	}
	return out
}

// inIPv6 returns the IPv6 address for an IPv4 address.
func inIPv6(address string) netip.Addr {
	six := [16]byte{0: 0xfd}
	for i, b := range netip.MustParseAddr(address).As4() {
		six[9+2*i] = b
	}
	return netip.AddrFrom16(six)
}

func drawService(t *rapid.T, i int, pods []string, families []ip.Family) service.Service {
	yes := func(label string) bool { return rapid.Bool().Draw(t, label) }
	addr := func(format string) []netip.Addr {
		var out []netip.Addr
		for _, a := range translations(fmt.Sprintf(format, i), families) {
			out = append(out, netip.MustParseAddr(a))
		}
		return out
	}
	s := service.Service{
		Name:          types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("service-%d", i)},
		ClusterIPs:    addr("172.16.0.1%d"),
		ExternalLocal: yes("external Local"), InternalLocal: yes("internal Local"),
	}
	if yes("external IP") {
		s.ExternalIPs = addr("198.51.100.1%d")
	}
	if yes("load balancer") {
		s.LoadBalancers = addr("203.0.113.1%d")
		if yes("source ranges") {
			s.SourceRanges = scenario.Prefixes(translations("100.64.7.0/24", families))
		}
		if s.ExternalLocal {
			s.HealthCheckNodePort = uint16(32000 + i)
		}
	}
	p := service.Port{Protocol: ip.Protocols[rapid.IntRange(0, 2).Draw(t, "protocol")], Port: uint16(80 + i)}
	if yes("node port") {
		p.NodePort = uint16(30080 + i)
	}
	for j, a := range []string{pods[0] + "45", pods[0] + "46", "10.253.3.5", "10.253.3.6"} {
		state := rapid.IntRange(0, 3).Draw(t, "endpoint")
		if state == 3 {
			continue
		}
		e := service.Endpoint{Node: "node-1", Ready: state == 0, Serving: state != 2, Terminating: state == 1}
		if j > 1 {
			e.Node = "node-2"
		}
		for _, a := range translations(a, families) {
			e.Addr = netip.AddrPortFrom(netip.MustParseAddr(a), uint16(8000+i))
			p.Endpoints = append(p.Endpoints, e)
		}
	}
	s.Ports = []service.Port{p}
	return s
}
