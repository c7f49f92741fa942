package nat

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// manyRules returns rules of several extensions, n of each kind.
func manyRules(n int) []Rule {
	var out []Rule
	for i := range n {
		out = append(out,
			Rule(fmt.Sprintf(`-i eth%d -p tcp -m comment --comment "no -m set %d" -m set --match-set KUBE-%d dst,dst -j MARK --set-xmark 0x%x/0xff`, i, i, i%3, i+1)),
			Rule(fmt.Sprintf("-i eth%d -m conntrack --ctstate NEW -j MARK --set-xmark 0x%x/0xff", i, i+1)),
			Rule(fmt.Sprintf("-i eth%d -m mark --mark 0x%x/0xff -j RETURN", i, i+1)),
			Rule(fmt.Sprintf("-i eth%d -p tcp -m tcp --dport %d -j KUBE-IPVS-DROP", i, i+1)),
			Rule(fmt.Sprintf("-o eth%d -j SNAT --to-source 192.0.2.%d --random-fully", i, i%200)),
		)
	}
	return out
}

// The number of runs depends on what is missing and not on the number of rules, except
// for bisecting them if iptables does not name the line. All accepted rules are written.
func TestRunsAreIndependentOfRuleCount(t *testing.T) {
	for name, lacks := range map[string]func(Rule) bool{
		"-m set":         func(r Rule) bool { return strings.Contains(string(r), "-m set --match") },
		"-j MARK":        func(r Rule) bool { return strings.Contains(string(r), "-j MARK") },
		"-m conntrack":   func(r Rule) bool { return strings.Contains(string(r), "-m conntrack") },
		"-m comment":     func(r Rule) bool { return strings.Contains(string(r), "-m comment") },
		"--random-fully": func(r Rule) bool { return strings.Contains(string(r), "--random-fully") },
		"set KUBE-1":     func(r Rule) bool { return false },
		"one mark":       func(r Rule) bool { return strings.Contains(string(r), "--mark 0x3/0xff") },
		"one rule":       func(r Rule) bool { return r == manyRules(3)[7] },
		"three": func(r Rule) bool {
			return strings.Contains(string(r), "-m set --match") || strings.Contains(string(r), "SNAT") || strings.Contains(string(r), "-m mark")
		},
	} {
		t.Run(name, func(t *testing.T) {
			few, many := runsWithout(t, name, lacks, 4), runsWithout(t, name, lacks, 100)
			if many > few+3*6 { // 100 is about 4 << 5
				t.Errorf("%d runs for 20 rules, %d for 500", few, many)
			}
		})
	}
}

func runsWithout(t *testing.T, name string, lacks func(Rule) bool, n int) int {
	t.Helper()
	f, now := NewFake(ip.IPv4), time.Now()
	f.engine.now = func() time.Time { return now }
	f.HasSet = func(set string) bool { return name != "set "+set }
	f.Lacks = func(r Rule) error {
		if lacks(r) {
			return unix.ENOENT
		}
		return nil
	}
	rules, chain := manyRules(n), Chain{ip.IPv4, NAT, "KUBE-SERVICES"}
	changes := []Change{{Op: WriteChain, Chain: Chain{ip.IPv4, NAT, "KUBE-IPVS-DROP"}, Rules: []Rule{"-p udp -j RETURN"}}, {Op: WriteChain, Chain: chain, Rules: rules}}
	if failures := f.Apply(changes); len(failures) > 0 {
		t.Fatal(failures)
	}
	runs := f.Restores()
	var want []Rule
	guarded := true
	for _, r := range rules {
		plain := Rule(strings.TrimSuffix(string(r), randomFully))
		if name == "-m comment" {
			plain = withoutComment(r)
		}
		switch {
		case !lacks(r) && !strings.Contains(string(r), strings.TrimPrefix(name, "set ")+" dst"):
			if guarded || isGuard(r) {
				want = append(want, r)
			}
		case !lacks(plain) && plain != r:
			want = append(want, plain)
		default:
			guarded = guarded && !isGuard(r)
		}
	}
	if got := f.rules[NAT].chains[chain.Name]; !slices.Equal(got, want) {
		t.Errorf("%d of %d rules are written, want %d", len(got), len(rules), len(want))
	}
	// New rules with the same parts need no further runs, and neither does a retry.
	more := append(slices.Clone(rules), manyRules(n + 1)[5*n:]...)
	f.Apply([]Change{{Op: WriteChain, Chain: chain, Rules: more}})
	if after := f.Restores() - runs; after > 1 && name != "one rule" && name != "one mark" {
		t.Errorf("%d more runs for %d more rules", after, len(more)-len(rules))
	}
	before := f.Restores()
	now = now.Add(probePeriod)
	if s, err := f.Observe(Owned{Chains: []Chain{chain}}); err != nil || len(s.Omitted) == 0 {
		t.Errorf("%v, omitted %v", err, s.Omitted)
	}
	if again := f.Restores() - before; again > probesPerPeriod+1 {
		t.Errorf("%d runs for a retry", again)
	}
	f.Lacks, f.HasSet = nil, nil
	now = now.Add(probePeriod)
	if s, err := f.Observe(Owned{Chains: []Chain{chain}}); err != nil || len(s.Omitted) > 0 {
		t.Errorf("%v, still omitted: %v", err, s.Omitted)
	}
	return runs
}

