package plan_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// TestMasqueradeOfLocalTraffic enables masquerading under externalTrafficPolicy Local,
// for one Service or for all. None of the sets that keep the client's address may then
// have a member.
func TestMasqueradeOfLocalTraffic(t *testing.T) {
	keeping := map[string]bool{}
	for _, family := range defaultConfig().Families {
		for _, set := range []plan.SetName{
			plan.LoadBalancerLocal, plan.ExternalIPLocal,
			plan.NodePortLocalTCP, plan.NodePortLocalUDP, plan.NodePortLocalSCTP,
		} {
			keeping[set.In(family)] = true
		}
	}
	for name, ask := range map[string]func(*scenario){
		"no program": func(*scenario) {},
		"the Services": func(s *scenario) {
			for i := range s.Services {
				s.Services[i].Masquerade = true
			}
		},
		"the node": func(s *scenario) { s.Config.MasqueradeExternalLocal = true },
	} {
		s := load(t, "external-local")
		ask(s)
		facts := plan.NewFacts(&s.Config, &s.Node)
		kept := 0
		for i := range s.Services {
			for _, m := range plan.ForService(&s.Config, &facts, &s.Services[i]).Members {
				if keeping[m.Set] {
					kept++
				}
			}
		}
		if (kept > 0) != (name == "no program") {
			t.Errorf("asked by %s: %d members keep the client's address", name, kept)
		}
	}
}

// TestExternalClientsThatOthersMasquerade checks that external clients under
// externalTrafficPolicy Local are dropped on a node without an endpoint only if no other program may
// masquerade them, and that our rules never masquerade them.
func TestExternalClientsThatOthersMasquerade(t *testing.T) {
	prefix := netip.MustParsePrefix
	for name, c := range map[string]struct {
		from     []netip.Prefix
		drops    bool
		fallback bool
	}{
		"no other program":                {nil, true, false},
		"as kube-proxy":                   {nil, false, true},
		"any source":                      {[]netip.Prefix{{}}, false, false},
		"pods of the node":                {[]netip.Prefix{prefix("10.244.1.0/24")}, true, false},
		"one pod":                         {[]netip.Prefix{prefix("10.244.1.7/32")}, true, false},
		"containers":                      {[]netip.Prefix{prefix("172.17.0.0/16")}, true, false},
		"clients of a VPN":                {[]netip.Prefix{prefix("10.8.0.0/24"), prefix("172.17.0.0/16")}, false, false},
		"more than the containers":        {[]netip.Prefix{prefix("172.16.0.0/12")}, false, false},
		"the network of the primary link": {[]netip.Prefix{prefix("192.168.0.0/24")}, false, false},
	} {
		s := load(t, "external-local")
		s.Config.Families = []ip.Family{ip.IPv4}
		s.Config.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{prefix("10.244.0.0/16")}}
		s.Node.Inventory.Links = []routing.Link{
			{Index: 2, Name: "eth0", Type: "device", Up: true, Addresses: []routing.Address{{Prefix: prefix("192.168.0.11/24"), Global: true}}},
			{Index: 3, Name: "docker0", Type: "bridge", Up: true, Addresses: []routing.Address{{Prefix: prefix("172.17.0.1/16"), Global: true}}},
		}
		s.Node.Inventory.Defaults = []routing.Route{{Family: ip.IPv4, Table: routing.TableMain, Dst: prefix("0.0.0.0/0"), Link: "eth0", Via: netip.MustParseAddr("192.168.0.1")}}
		s.Config.RemoteFallback = c.fallback
		s.Node.Translations = map[ip.Family][]netip.Prefix{ip.IPv4: c.from}
		s.Node.Uses = plan.SetsInUse{plan.NoLocalEndpoint.In(ip.IPv4): true, plan.NodePorts.In(ip.IPv4): true}
		rules := plan.ForNode(&s.Config, &s.Node).NAT
		inside := func(table nat.Table) string {
			var text []string
			for _, r := range rules.Chains[nat.Chain{Family: ip.IPv4, Table: table, Name: "KUBE-IPVS-INSIDE"}] {
				text = append(text, string(r))
			}
			return strings.Join(text, "\n")
		}
		if drops := strings.Contains(inside(nat.Filter), "-j DROP"); drops != c.drops {
			t.Errorf("%s: drops %v, want %v:\n%s", name, drops, c.drops, inside(nat.Filter))
		}
		if spares := strings.Contains(inside(nat.NAT), "-j RETURN"); spares == c.drops {
			t.Errorf("%s: table nat:\n%s", name, inside(nat.NAT))
		}
		if !c.drops && len(rules.Chains[nat.Chain{Family: ip.IPv4, Table: nat.Filter, Name: "KUBE-IPVS-INSIDE"}]) > 0 {
			t.Errorf("%s: table filter:\n%s", name, inside(nat.Filter))
		}
	}
}

