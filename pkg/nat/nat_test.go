package nat

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// subject is an implementation under test, with the means to change its ruleset as
// another program would.
type subject struct {
	family  ip.Family
	Observe func(Owned) (State, error)
	Apply   func([]Change) []Failure
	foreign func(input string) error
	again   func() subject // another process
	blind   bool           // changes are not watched
}

// subjects create the implementations by name; the end-to-end tests add the real ones.
var subjects = map[string]func(*testing.T) subject{
	"fake IPv4": func(*testing.T) subject { return fakeSubject(ip.IPv4) },
	"fake IPv6": func(*testing.T) subject { return fakeSubject(ip.IPv6) },
}

func fakeSubject(family ip.Family) subject {
	f := NewFake(family)
	f.HasSet = func(name string) bool { return name != "KUBE-ABSENT" }
	return subjectOf(f)
}

func subjectOf(f *Fake) subject {
	return subject{f.engine.family, f.Observe, f.Apply, f.Restore, func() subject { return subjectOf(f.again()) }, false}
}

func each(t *testing.T, test func(*testing.T, subject)) {
	for name, open := range subjects {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

func (s subject) chain(t Table, name string) Chain { return Chain{s.family, t, name} }

func (s subject) own() Owned {
	return Owned{
		Chains:   []Chain{s.chain(NAT, "KUBE-SERVICES"), s.chain(NAT, "KUBE-MARK-MASQ"), s.chain(Filter, "KUBE-FORWARD")},
		Prefixes: []string{"KUBE-IPVS-"},
		Jumps:    s.wanted().Jumps,
	}
}

const (
	portals = Rule(`-m comment --comment "kubernetes service portals" -j KUBE-SERVICES`)
	first   = Rule("-j KUBE-IPVS-FIRST")
)

// wanted is a small plan: two jumps in one chain, one each in two others. Of the two, the first
// is moved before rules that are inserted before it.
func (s subject) wanted() State {
	return State{
		Chains: map[Chain][]Rule{
			s.chain(NAT, "KUBE-SERVICES"):    {"-m addrtype --dst-type LOCAL -j RETURN", "-p tcp -j KUBE-MARK-MASQ"},
			s.chain(NAT, "KUBE-MARK-MASQ"):   {"-j MARK --set-xmark 0x4000/0x4000"},
			s.chain(NAT, "KUBE-IPVS-FIRST"):  nil,
			s.chain(Filter, "KUBE-FORWARD"):  {"-m mark --mark 0x4000/0x4000 -j ACCEPT"},
			s.chain(Mangle, "KUBE-IPVS-PRE"): {"-m mark --mark 0x1 -j RETURN"},
		},
		Jumps: []Jump{
			{Chain: s.chain(Filter, "FORWARD"), Rule: `-m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD`},
			{Chain: s.chain(Mangle, "PREROUTING"), Rule: "-j KUBE-IPVS-PRE", Moves: true},
			{Chain: s.chain(NAT, "PREROUTING"), Rule: first, Moves: true},
			{Chain: s.chain(NAT, "PREROUTING"), Rule: portals},
		},
	}
}

func (s subject) observe(t *testing.T) State {
	t.Helper()
	return s.observeOwned(t, s.own())
}

func (s subject) observeOwned(t *testing.T, own Owned) State {
	t.Helper()
	have, err := s.Observe(own)
	if err != nil {
		t.Fatal(err)
	}
	return have
}

// reach applies what leads to want, and checks that no change remains.
func (s subject) reach(t *testing.T, want State) {
	t.Helper()
	s.reachOwned(t, s.own(), want)
}

// reachOwned is reach for other owned objects. It returns the state in the end.
func (s subject) reachOwned(t *testing.T, own Owned, want State) State {
	t.Helper()
	if failures := s.Apply(Diff(s.observeOwned(t, own), want)); len(failures) > 0 {
		t.Fatal(failures)
	}
	have := s.observeOwned(t, own)
	if left := Diff(have, want); len(left) > 0 {
		t.Fatalf("remaining changes: %v\nof %+v", left, have)
	}
	return have
}

func (s subject) must(t *testing.T, input string) {
	t.Helper()
	if err := s.foreign(input); err != nil {
		t.Fatal(err)
	}
}

// ignoreForeign excludes the fields of a State that describe other programs, and what is not observed.
var ignoreForeign = cmp.Options{cmpopts.IgnoreFields(State{}, "Open"), cmpopts.IgnoreFields(Jump{}, "Moves")}

// A jump that only accepts packets exists only in a chain that may not accept them
// anyway.
func TestAcceptingJumps(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		want := s.wanted()
		want.Jumps[0].Accepts = true
		forward := want.Jumps[0]
		reaches := func(what string, stands bool) {
			t.Helper()
			s.reach(t, want)
			have := s.observe(t)
			found := slices.ContainsFunc(have.Jumps, func(j Jump) bool { return j.Chain == forward.Chain && j.Rule == forward.Rule })
			if found != (stands || s.blind) {
				t.Errorf("%s: the jump exists: %t", what, found)
			}
			if after := After(have, want); len(Diff(after, want)) > 0 {
				t.Errorf("%s: %v", what, Diff(after, want))
			}
		}
		reaches("nothing else", false)
		for _, other := range []struct {
			what, set, undo string
			stands          bool
		}{
			{"policy", ":FORWARD DROP [0:0]", ":FORWARD ACCEPT [0:0]", true},
			{"rule", "-A FORWARD -p tcp -j DROP", "-D FORWARD -p tcp -j DROP", true},
			{"rule that accepts", "-A FORWARD -p tcp -j ACCEPT", "-D FORWARD -p tcp -j ACCEPT", true},
			{"chain", ":OTHER - [0:0]\n-A OTHER -p udp -j DROP\n-A FORWARD -j OTHER", "-D FORWARD -j OTHER", true},
			{"rule that decides nothing", "-A FORWARD -p tcp -j MARK --set-xmark 0x1/0x1", "-D FORWARD -p tcp -j MARK --set-xmark 0x1/0x1", false},
			{"kubelet's", ":KUBE-FIREWALL - [0:0]\n-A KUBE-FIREWALL -p udp -j DROP\n-A FORWARD -j KUBE-FIREWALL", "-D FORWARD -j KUBE-FIREWALL", false},
			{"policy of another chain", ":INPUT DROP [0:0]", ":INPUT ACCEPT [0:0]", false},
		} {
			s.must(t, "*filter\n"+other.set+"\nCOMMIT\n")
			reaches(other.what, other.stands)
			s.must(t, "*filter\n"+other.undo+"\nCOMMIT\n")
			reaches(other.what+", undone", false)
		}
	})
}

