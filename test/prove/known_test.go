//go:build prove

package prove

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// knownFailure is a failure that rules of kube-ipvs or kube-proxy once caused. The test reverts
// the fix in the programmed kernel, and expects a disagreement.
type knownFailure struct {
	name     string // as in docs/proof.md
	scenario string
	revert   func(*Product)                // before the kernel is read; nil: nothing
	edit     func(*trace.Node) *trace.Node // of what was read; nil: nothing
	act      *Foreign                      // of another program; nil: none
	class    string                        // a regular expression for a class with a wrong result
	got      string                        // and for the result
}

var knownFailures = []knownFailure{
	{
		name:     "VIPs that are local only by a mark of mangle PREROUTING, where a program overwrites the mark at priority -90",
		scenario: "claims",
		revert: func(p *Product) {
			p.scenario = p.scenario.clone()
			p.scenario.Config.VIPs.LoadBalancers, p.scenario.Config.VIPs.ExternalIPs = plan.ClaimPort, plan.ClaimPort
		},
		act:   &Foreign{Name: "a chain of type nat at priority -90 in prerouting overwrites the whole mark", Rules: overwriteMarkAfterNAT},
		class: ` by eth0 > \S+ NEW \(load balancer IP of `, got: `^refused `,
	}, {
		name:     "under Local, a mark that selects the node-local endpoints instead of all, where a program sets bits in filter INPUT",
		scenario: "external-local",
		edit:     markExternal,
		act: &Foreign{
			Name: "request, after filter INPUT: a program sets 0x100000/0xfff00000", At: trace.Point{Phase: trace.Request, Where: "filter INPUT"},
			Interfere: func(at trace.Point, mark, _ *uint32) {
				if at == (trace.Point{Phase: trace.Request, Where: "filter INPUT"}) {
					*mark = *mark&^0xfff00000 | 0x100000
				}
			},
		},
		class: ` by eth0 > \S+ NEW \(load balancer IP of [^ ]*, Local\)`, got: `by \S+: the endpoint, on another node, sees the client's address and replies to it directly`,
	}, {
		name:     "under Local, external clients with addresses within the cluster CIDR that count as pods",
		scenario: "aws-vpc",
		edit:     without(nat.Mangle, "KUBE-IPVS-INTERNAL", "external clients"),
		class:    ` by eth0 > \S+ NEW \(load balancer IP of [^ ]*, Local\)`, got: `by \S+: the endpoint, on another node, sees the client's address and replies to it directly`,
	}, {
		name:     "pods that policy rules by interface route out of the node (`from all iif veth lookup T`): their requests",
		scenario: "branch",
		edit:     withoutRules(func(r routing.Rule) bool { return r.Own && r.Priority == 9 }),
		class:    ` by vlan1 > \S+ NEW \(cluster IP of `, got: `^forwarded `,
	}, {
		name:     "the same pods: packets that IPVS forwards for them",
		scenario: "branch",
		edit:     withoutRules(func(r routing.Rule) bool { return r.Own && r.IIf == "lo" && r.From.IsValid() }),
		class:    ` by vlan1 > \S+ NEW \(cluster IP of `, got: `^dropped \(asymmetric: .*the request leaves by eth0 with `,
	}, {
		name:     "the same pods: the reverse-path check of their requests, and answers to them",
		scenario: "branch",
		edit:     withoutRules(func(r routing.Rule) bool { return r.Own && r.To.IsValid() }),
		class:    ` by vlan1 > \S+ NEW \(cluster IP of `, got: `the return path to 10\.12\.200\.44 is route 0\.0\.0\.0/0 `,
	}, {
		name:     "a health check node port that equals another Service's port with source ranges, and is accepted before them",
		scenario: "healthport",
		edit: func(n *trace.Node) *trace.Node {
			return withChain(n, nat.Filter, "INPUT", func(rules []nat.Rule) []nat.Rule { return slices.Insert(rules, 0, "-j KUBE-NODE-PORT") })
		},
		class: ` by eth0 > 203\.0\.113\.5:32000 NEW \(load balancer IP of default/restricted\)`, got: `^answered `,
	},
}