// TestMasqueradeByMark checks that a mark of another program, which may have the same bits, does
// not give the node's own packets another source: a rule that masquerades by a mark also matches
// what only Service traffic has. An exception is the masquerade mark, as under kube-proxy.
func TestMasqueradeByMark(t *testing.T) {
	s := load(t, "cluster")
	n := 0
	for c, rules := range plan.ForNode(&s.Config, &s.Node).NAT.Chains {
		for _, r := range rules {
			text := string(r)
			if c.Name != plan.ChainPostrouting || !strings.Contains(text, "-m mark --mark") || !strings.Contains(text, "-j MASQUERADE") {
				continue
			}
			n++
			if !strings.Contains(text, "-m ipvs --ipvs") && !strings.Contains(text, "IPVS-SHARED-IPS dst") {
				t.Errorf("masquerades another program's packets: %s %s", c, text)
			}
		}
	}
	if n != 4 {
		t.Errorf("%d rules, want 4", n)
	}
}

// TestForeignMarksStay checks that a packet to the node that is not for a claimed port keeps a mark
// with the bits of the claim mark: in filter INPUT it is another program's, such as one that selects
// a table for the replies of a socket (tcp_fwmark_accept). So does a packet of the node that IPVS has
// not sent.
func TestForeignMarksStay(t *testing.T) {
	s := load(t, "cluster")
	s.Config.VIPs.LoadBalancers = plan.ClaimPort
	n := 0
	for _, j := range plan.ForNode(&s.Config, &s.Node).NAT.Jumps {
		if strings.HasSuffix(string(j.Rule), "-j KUBE-IPVS-SENT") {
			n++
			if !strings.Contains(string(j.Rule), "-m ipvs --ipvs") {
				t.Errorf("%s %s: clears marks of another program's packets", j.Chain, j.Rule)
			}
		}
		if j.Chain.Table != nat.Filter || !strings.HasSuffix(string(j.Rule), "-j KUBE-IPVS-CLAIMED") {
			continue
		}
		n++
		mark, set := strings.Index(string(j.Rule), "-m mark "), strings.Index(string(j.Rule), "-m set --match-set "+plan.PortVIPs.In(j.Chain.Family)+" dst")
		if set < 0 || mark < 0 || set < mark {
			t.Errorf("%s %s: want the mark, which few packets have, and then the set of claimed VIPs", j.Chain, j.Rule)
		}
	}
	if n != 2*len(s.Config.Families) {
		t.Errorf("%d rules, want two of each family", n)
	}
}

// TestForeignMarksStayAfterIPVS checks that a packet that IPVS has sent keeps bits of its mark that a
// rule or a policy rule of another program uses. Before the rule is known, and where the claim mark
// would route the packet to lo, they are cleared.
func TestForeignMarksStayAfterIPVS(t *testing.T) {
	for _, c := range []struct {
		mark   uint32 // of another program
		policy bool   // of a policy rule
		claim  bool   // the claim mark is cleared whatever the destination
		local  bool   // fwmarks of internal clients are in use
	}{
		{0, false, true, true},
		{0x80, false, true, true},
		{0x14, false, false, true},
		{0x14, true, false, true},
		{0x1b, false, true, false},
		{0x1b, true, true, false},
		{0xff, false, false, false},
	} {
		s := load(t, "cluster")
		s.Config.VIPs.LoadBalancers = plan.ClaimPort
		if c.policy {
			s.Node.Inventory.Rules = append(s.Node.Inventory.Rules, routing.Rule{Family: ip.IPv4, Priority: 1000, Mark: c.mark, Mask: 0xff, Table: 77})
		} else if c.mark != 0 {
			s.Node.ForeignMarks = map[ip.Family][]uint32{ip.IPv4: {c.mark}}
		}
		part := plan.ForNode(&s.Config, &s.Node)
		sent := part.NAT.Chains[nat.Chain{Family: ip.IPv4, Table: nat.Mangle, Name: "KUBE-IPVS-SENT"}]
		claim := slices.ContainsFunc(sent, func(r nat.Rule) bool {
			return strings.HasSuffix(string(r), "-j MARK --set-xmark 0x0/0x4") && !strings.Contains(string(r), "--match-set KUBE-IPVS-PORT-IPS dst")
		})
		if claim != c.claim {
			t.Errorf("%+v: the claim mark is cleared for all packets: %t\n%q", c, claim, sent)
		}
		local := slices.ContainsFunc(sent, func(r nat.Rule) bool { return strings.HasSuffix(string(r), "-j MARK --set-xmark 0x0/0x3fff") })
		_, internal := part.NAT.Chains[nat.Chain{Family: ip.IPv4, Table: nat.Mangle, Name: "KUBE-IPVS-INTERNAL"}]
		own := slices.ContainsFunc(part.NAT.Chains[nat.Chain{Family: ip.IPv4, Table: nat.NAT, Name: "KUBE-POSTROUTING"}], func(r nat.Rule) bool {
			return strings.Contains(string(r), "--mark 0x9/0x9 -m addrtype --src-type LOCAL")
		})
		if local != c.local || internal != c.local || own != c.local {
			t.Errorf("%+v: fwmarks are cleared: %t, set: %t, masqueraded: %t", c, local, internal, own)
		}
		if len(sent) == 0 {
			t.Errorf("%+v: nothing is cleared", c)
		}
		warned := slices.ContainsFunc(plan.Warnings(&s.Config, &s.Node, &part, plan.Foreign{}), func(w string) bool {
			return strings.Contains(w, "IPv4 pods and the node get node-local endpoints")
		})
		if warned == c.local {
			t.Errorf("%+v: warned: %t", c, warned)
		}
	}
}