func TestReachAndKeep(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		want := s.wanted()
		s.reach(t, want)
		if diff := cmp.Diff(want, s.observe(t), ignoreForeign); diff != "" {
			t.Errorf("state (-want +got):\n%s", diff)
		}
	})
}

// In each case another program changes a complete ruleset.
func TestDriftIsRepaired(t *testing.T) {
	pre := "*nat\n-I PREROUTING 1 -p udp -j ACCEPT\nCOMMIT\n"
	for name, input := range map[string]string{
		"rule before ours":   pre,
		"chain before ours":  "*nat\n:CNI - [0:0]\n:CNI-2 - [0:0]\n-A CNI -p udp -j RETURN\n-A CNI -j CNI-2\n-A CNI-2 -p tcp -j ACCEPT\n-I PREROUTING 1 -j CNI\nCOMMIT\n",
		"policy before ours": "*mangle\n-I PREROUTING 1 -p udp -j RETURN\nCOMMIT\n",
		"jump deleted":       "*nat\n-D PREROUTING " + string(portals) + "\nCOMMIT\n",
		"first jump deleted": "*nat\n-D PREROUTING " + string(first) + "\nCOMMIT\n",
		"jump doubled":       "*nat\n-A PREROUTING " + string(portals) + "\n-I PREROUTING 1 " + string(portals) + "\nCOMMIT\n",
		"jumps swapped":      "*nat\n-D PREROUTING " + string(first) + "\n-I PREROUTING 2 " + string(first) + "\nCOMMIT\n",
		"old jump at head":   "*nat\n-I PREROUTING 1 -p tcp -j KUBE-SERVICES\nCOMMIT\n",
		"old jump behind":    "*nat\n-A PREROUTING -p udp -j ACCEPT\n-A PREROUTING -p tcp -j KUBE-SERVICES\n-A PREROUTING -p tcp -j KUBE-SERVICES\nCOMMIT\n",
		"chain flushed":      "*nat\n-F KUBE-SERVICES\nCOMMIT\n",
		"rule added":         "*filter\n-A KUBE-FORWARD -j DROP\nCOMMIT\n",
		"chain deleted":      "*mangle\n-F PREROUTING\n-F KUBE-IPVS-PRE\n-X KUBE-IPVS-PRE\nCOMMIT\n",
		"stale chains":       "*filter\n:KUBE-IPVS-OLD - [0:0]\n:KUBE-IPVS-OLDER - [0:0]\n-A KUBE-IPVS-OLD -j KUBE-IPVS-OLDER\n-A INPUT -j KUBE-IPVS-OLD\nCOMMIT\n",
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, s subject) {
				s.reach(t, s.wanted())
				s.must(t, input)
				if len(Diff(s.observe(t), s.wanted())) == 0 {
					t.Fatal("the drift is not observed")
				}
				s.reach(t, s.wanted())
				want := s.wanted()
				if diff := cmp.Diff(want, s.observe(t), ignoreForeign); diff != "" {
					t.Errorf("state (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// A rule that another program inserts before a jump without Moves, or between such jumps, stays there
// when the process starts again, and when our part changes: more jumps are written beside those that
// exist, and one that replaces an earlier one takes its place.
func TestInsertedRulesStayFirst(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		forward := s.chain(Filter, "FORWARD")
		chain := func(name string) Jump { return Jump{Chain: forward, Rule: Rule("-j KUBE-IPVS-" + name)} }
		want := State{Chains: map[Chain][]Rule{}}
		for _, name := range []string{"A", "B", "C", "D"} {
			want.Chains[chain(name).To()] = []Rule{"-j ACCEPT"}
		}
		const inserted, between = Rule("-p udp -j DROP"), Rule("-p sctp -j DROP")
		// is checks all rules of the chain, by taking those that drop for jumps of ours.
		is := func(when string, rules ...Rule) {
			t.Helper()
			s = s.again()
			own := Owned{Prefixes: []string{"KUBE-IPVS-"}, Jumps: want.Jumps}
			s.reachOwned(t, own, want)
			own.Chains = []Chain{s.chain(Filter, "DROP")}
			have := s.observeOwned(t, own)
			if got := byChain(have.Jumps)[forward]; !slices.Equal(got, rules) || len(have.Misplaced) > 0 {
				t.Errorf("%s: %q, misplaced %v, want %q", when, got, have.Misplaced, rules)
			}
		}
		a, b, c, d := chain("A"), chain("B"), chain("C"), chain("D")
		want.Jumps = []Jump{b, c}
		is("first", b.Rule, c.Rule)
		s.must(t, "*filter\n-I FORWARD 1 "+string(inserted)+"\nCOMMIT\n")
		is("a rule is inserted", inserted, b.Rule, c.Rule)
		s.must(t, "*filter\n-I FORWARD 3 "+string(between)+"\nCOMMIT\n")
		is("a rule is inserted between ours", inserted, b.Rule, between, c.Rule)
		want.Jumps = []Jump{a, b, c, d}
		is("more jumps", inserted, a.Rule, b.Rule, between, c.Rule, d.Rule)
		want.Jumps = []Jump{b, c}
		is("fewer jumps", inserted, b.Rule, between, c.Rule)
		s.must(t, "*filter\n-I FORWARD 4 "+string(c.Rule)+"\n-A FORWARD "+string(b.Rule)+"\nCOMMIT\n")
		is("copies are deleted", inserted, b.Rule, between, c.Rule)
		b.Rule, c.Rule = "-p tcp "+b.Rule, "-p tcp "+c.Rule
		want.Jumps = []Jump{b, c}
		is("others replace them", inserted, b.Rule, c.Rule, between)
		s.must(t, "*filter\n-D FORWARD "+string(b.Rule)+"\n-A FORWARD "+string(b.Rule)+"\nCOMMIT\n")
		is("ours are in another order", inserted, b.Rule, c.Rule, between)
		s.must(t, "*filter\n-D FORWARD "+string(b.Rule)+"\n-D FORWARD "+string(c.Rule)+"\nCOMMIT\n")
		is("ours are deleted", b.Rule, c.Rule, inserted, between)
	})
}

// Rules that cannot keep packets from ours are no reason to move ours.
func TestHarmlessRulesBeforeOurs(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		s.reach(t, s.wanted())
		s.must(t, "*nat\n:CNI - [0:0]\n:CNI-2 - [0:0]\n-A CNI -j CNI-2\n-A CNI -p tcp -j RETURN\n-A CNI-2 -j MARK --set-xmark 0x1/0x1\n"+
			"-I PREROUTING 1 -p udp -j MARK --set-xmark 0x2/0x2\n-I PREROUTING 2 -j CNI\nCOMMIT\n")
		if left := Diff(s.observe(t), s.wanted()); len(left) > 0 {
			t.Errorf("changes: %v", left)
		}
	})
}

