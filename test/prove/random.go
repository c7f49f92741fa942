//go:build prove

package prove

import (
	"fmt"
	"net/netip"
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

// Draw returns a scenario of one or two Services on one of the layouts.
func Draw(t *rapid.T) *Scenario {
	layout := layouts[rapid.IntRange(0, len(layouts)-1).Draw(t, "layout")]
	s := &Scenario{Name: "random"}
	set := scenario.Settings{Network: layout.network}
	if layout.cidr != "" && rapid.Bool().Draw(t, "cluster CIDR") {
		set.DetectLocal, set.ClusterCIDRs = plan.DetectClusterCIDR, []string{layout.cidr}
	}
	set.MasqueradeAll = rapid.IntRange(0, 7).Draw(t, "masquerade all") == 7
	for i := range rapid.IntRange(1, 2).Draw(t, "services") {
		s.Services = append(s.Services, drawService(t, i, layout.pods))
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
	return s
}

func drawService(t *rapid.T, i int, pods []string) service.Service {
	yes := func(label string) bool { return rapid.Bool().Draw(t, label) }
	addr := func(format string) []netip.Addr { return []netip.Addr{netip.MustParseAddr(fmt.Sprintf(format, i))} }
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
			s.SourceRanges = scenario.Prefixes([]string{"100.64.7.0/24"})
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
		e := service.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), uint16(8000+i)), Node: "node-1", Ready: state == 0, Serving: state != 2, Terminating: state == 1}
		if j > 1 {
			e.Node = "node-2"
		}
		p.Endpoints = append(p.Endpoints, e)
	}
	s.Ports = []service.Port{p}
	return s
}