// TestRulesWithoutComments has a kernel without xt_comment. Rules and jumps are written
// without their comments, by this process and by the next one, once; and with them when the
// kernel has it again.
func TestRulesWithoutComments(t *testing.T) {
	f, now := NewFake(ip.IPv4), time.Now()
	clock := func() time.Time { return now }
	f.engine.now = clock
	lacks := func(r Rule) error {
		if strings.Contains(string(r), "-m comment") {
			return unix.ENOENT
		}
		return nil
	}
	f.Lacks = lacks
	services, last := Chain{ip.IPv4, NAT, "KUBE-SERVICES"}, Chain{ip.IPv4, NAT, "KUBE-IPVS-LAST"}
	in := Chain{ip.IPv4, NAT, "PREROUTING"}
	want := State{
		Chains: map[Chain][]Rule{
			services: {`-p tcp -m comment --comment "a -m b" -m mark --mark 0x1/0x1 -j RETURN`, `-m comment --comment c -j MASQUERADE --random-fully`},
			last:     {`-j RETURN`},
		},
		Jumps: []Jump{
			{Chain: in, Rule: `-m comment --comment "kubernetes service portals" -j KUBE-SERVICES`},
			{Chain: in, Rule: `-p udp -m comment --comment end -j KUBE-IPVS-LAST`, Append: true},
		},
	}
	own := Owned{Chains: []Chain{services, last}, Jumps: want.Jumps}
	reconcile := func(when string, changes int) State {
		t.Helper()
		s, err := f.Observe(own)
		if err != nil {
			t.Fatal(err)
		}
		diff := Diff(s, want)
		if len(diff) != changes && changes >= 0 {
			t.Errorf("%s: changes %v, want %d", when, diff, changes)
		}
		if failures := f.Apply(diff); len(failures) > 0 {
			t.Fatalf("%s: %v", when, failures)
		}
		return s
	}
	check := func(when string, jumps, rules []Rule) {
		t.Helper()
		if got := f.rules[NAT].chains["PREROUTING"]; !slices.Equal(got, jumps) {
			t.Errorf("%s: jumps %q, want %q", when, got, jumps)
		}
		if got := f.rules[NAT].chains["KUBE-SERVICES"]; !slices.Equal(got, rules) {
			t.Errorf("%s: rules %q, want %q", when, got, rules)
		}
	}
	plainJumps := []Rule{"-j KUBE-SERVICES", "-p udp -j KUBE-IPVS-LAST"}
	plain := []Rule{"-p tcp -m mark --mark 0x1/0x1 -j RETURN", "-j MASQUERADE --random-fully"}
	reconcile("first", -1)
	check("first", plainJumps, plain)
	s := reconcile("again", 0)
	if len(s.Omitted) != 2 || s.Omitted[0].Lacks != "-m comment" || s.Omitted[0].Guard || s.Omitted[0].Instead != plain[0] {
		t.Errorf("omitted: %v", s.Omitted)
	}
	f.engine = engine{family: ip.IPv4, watched: true, now: clock}
	reconcile("next process", -1)
	check("next process", plainJumps, plain)
	reconcile("next process again", 0)
	f.Lacks = nil
	now = now.Add(probePeriod)
	reconcile("with xt_comment", -1)
	check("with xt_comment", []Rule{want.Jumps[0].Rule, want.Jumps[1].Rule}, want.Chains[services])
	reconcile("with xt_comment again", 0)
}