// If a program puts its rules before ours whenever ours are there, we give up after a few
// moves, and try again later.
func TestContestedHeadOfChain(t *testing.T) {
	now := time.Now()
	f := NewFake(ip.IPv4)
	f.engine.now = func() time.Time { return now }
	s, want := subjectOf(f), Owned{Jumps: subjectOf(f).wanted().Jumps}
	for c := range s.wanted().Chains {
		want.Chains = append(want.Chains, c)
	}
	const insists = "*nat\n-I PREROUTING 1 -j ACCEPT\nCOMMIT\n"
	s.reach(t, s.wanted())
	// fight returns how often our jumps are moved before they stay behind the other rule.
	fight := func() (moves int) {
		for range 10 {
			now = now.Add(time.Second)
			s.must(t, "*nat\n-D PREROUTING -j ACCEPT\nCOMMIT\n")
			s.must(t, insists)
			have, err := f.Observe(want)
			if err != nil {
				t.Fatal(err)
			}
			changes := Diff(have, s.wanted())
			if len(changes) == 0 {
				if !slices.Equal(have.Contested, []Chain{s.chain(NAT, "PREROUTING")}) {
					t.Errorf("contested: %v", have.Contested)
				}
				continue
			}
			if len(have.Contested) > 0 {
				t.Errorf("contested: %v while ours are moved", have.Contested)
			}
			moves++
			if failures := f.Apply(changes); len(failures) > 0 {
				t.Fatal(failures)
			}
		}
		return moves
	}
	s.must(t, insists)
	for range 2 {
		if moves := fight(); moves != maxMoves {
			t.Errorf("moved %d times, want %d", moves, maxMoves)
		}
		// Our jumps are still repaired and sorted.
		s.must(t, "*nat\n-D PREROUTING "+string(first)+"\nCOMMIT\n")
		s.reach(t, s.wanted())
		now = now.Add(giveUpFor)
	}
	// Moves at long intervals are not limited.
	for range 5 {
		s.must(t, insists)
		s.reach(t, s.wanted())
		now = now.Add(moveWindow)
	}
}