// overwriteMarkAfterNAT adds a chain of nftables that overwrites the mark of the first packet of
// each connection, after table nat of iptables.
func overwriteMarkAfterNAT(n *trace.Node) *trace.Node {
	const objects = `{"nftables": [
		{"chain": {"family": "inet", "table": "fw", "name": "base", "type": "nat", "hook": "prerouting", "prio": -90, "policy": "accept"}},
		{"rule": {"family": "inet", "table": "fw", "chain": "base", "handle": 3, "expr": [{"mangle": {"key": {"meta": {"key": "mark"}}, "value": 128}}]}}
	]}`
	out := *n
	var err error
	if out.Native, err = nft.ParseRuleset([]byte(objects), "table inet fw { # handle 1\nthe rule # handle 3\n}\n"); err != nil {
		panic(err)
	}
	return &out
}

// markExternal marks external clients instead of internal ones: the virtual server of an address
// has all endpoints, and that of the mark those of this node. It leaves node ports, whose marks
// masquerade, as they are.
func markExternal(n *trace.Node) *trace.Node {
	set := plan.Local.In(n.Family)
	out := withChain(n, nat.Mangle, "KUBE-IPVS-INTERNAL", func([]nat.Rule) []nat.Rule {
		return []nat.Rule{nat.Rule("-i eth0 -j SET --map-set " + set + " dst,dst --map-mark")}
	})
	out.IPVS = maps.Clone(n.IPVS)
	for e, mark := range n.Sets[set].Entries {
		one := ipvs.Key{Protocol: e.Protocol, Addr: e.Addr, Port: e.Port}
		other := ipvs.Key{Addr: n.Family.Unspecified(), FWMark: mark}
		out.IPVS[one], out.IPVS[other] = n.IPVS[other], n.IPVS[one]
	}
	return out
}

// without removes the rules of a chain that contain a text.
func without(table nat.Table, chain, text string) func(*trace.Node) *trace.Node {
	return func(n *trace.Node) *trace.Node {
		return withChain(n, table, chain, func(rules []nat.Rule) []nat.Rule {
			return slices.DeleteFunc(rules, func(r nat.Rule) bool { return strings.Contains(string(r), text) })
		})
	}
}

// withoutRules removes policy rules.
func withoutRules(which func(routing.Rule) bool) func(*trace.Node) *trace.Node {
	return func(n *trace.Node) *trace.Node {
		out := *n
		out.Rules = slices.DeleteFunc(slices.Clone(n.Rules), which)
		return &out
	}
}

// TestKnownFailures reverts fixes, one at a time. The checks must find each failure, in a class
// that has none with the fix.
func TestKnownFailures(t *testing.T) {
	page, err := os.ReadFile("../../docs/proof.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range knownFailures {
		t.Run(k.name, func(t *testing.T) {
			if !strings.Contains(string(page), "| "+k.name+" |") {
				t.Error("docs/proof.md does not list it")
			}
			fixed, broken := k.failures(t, false), k.failures(t, true)
			if len(fixed) > 0 {
				t.Errorf("with the fix:\n%s\n%s", fixed[0], fixed[0].Path)
			}
			if len(broken) == 0 {
				t.Error("without the fix, no check fails")
				return
			}
			t.Logf("%d classes, such as\n%s", len(broken), broken[0])
		})
	}
}

// failures returns the failures of the kind that the entry describes, with or without the fix.
func (k *knownFailure) failures(t *testing.T, reverted bool) []Failure {
	t.Helper()
	p, err := NewProduct(find(t, k.scenario))
	if err != nil {
		t.Fatal(err)
	}
	if reverted && k.revert != nil {
		k.revert(p)
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
	}
	s, err := p.Subject(ip.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	if reverted && k.edit != nil {
		s.Node = k.edit(s.Node)
	}
	list, check := []Failure(nil), "classes"
	if k.act == nil {
		list = s.Check()
	} else {
		s.Points()
		list, _ = s.CheckForeign(*k.act)
		check = "foreign"
	}
	known, class, got := exceptions(t), regexp.MustCompile(k.class), regexp.MustCompile(k.got)
	return slices.DeleteFunc(list, func(f Failure) bool {
		return known.Has(check, f.String()) || !class.MatchString(f.Class.String()) || !got.MatchString(f.Got)
	})
}

// find returns a fixed scenario.
func find(t *testing.T, name string) *Scenario {
	t.Helper()
	for _, dir := range []string{"testdata", "../../pkg/plan/testdata"} {
		list, err := LoadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		if i := slices.IndexFunc(list, func(s *Scenario) bool { return s.Name == name }); i >= 0 {
			return list[i]
		}
	}
	t.Fatalf("no scenario %s", name)
	return nil
}
