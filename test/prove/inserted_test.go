//go:build prove

package prove

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// inserted are rules that an administrator or a tool inserts at the head of a chain. Under kube-proxy
// they stay there.
var inserted = []struct{ table, chain, rule string }{
	{"filter", "FORWARD", "-s 10.12.98.45/32 -j DROP"}, // quarantine, also of open connections
	{"filter", "INPUT", "-s 192.0.2.1/32 -j DROP"},
	{"nat", "PREROUTING", "-d 10.12.115.101/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.12.98.99:8080"},
	{"nat", "OUTPUT", "-d 10.12.115.101/32 -j ACCEPT"},
	{"nat", "POSTROUTING", "-m mark --mark 0x4000/0x4000 -j SNAT --to-source 10.13.0.77"},
}

// TestInsertedRulesStayFirst inserts rules into the chains of a running process, of kube-proxy before a
// takeover, and of another version before a restart. The process then compares, is started again, and
// gets a Service that needs more jumps: source ranges, and a health check node port, whose jump
// exists only because of the rule in INPUT.
func TestInsertedRulesStayFirst(t *testing.T) {
	for _, before := range append(predecessors, predecessor{"this process", func(*Product) error { return nil }}) {
		t.Run(before.name, func(t *testing.T) {
			list, err := load("testdata/two-nics.yaml")
			if err != nil {
				t.Fatal(err)
			}
			p, err := NewProduct(list[0])
			if err != nil {
				t.Fatal(err)
			}
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			must(before.leave(p))
			var input strings.Builder
			for _, r := range inserted {
				fmt.Fprintf(&input, "*%s\n-I %s 1 %s\nCOMMIT\n", r.table, r.chain, r.rule)
			}
			must(p.NAT[ip.IPv4].Restore(input.String()))
			if before.name == "this process" {
				must(p.compare(reconcile.External{Rules: true}))
				p.checkInserted(t, "a comparison")
			}
			must(p.Start())
			must(p.compare(reconcile.External{Rules: true}))
			p.checkInserted(t, "a start")
			more := p.scenario.clone()
			if !added("source ranges", func(s *service.Service) {
				balanced(s)
				s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
			}).Apply(more) {
				t.Fatal("no Service is added")
			}
			must(p.Change(more))
			must(p.compare(reconcile.External{Rules: true}))
			p.checkInserted(t, "a Service with source ranges")
			rules := p.NAT[ip.IPv4].Save()
			for _, jump := range []string{"-j KUBE-PROXY-FIREWALL", "-j KUBE-IPVS-FILTER", "-j KUBE-NODE-PORT"} {
				before, after, found := strings.Cut(rules, jump+"\n")
				if rules = after; !found {
					t.Errorf("%s is not in INPUT, or before others of ours:\n%s", jump, before)
				}
			}
		})
	}
}

// checkInserted checks that the inserted rules precede our jumps.
func (p *Product) checkInserted(t *testing.T, when string) {
	t.Helper()
	rules := p.NAT[ip.IPv4].Save()
	for _, r := range inserted {
		_, table, _ := strings.Cut(rules, "*"+r.table+"\n")
		table, _, _ = strings.Cut(table, "COMMIT\n")
		var first string
		for line := range strings.Lines(table) {
			if strings.HasPrefix(line, "-A "+r.chain+" ") {
				first = strings.TrimSpace(line)
				break
			}
		}
		if want := "-A " + r.chain + " " + r.rule; first != want {
			t.Errorf("after %s: table %s begins with %q, want %q", when, r.table, first, want)
		}
	}
}

// TestMovingJumpsAfterARestart has a rule, as Calico's Felix inserts it, before the jump that marks
// packets for claimed ports. The next process moves its jump before that rule, and marks packets in
// table raw too, without another comparison.
func TestMovingJumpsAfterARestart(t *testing.T) {
	p, err := NewProduct(find(t, "claims claim port"))
	if err != nil {
		t.Fatal(err)
	}
	const theirs = "-A PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
	if err := p.NAT[ip.IPv4].Restore("*mangle\n" + strings.Replace(theirs, "-A PREROUTING", "-I PREROUTING 1", 1) + "COMMIT\n"); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	rules := p.NAT[ip.IPv4].Save()
	_, mangle, _ := strings.Cut(rules, "*mangle\n")
	mangle, _, _ = strings.Cut(mangle, "COMMIT\n")
	if before, _, found := strings.Cut(mangle, theirs); !found || !strings.Contains(before, "-j KUBE-IPVS-CLAIM\n") {
		t.Errorf("the jump does not precede the rule:\n%s", mangle)
	}
	_, raw, _ := strings.Cut(rules, "*raw\n")
	raw, _, _ = strings.Cut(raw, "COMMIT\n")
	if !strings.Contains(raw, "-j KUBE-IPVS-CLAIM\n") {
		t.Errorf("table raw has no jump:\n%s", raw)
	}
}