// Jumps that must see all packets of a chain are not written while another program insists
// on its head, nor on other chains for that chain's sake.
func TestJumpsThatMustSeeAllPackets(t *testing.T) {
	now := time.Now()
	f := NewFake(ip.IPv4)
	f.engine.now = func() time.Time { return now }
	s := subjectOf(f)
	pre, want, own := s.chain(Mangle, "PREROUTING"), s.wanted(), Owned{}
	for i := range want.Jumps {
		if want.Jumps[i].Chain == pre {
			want.Jumps[i].Sees = pre
		}
	}
	inOutput := Jump{Chain: s.chain(Mangle, "OUTPUT"), Rule: "-j KUBE-IPVS-PRE", Moves: true, Sees: pre}
	want.Jumps = append(want.Jumps, inOutput)
	own.Jumps = want.Jumps
	for c := range want.Chains {
		own.Chains = append(own.Chains, c)
	}
	// written returns the jumps to the chain after a comparison.
	written := func() (chains []string) {
		have := s.reachOwned(t, own, want)
		for _, j := range slices.Concat(have.Jumps, have.Misplaced) {
			if j.To().Name == "KUBE-IPVS-PRE" {
				chains = append(chains, j.Chain.Name)
			}
		}
		slices.Sort(chains)
		return chains
	}
	both := []string{"OUTPUT", "PREROUTING"}
	if got := written(); !slices.Equal(got, both) {
		t.Fatalf("alone: in %v", got)
	}
	for round := range 2 {
		for range maxMoves {
			s.must(t, "*mangle\n-I PREROUTING 1 -m conntrack --ctstate ESTABLISHED -j ACCEPT\nCOMMIT\n")
			written()
		}
		s.must(t, "*mangle\n-I PREROUTING 1 -m conntrack --ctstate ESTABLISHED -j ACCEPT\nCOMMIT\n")
		for range 2 {
			if got := written(); len(got) > 0 {
				t.Errorf("round %d: while another program insists on the head: in %v", round, got)
			}
		}
		now = now.Add(giveUpFor)
		if got := written(); !slices.Equal(got, both) {
			t.Errorf("round %d: later: in %v", round, got)
		}
	}
}

// A jump that makes up for a chain, and its own chain, exist while another program's rule
// decides in the chain, wherever that stands: between two moves of ours it is the first one.
func TestJumpBehindForeignRule(t *testing.T) {
	now := time.Now()
	f := NewFake(ip.IPv4)
	f.engine.now = func() time.Time { return now }
	s := subjectOf(f)
	pre, behind, want, own := s.chain(Mangle, "PREROUTING"), s.chain(Raw, "KUBE-IPVS-BEHIND"), s.wanted(), Owned{}
	want.Chains[behind] = []Rule{"-j MARK --set-xmark 0x4/0x4"}
	want.Jumps = append(want.Jumps, Jump{Chain: s.chain(Raw, "PREROUTING"), Rule: "-j KUBE-IPVS-BEHIND", Behind: pre})
	own.Jumps = want.Jumps
	for c := range want.Chains {
		own.Chains = append(own.Chains, c)
	}
	written := func() (jump, chain bool) {
		have := s.reachOwned(t, own, want)
		_, chain = have.Chains[behind]
		return slices.ContainsFunc(have.Jumps, func(j Jump) bool { return j.To() == behind }), chain
	}
	check := func(when string, want bool) {
		t.Helper()
		if jump, chain := written(); jump != want || chain != want {
			t.Errorf("%s: jump %t, chain %t, want %t", when, jump, chain, want)
		}
	}
	check("alone", false)
	const established = "-m conntrack --ctstate ESTABLISHED -j ACCEPT\nCOMMIT\n"
	s.must(t, "*mangle\n-A PREROUTING -j MARK --set-xmark 0x1/0x1\nCOMMIT\n")
	check("behind us, a rule that decides nothing", false)
	s.must(t, "*mangle\n-A PREROUTING "+established)
	check("behind us", true)
	for range maxMoves + 1 {
		s.must(t, "*mangle\n-I PREROUTING 1 "+established)
		check("before us", true)
	}
	now = now.Add(giveUpFor)
	check("ours are moved again", true)
	s.must(t, "*mangle\n"+strings.Repeat("-D PREROUTING -m conntrack --ctstate ESTABLISHED -j ACCEPT\n", maxMoves+2)+"COMMIT\n")
	check("removed", false)
}

// TestContestedEndOfChain: a jump with Append is appended again when another program appends a rule
// that decides about packets. If that program insists, there is no such jump for a while.
func TestContestedEndOfChain(t *testing.T) {
	now := time.Now()
	f := NewFake(ip.IPv4)
	f.engine.now = func() time.Time { return now }
	s, want := subjectOf(f), Owned{}
	const last = Rule("-j KUBE-IPVS-LAST")
	pre, desired := s.chain(NAT, "PREROUTING"), s.wanted()
	desired.Chains[s.chain(NAT, "KUBE-IPVS-LAST")] = []Rule{"-j ACCEPT"}
	desired.Jumps = append(desired.Jumps, Jump{Chain: pre, Rule: last, Append: true})
	want.Jumps = desired.Jumps
	for c := range desired.Chains {
		want.Chains = append(want.Chains, c)
	}
	observe := func() State {
		t.Helper()
		have, err := f.Observe(want)
		if err != nil {
			t.Fatal(err)
		}
		return have
	}
	reach := func() {
		t.Helper()
		if failures := f.Apply(Diff(observe(), desired)); len(failures) > 0 {
			t.Fatal(failures)
		}
	}
	const harmless, insists = "*nat\n-A PREROUTING -j MARK --set-mark 1\nCOMMIT\n", "*nat\n-A PREROUTING -p udp -j DROP\nCOMMIT\n"
	reach()
	s.must(t, harmless)
	if have := observe(); len(have.Overtaken) > 0 || len(Diff(have, desired)) > 0 {
		t.Errorf("overtaken by a rule that does not decide: %v", have.Overtaken)
	}
	s.must(t, insists)
	for range 2 {
		moves := 0
		for range 2 * maxAppends {
			now = now.Add(time.Second)
			have := observe()
			if len(have.Yielded) > 0 {
				reach()
				break
			}
			if !slices.Equal(have.Overtaken, []Chain{pre}) {
				t.Fatalf("overtaken: %v", have.Overtaken)
			}
			moves++
			reach()
			if rules := f.rules[NAT].chains["PREROUTING"]; rules[len(rules)-1] != last {
				t.Fatalf("the jump is not last: %q", rules)
			}
			s.must(t, "*nat\n-D PREROUTING -p udp -j DROP\nCOMMIT\n")
			s.must(t, insists)
		}
		if have := observe(); moves != maxAppends || !slices.Equal(have.Yielded, []Chain{pre}) || slices.Contains(f.rules[NAT].chains["PREROUTING"], last) {
			t.Errorf("moved %d times, want %d; yielded: %v, %q", moves, maxAppends, have.Yielded, f.rules[NAT].chains["PREROUTING"])
		}
		now = now.Add(giveUpFor)
		reach()
		if !slices.Contains(f.rules[NAT].chains["PREROUTING"], last) {
			t.Fatal("the jump does not come back")
		}
		s.must(t, "*nat\n-D PREROUTING -p udp -j DROP\nCOMMIT\n")
		s.must(t, insists)
	}
}

// A jump with Append is written after foreign rules, and is not moved when more of these
// follow that let packets pass.
func TestAppendedJump(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		const last = Rule("-j KUBE-IPVS-LAST")
		want, pre := s.wanted(), s.chain(NAT, "PREROUTING")
		want.Chains[s.chain(NAT, "KUBE-IPVS-LAST")] = []Rule{"-j ACCEPT"}
		want.Jumps = append(want.Jumps, Jump{Chain: pre, Rule: last, Append: true})
		s.must(t, "*nat\n:CNI - [0:0]\n-A PREROUTING -j CNI\nCOMMIT\n")
		s.reach(t, want)
		all := Owned{Chains: []Chain{s.chain(NAT, "CNI")}, Prefixes: []string{"KUBE-"}}
		for _, then := range []string{"", "*nat\n-A PREROUTING -j CNI\nCOMMIT\n"} {
			s.must(t, then)
			s.reach(t, want)
			state, err := s.Observe(all)
			if err != nil {
				t.Fatal(err)
			}
			if got := byChain(state.Jumps)[pre]; !slices.Equal(got, []Rule{first, portals, "-j CNI", last}) {
				t.Errorf("after %q: %q", then, got)
			}
		}
		s.must(t, "*nat\n-D PREROUTING "+string(last)+"\n-I PREROUTING 1 "+string(last)+"\nCOMMIT\n")
		if len(Diff(s.observe(t), want)) == 0 {
			t.Error("its position at the head is not observed")
		}
		s.reach(t, want)
	})
}

func TestForeignRulesAreKept(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		s.must(t, "*nat\n:CNI - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n-A CNI -j KUBE-MARK-MASQ\n-A PREROUTING -j CNI\nCOMMIT\n")
		s.reach(t, s.wanted())
		state, err := s.Observe(Owned{Chains: []Chain{s.chain(NAT, "CNI")}})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]Rule{"-j KUBE-MARK-MASQ"}, state.Chains[s.chain(NAT, "CNI")]); diff != "" {
			t.Errorf("foreign chain (-want +got):\n%s", diff)
		}
		if want := []Jump{{Chain: s.chain(NAT, "PREROUTING"), Rule: "-j CNI"}}; !slices.Equal(state.Jumps, want) {
			t.Errorf("foreign jump: %v, want it kept", state)
		}
	})
}

// A foreign rule that jumps to a chain of ours prevents only the deletion of that chain
// and of the chains that it refers to.
func TestReferencedChainStays(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		s.reach(t, s.wanted())
		s.must(t, "*nat\n:CNI - [0:0]\n-A CNI -j KUBE-SERVICES\nCOMMIT\n")
		failures := s.Apply(Diff(s.observe(t), State{}))
		var names []string
		for _, f := range failures {
			if !errors.Is(f, unix.EMLINK) {
				t.Errorf("%v, want EMLINK", f)
			}
			names = append(names, f.Change.Chain.Name)
		}
		slices.Sort(names)
		if want := []string{"KUBE-MARK-MASQ", "KUBE-SERVICES"}; !slices.Equal(names, want) {
			t.Errorf("not deleted: %v, want %v", names, want)
		}
		s.must(t, "*nat\n-F CNI\nCOMMIT\n")
		s.reach(t, State{})
	})
}

// A fault in one table does not affect the others, and leaves that table unchanged.
func TestTablesFailIndependently(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		want := s.wanted()
		bad := Rule("-j KUBE-NOWHERE")
		want.Chains[s.chain(Mangle, "KUBE-IPVS-PRE")] = []Rule{"-j RETURN", bad}
		failures := s.Apply(Diff(s.observe(t), want))
		if len(failures) != 2 {
			t.Fatalf("failures = %v, want the two of table mangle", failures)
		}
		for _, f := range failures {
			if f.Change.Chain.Table != Mangle || !strings.Contains(f.Error(), string(bad)) && !strings.Contains(f.Error(), "COMMIT") {
				t.Errorf("%v, want it of mangle, with the rule", f)
			}
			t.Log(f)
		}
		have := s.observe(t)
		if len(have.Chains) != 4 || len(have.Jumps) != 3 {
			t.Errorf("%d chains, %d jumps, want 4 and 3: %v", len(have.Chains), len(have.Jumps), have)
		}
		s.reach(t, s.wanted())
	})
}

// A rule that is refused by itself, because its set is missing, is omitted, and the rest
// of its table is written. Observe then returns the desired rules.
func TestRefusedRuleIsOmitted(t *testing.T) {
	const absent = "-m set --match-set KUBE-ABSENT dst,dst -j "
	each(t, func(t *testing.T, s subject) {
		drop := Change{Op: WriteChain, Chain: s.chain(NAT, "KUBE-IPVS-DROP"), Rules: []Rule{"-p udp -j RETURN", "-p tcp -j RETURN"}}
		for _, test := range []struct {
			name           string
			chain          Chain
			rules, written []Rule
			guard          bool
		}{
			{"marks", s.chain(NAT, "KUBE-SERVICES"), []Rule{absent + "MARK --set-xmark 0x1/0x1", "-j RETURN"}, []Rule{"-j RETURN"}, false},
			{"jumps", s.chain(NAT, "KUBE-SERVICES"), []Rule{absent + "KUBE-IPVS-DROP", "-p udp -j KUBE-IPVS-DROP"}, []Rule{"-p udp -j KUBE-IPVS-DROP"}, false},
			{
				"guards", s.chain(Filter, "KUBE-SERVICES"),
				[]Rule{"-p sctp -j MARK --set-xmark 0x4/0x4", absent + "RETURN", "-p udp -j MARK --set-xmark 0x1/0x1", "-p udp -j ACCEPT", "-j DROP"},
				[]Rule{"-p sctp -j MARK --set-xmark 0x4/0x4", "-p udp -j ACCEPT", "-j DROP"}, true,
			},
			{"sets a mark from a set", s.chain(Mangle, "KUBE-SERVICES"), []Rule{"-j SET --map-set KUBE-ABSENT dst,dst --map-mark"}, nil, false},
		} {
			own := Owned{Chains: []Chain{test.chain}, Prefixes: []string{"KUBE-IPVS-"}}
			write := Change{Op: WriteChain, Chain: test.chain, Rules: test.rules}
			if failures := s.Apply([]Change{drop, write}); len(failures) > 0 {
				t.Errorf("%s: %v", test.name, failures)
			}
			got, err := s.Observe(own)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.rules, got.Chains[test.chain]); diff != "" || len(got.Omitted) != 1 || got.Omitted[0].Guard != test.guard {
				t.Errorf("%s: omitted %+v (-want +got)\n%s", test.name, got.Omitted, diff)
			} else if err := got.Omitted[0].Err; !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), "KUBE-ABSENT") {
				t.Errorf("%s: %v, want ENOENT with the set's name", test.name, err)
			}
			fresh, err := s.again().Observe(own)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.written, fresh.Chains[test.chain]); diff != "" || len(fresh.Omitted) > 0 {
				t.Errorf("%s: written (-want +got)\n%s", test.name, diff)
			}
			if failures := s.Apply([]Change{{Op: DeleteChain, Chain: test.chain, Rules: nil}, {Op: DeleteChain, Chain: drop.Chain, Rules: nil}}); len(failures) > 0 {
				t.Fatal(failures)
			}
			if have, _ := s.Observe(own); len(have.Chains) > 0 || len(have.Omitted) > 0 {
				t.Errorf("remaining: %v", have)
			}
		}
	})
}

// TestRefusedJumpIsOmitted does the same with a jump: the jumps beside it are written in
// their order.
func TestRefusedJumpIsOmitted(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		want, own := s.wanted(), s.own()
		pre := s.chain(NAT, "PREROUTING")
		absent := Jump{Chain: pre, Rule: "-m set --match-set KUBE-ABSENT dst,dst -j KUBE-IPVS-FIRST"}
		last := Jump{Chain: pre, Rule: "-m set --match-set KUBE-ABSENT src,src -j KUBE-SERVICES"}
		i := slices.Index(want.Jumps, Jump{Chain: pre, Rule: portals})
		want.Jumps = append(slices.Insert(want.Jumps, i, absent), last)
		own.Jumps = want.Jumps
		for range 2 {
			have, err := s.Observe(own)
			if err != nil {
				t.Fatal(err)
			}
			if failures := s.Apply(Diff(have, want)); len(failures) > 0 {
				t.Fatal(failures)
			}
			if have, err = s.Observe(own); err != nil || len(Diff(have, want)) > 0 || len(have.Omitted) != 2 {
				t.Fatalf("%v: remaining changes: %v, omitted: %v", err, Diff(have, want), have.Omitted)
			}
		}
		s.must(t, "*nat\n-D PREROUTING "+string(portals)+"\nCOMMIT\n")
		have, err := s.Observe(own)
		if err != nil || len(Diff(have, want)) == 0 {
			t.Errorf("%v: the removal of a jump is not observed", err)
		}
		if failures := s.Apply(Diff(have, State{})); len(failures) > 0 {
			t.Fatal(failures)
		}
	})
}

func TestApplyIsIdempotent(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		c, old := s.chain(NAT, "KUBE-SERVICES"), s.chain(NAT, "KUBE-IPVS-GONE")
		changes := []Change{
			{Op: WriteChain, Chain: c, Rules: []Rule{"-j RETURN"}},
			{Op: InsertJump, Chain: s.chain(NAT, "OUTPUT"), Rules: []Rule{portals}},
			{Op: DeleteJump, Chain: s.chain(NAT, "INPUT"), Rules: []Rule{portals}},
			{Op: DeleteChain, Chain: old, Rules: nil},
		}
		want := State{
			Chains: map[Chain][]Rule{c: {"-j RETURN"}},
			Jumps:  []Jump{{Chain: s.chain(NAT, "OUTPUT"), Rule: portals}},
		}
		for range 2 {
			if failures := s.Apply(changes); len(failures) > 0 {
				t.Fatal(failures)
			}
			if diff := cmp.Diff(want, s.observe(t), ignoreForeign); diff != "" {
				t.Errorf("state (-want +got):\n%s", diff)
			}
		}
	})
}

// A change that cannot be expressed as input is refused before iptables runs, and does
// not affect other changes.
func TestInvalidChanges(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		other := ip.IPv4
		if s.family == ip.IPv4 {
			other = ip.IPv6
		}
		c := s.chain(NAT, "KUBE-SERVICES")
		for _, bad := range []struct {
			change Change
			number unix.Errno
		}{
			{Change{Op: WriteChain, Chain: Chain{other, NAT, "KUBE-X"}, Rules: nil}, unix.EAFNOSUPPORT},
			{Change{Op: WriteChain, Chain: s.chain("security", "KUBE-X"), Rules: nil}, unix.EINVAL},
			{Change{Op: WriteChain, Chain: s.chain(NAT, "PREROUTING"), Rules: nil}, unix.EINVAL},
			{Change{Op: DeleteChain, Chain: s.chain(NAT, "OUTPUT"), Rules: nil}, unix.EINVAL},
			{Change{Op: WriteChain, Chain: s.chain(NAT, "KUBE X"), Rules: nil}, unix.EINVAL},
			{Change{Op: WriteChain, Chain: s.chain(NAT, strings.Repeat("X", 29)), Rules: nil}, unix.EINVAL},
			{Change{Op: WriteChain, Chain: c, Rules: []Rule{"-j RETURN\n-F OUTPUT"}}, unix.EINVAL},
			{Change{Op: WriteChain, Chain: c, Rules: []Rule{`-m comment --comment "open -j RETURN`}}, unix.EINVAL},
			{Change{Op: InsertJump, Chain: s.chain(NAT, "FORWARD"), Rules: []Rule{portals}}, unix.ENOENT},
			{Change{Op: InsertJump, Chain: s.chain(NAT, "KUBE-IPVS-X"), Rules: []Rule{portals}}, unix.ENOENT},
			{Change{Op: InsertJump, Chain: s.chain(NAT, "OUTPUT"), Rules: nil}, unix.EINVAL},
			{Change{Chain: c}, unix.EINVAL},
		} {
			good := Change{Op: WriteChain, Chain: c, Rules: []Rule{"-j RETURN"}}
			failures := s.Apply([]Change{bad.change, good})
			if len(failures) != 1 || failures[0].Change.Op != bad.change.Op || !errors.Is(failures[0], bad.number) {
				t.Errorf("%s: failures = %v, want %v", bad.change, failures, bad.number)
			}
		}
	})
}

// Rules and policies that may drop forwarded packets are found, also in chains that other rules jump
// to. Ours do not count.
func TestRefusingChains(t *testing.T) {
	for _, c := range []struct {
		input string
		want  []Chain
	}{
		{"*filter\n-A FORWARD -s 10.244.0.0/16 -j ACCEPT\n-A INPUT -j DROP\nCOMMIT\n", nil},
		{"*filter\n:CNI - [0:0]\n-A CNI -j ACCEPT\n-A CNI -p tcp -j RETURN\n-A FORWARD -j CNI\nCOMMIT\n", nil},
		{"*filter\n:FORWARD DROP [0:0]\nCOMMIT\n", []Chain{{ip.IPv4, Filter, "FORWARD"}}},
		{"*filter\n:ISOLATION - [0:0]\n:STAGE - [0:0]\n-A STAGE -o docker0 -j DROP\n-A ISOLATION -g STAGE\n-A FORWARD -j ISOLATION\nCOMMIT\n", []Chain{{ip.IPv4, Filter, "FORWARD"}}},
		{"*raw\n-A PREROUTING -m rpfilter --invert -j DROP\nCOMMIT\n", []Chain{{ip.IPv4, Raw, "PREROUTING"}}},
		{"*mangle\n-A POSTROUTING -p tcp -j DROP\nCOMMIT\n", []Chain{{ip.IPv4, Mangle, "POSTROUTING"}}},
		{"*filter\n:OURS - [0:0]\n-A OURS -j DROP\n-A FORWARD -j OURS\nCOMMIT\n", nil},
	} {
		f := NewFake(ip.IPv4)
		if err := f.restore(c.input, nil); err != nil {
			t.Fatal(err)
		}
		s, err := f.Observe(Owned{Prefixes: []string{"OURS"}})
		if err != nil || !slices.Equal(s.Refusing, c.want) {
			t.Errorf("%s%v, want %v (%v)", c.input, s.Refusing, c.want, err)
		}
	}
}
