package routing

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// subject is an implementation under test, on a node with the links lo and eth1, and ways to
// change its state as another program would.
type subject struct {
	Observe       func() (State, error)
	Inventory     func() (Inventory, error)
	Apply         func([]Change) []Failure
	Watch         func(ctx context.Context, inventory func(), removed func(...Removal)) error
	addWrongScope func(netip.Addr)
	others        func(...Change) []Failure
	stack         stack
	guard         func([]Rule)
	directly      func(...step) // writes single rules without Apply
}

// subjects create the implementations by name; the end-to-end tests add the real one.
var subjects = map[string]func(*testing.T) subject{
	"fake": func(*testing.T) subject {
		f := NewFake()
		inv, _ := f.Inventory()
		inv.Links = append(inv.Links, Link{Index: 2, Name: "eth1", Type: "dummy", Up: true})
		f.SetInventory(inv)
		f.ours = true // changes are Apply's
		directly := func(steps ...step) {
			f.mu.Lock()
			defer f.mu.Unlock()
			defer f.restore()
			take((*fakeStack)(f), steps)
		}
		return subject{f.Observe, f.Inventory, f.Apply, f.Watch, f.AddWrongScope, f.Do, (*fakeStack)(f), f.Guard, directly}
	},
}

func each(t *testing.T, test func(*testing.T, subject)) {
	for name, open := range subjects {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

var (
	addr = netip.MustParseAddr
	pfx  = netip.MustParsePrefix
)

func set[K comparable](keys ...K) map[K]struct{} {
	m := map[K]struct{}{}
	for _, k := range keys {
		m[k] = struct{}{}
	}
	return m
}

// wanted returns a state with an object of every kind.
func wanted() State {
	return State{
		DummyLink:  true,
		Addresses:  set(addr("10.96.0.1"), addr("10.12.115.101"), addr("fd00::1")),
		WrongScope: set[netip.Addr](),
		Rules: set(
			Rule{Family: ip.IPv4, Priority: 512, Mark: 0x20000, Mask: 0x20000, Table: 254},
			Rule{Family: ip.IPv4, Priority: 512, Mark: 0x20000, Mask: 0x20000, Table: 250, To: pfx("10.0.0.0/8"), IIf: "eth1", Invert: true},
			Rule{Family: ip.IPv6, Priority: 512, Mark: 0x20000, Mask: 0x20000, Table: 1003, From: pfx("fd00::/64")},
			Rule{Family: ip.IPv4, Priority: 99, Mark: 0x4, Mask: 0x4, Table: 250},
		),
		Routes: set(
			Route{Family: ip.IPv4, Table: 250, Dst: pfx("10.12.192.1/32"), Link: "eth1"},
			Route{Family: ip.IPv4, Table: 250, Dst: pfx("0.0.0.0/0"), Link: "eth1", Via: addr("10.12.192.1")},
			Route{Family: ip.IPv4, Table: 255, Dst: pfx("10.12.116.0/24"), Link: DummyLink, Src: addr("10.96.0.1"), Local: true},
			Route{Family: ip.IPv6, Table: 250, Dst: pfx("::/0"), Link: "lo", Local: true},
			Route{Family: ip.IPv6, Table: 250, Dst: pfx("fd01::/64"), Link: "eth1", Metric: 7},
		),
	}
}

// TestLocalRoutes adds routes that make single addresses local: in a table whose number does
// not fit into the request's header, and in the kernel's table, beside the route that the
// kernel adds for the same address.
func TestLocalRoutes(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		const table = 80080
		local := func(f ip.Family, dst string) Route {
			return Route{Family: f, Table: table, Dst: pfx(dst), Link: "lo", Local: true}
		}
		v4, other, v6 := local(ip.IPv4, "192.168.1.200/32"), local(ip.IPv4, "192.168.1.201/32"), local(ip.IPv6, "fd00:1::200/128")
		beside4, beside6 := local(ip.IPv4, "192.168.1.202/32"), local(ip.IPv6, "fd00:1::202/128")
		beside4.Table, beside4.Metric, beside6.Table = 255, 1024, 255
		bound := func(op Op) []Change {
			return []Change{{Op: op, Address: beside4.Dst.Addr()}, {Op: op, Address: beside6.Dst.Addr()}}
		}
		s.must(t, s.Apply(append([]Change{{Op: AddLink}}, bound(AddAddress)...)))
		for i, want := range []map[Route]struct{}{set(v4, v6), set(other, v6, beside4, beside6), set(beside4, beside6), set[Route]()} {
			if i == 2 { // the routes replace the addresses
				s.must(t, s.Apply(bound(DeleteAddress)))
			}
			have, err := s.Observe()
			if err != nil {
				t.Fatal(err)
			}
			have.DummyLink, have.Addresses = false, nil
			s.must(t, s.Apply(Diff(have, State{Routes: want})))
			got, err := s.Observe()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got.Routes, byValue); diff != "" {
				t.Errorf("routes (-want +got):\n%s", diff)
			}
		}
	})
}

func (s subject) observe(t *testing.T) State {
	t.Helper()
	have, err := s.Observe()
	if err != nil {
		t.Fatal(err)
	}
	return have
}

func (s subject) must(t *testing.T, failures []Failure) {
	t.Helper()
	for _, f := range failures {
		t.Fatal(f)
	}
}

var byValue = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

// reach changes the state to want and checks the result.
func (s subject) reach(t *testing.T, want State) {
	t.Helper()
	s.must(t, s.Apply(Diff(s.observe(t), want)))
	if diff := cmp.Diff(want, s.observe(t), byValue); diff != "" {
		t.Fatalf("state (-want +got):\n%s", diff)
	}
}

func empty() State {
	return State{Addresses: set[netip.Addr](), WrongScope: set[netip.Addr](), Rules: set[Rule](), Routes: set[Route]()}
}

func TestApplyAndRemove(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		before, err := s.Inventory()
		if err != nil {
			t.Fatal(err)
		}
		s.reach(t, empty())
		s.reach(t, wanted())
		s.reach(t, empty())
		after, err := s.Inventory()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, after, byValue); diff != "" {
			t.Errorf("inventory (-before +after):\n%s", diff)
		}
	})
}

func TestDriftIsRepaired(t *testing.T) {
	for name, drift := range map[string][]Change{
		"address gone":                         {{Op: DeleteAddress, Address: addr("10.96.0.1")}},
		"address added":                        {{Op: AddAddress, Address: addr("10.96.0.2")}, {Op: AddAddress, Address: addr("fd00::2")}},
		"rule of another configuration added":  {{Op: AddRule, Rule: Rule{Family: ip.IPv4, Priority: 600, Mark: 0x40, Mask: 0x3060, Table: 1003}}},
		"route of another configuration added": {{Op: AddRoute, Route: Route{Family: ip.IPv4, Table: 80080, Dst: pfx("203.0.113.1/32"), Link: "lo", Local: true}}},
		"link gone":                            {{Op: DeleteLink}},
		"rule gone":                            {{Op: DeleteRule, Rule: Rule{Family: ip.IPv4, Priority: 512, Mark: 0x20000, Mask: 0x20000, Table: 254}}},
		"rule added":                           {{Op: AddRule, Rule: Rule{Family: ip.IPv6, Priority: 512, Mark: 0x20000, Mask: 0x20000, Table: 254}}},
		"route gone":                           {{Op: DeleteRoute, Route: Route{Family: ip.IPv6, Table: 250, Dst: pfx("fd01::/64"), Link: "eth1", Metric: 7}}},
		"route added":                          {{Op: AddRoute, Route: Route{Family: ip.IPv4, Table: 250, Dst: pfx("10.13.0.0/16"), Link: "eth1"}}},
		"route changed":                        {{Op: AddRoute, Route: Route{Family: ip.IPv4, Table: 250, Dst: pfx("0.0.0.0/0"), Link: "eth1"}}},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, s subject) {
				s.reach(t, wanted())
				do := s.others
				if strings.HasSuffix(name, "added") { // otherwise it would be foreign
					do = func(changes ...Change) []Failure { return s.Apply(changes) }
				}
				s.must(t, do(drift...))
				if len(Diff(s.observe(t), wanted())) == 0 {
					t.Fatal("the drift is not observed")
				}
				s.reach(t, wanted())
			})
		})
	}
}

// Rules and routes of other programs are foreign, even if only the protocol differs.
func TestForeignIsNotOurs(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		others := []Change{
			{Op: AddRule, Rule: Rule{Family: ip.IPv4, Priority: 512, To: pfx("10.12.192.44/32"), Table: 254}},
			{Op: AddRule, Rule: Rule{Family: ip.IPv4, Priority: 600, Mark: 0x20000, Mask: 0x20000, Table: 254}},
			{Op: AddRoute, Route: Route{Family: ip.IPv4, Table: 254, Dst: pfx("10.13.0.0/16"), Link: "eth1"}},
			{Op: AddRoute, Route: Route{Family: ip.IPv4, Table: 250, Dst: pfx("10.14.0.0/16"), Link: "eth1"}},
		}
		for rule := range wanted().Rules {
			others = append(others, Change{Op: AddRule, Rule: rule})
		}
		s.must(t, s.others(others...))
		before, err := s.Inventory()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(empty(), s.observe(t), byValue); diff != "" {
			t.Errorf("state (-want +got):\n%s", diff)
		}
		s.reach(t, wanted())
		s.reach(t, empty())
		after, err := s.Inventory()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, after, byValue); diff != "" {
			t.Errorf("inventory (-before +after):\n%s", diff)
		}
	})
}

func TestApplyIsIdempotent(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		adds := Diff(empty(), wanted())
		deletes := Diff(wanted(), State{DummyLink: true})
		for range 2 {
			s.must(t, s.Apply(adds))
		}
		if diff := cmp.Diff(wanted(), s.observe(t), byValue); diff != "" {
			t.Errorf("state (-want +got):\n%s", diff)
		}
		deletes = append(deletes, Change{Op: DeleteLink})
		for range 2 {
			s.must(t, s.Apply(deletes))
		}
		if diff := cmp.Diff(empty(), s.observe(t), byValue); diff != "" {
			t.Errorf("state (-want +got):\n%s", diff)
		}
		s.must(t, s.Apply(deletes[:len(deletes)-1])) // the link is gone, too
	})
}

// kube-proxy leaves addresses with global scope.
func TestAddressesOfWrongScope(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		want := wanted()
		s.must(t, s.others(Change{Op: AddLink}))
		for _, a := range []string{"10.96.0.1", "10.96.0.99"} {
			s.addWrongScope(addr(a))
		}
		if diff := cmp.Diff(set(addr("10.96.0.1"), addr("10.96.0.99")), s.observe(t).WrongScope, byValue); diff != "" {
			t.Errorf("wrong scope (-want +got):\n%s", diff)
		}
		s.reach(t, want)
	})
}

// TestReplacedAddressStaysLocal: while an address of wrong scope is replaced, packets to it must not
// be forwarded.
func TestReplacedAddressStaysLocal(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		a := addr("10.96.0.1")
		s.must(t, s.Apply([]Change{{Op: AddLink}}))
		s.addWrongScope(a)
		spy := &replaced{stack: s.stack, local: func() bool { _, local := s.observe(t).Routes[LocalRoute(a)]; return local }}
		if err := change(spy, Change{Op: AddAddress, Address: a}, s.stack.wrongScope); err != nil {
			t.Fatal(err)
		}
		if !spy.asked {
			t.Error("the address is not replaced")
		}
		if is := s.observe(t); len(is.WrongScope) > 0 || len(is.Addresses) != 1 || len(is.Routes) > 0 {
			t.Errorf("afterwards: %+v", is)
		}
		for _, add := range []bool{false, true} {
			if !spy.wasLocal[add] {
				t.Errorf("not local before the address is added again (%t)", add)
			}
		}
	})
}

// replaced is a stack that reports whether an address is local at each step.
type replaced struct {
	stack
	local    func() bool
	asked    bool
	wasLocal map[bool]bool
}

func (r *replaced) note(add bool) {
	if r.wasLocal == nil {
		r.wasLocal = map[bool]bool{}
	}
	r.wasLocal[add] = r.local()
}

func (r *replaced) deleteAddress(a netip.Addr) error {
	r.asked = true
	r.note(false)
	return r.stack.deleteAddress(a)
}

func (r *replaced) addAddress(a netip.Addr) error {
	if r.asked {
		r.note(true)
	}
	return r.stack.addAddress(a)
}

func TestRefusedChanges(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		s.must(t, s.others(Change{Op: AddLink}))
		onLink := func(link string) Route {
			return Route{Family: ip.IPv4, Table: 250, Dst: pfx("10.13.0.0/16"), Link: link}
		}
		withSource := onLink("eth1")
		withSource.Src = addr("192.0.2.1")
		for name, test := range map[string]struct {
			change Change
			number unix.Errno
		}{
			"route on no link":          {Change{Op: AddRoute, Route: onLink("eth9")}, unix.ENODEV},
			"route on a down link":      {Change{Op: AddRoute, Route: onLink(DummyLink)}, unix.ENETDOWN},
			"source of another program": {Change{Op: AddRoute, Route: withSource}, unix.EINVAL},
			"no operation":              {Change{}, unix.EINVAL},
			"no address":                {Change{Op: AddAddress}, unix.EINVAL},
			"mapped address":            {Change{Op: AddAddress, Address: addr("::ffff:10.0.0.1")}, unix.EINVAL},
			"rule of no family":         {Change{Op: AddRule, Rule: Rule{Priority: 1, Table: 254}}, unix.EINVAL},
			"rule of two families":      {Change{Op: AddRule, Rule: Rule{Family: ip.IPv6, Priority: 1, Table: 254, To: pfx("10.0.0.0/8")}}, unix.EINVAL},
			"unmasked prefix":           {Change{Op: AddRule, Rule: Rule{Family: ip.IPv4, Priority: 1, Table: 254, To: pfx("10.0.0.1/8")}}, unix.EINVAL},
			"rule not fully known":      {Change{Op: DeleteRule, Rule: Rule{Family: ip.IPv4, Priority: 1, Table: 254, Other: true}}, unix.EINVAL},
			"route without table":       {Change{Op: AddRoute, Route: Route{Family: ip.IPv4, Dst: pfx("10.0.0.0/8"), Link: "lo"}}, unix.EINVAL},
		} {
			good := Change{Op: AddAddress, Address: addr("10.96.0.1")}
			failures := s.Apply([]Change{test.change, good})
			if len(failures) != 1 || failures[0].Change != test.change || !errors.Is(failures[0], test.number) {
				t.Errorf("%s: failures = %v, want %v", name, failures, test.number)
			}
		}
		s.must(t, s.others(Change{Op: DeleteLink}))
		failures := s.Apply([]Change{{Op: AddAddress, Address: addr("10.96.0.1")}})
		if len(failures) != 1 || !errors.Is(failures[0], unix.ENODEV) {
			t.Errorf("address without the link: failures = %v, want ENODEV", failures)
		}
	})
}

func TestWatch(t *testing.T) {
	rule := Rule{Family: ip.IPv4, Priority: 1000, To: pfx("10.0.0.0/8"), Table: 254}
	each(t, func(t *testing.T, s subject) {
		s.reach(t, wanted())
		w := watch(t, s)
		defer w.end()
		w.expect("the beginning", true, true)
		for _, step := range []struct {
			name               string
			change             Change
			inventory, removed bool
		}{
			{"a VIP added", Change{Op: AddAddress, Address: addr("10.96.0.7")}, false, false},
			{"a VIP deleted", Change{Op: DeleteAddress, Address: addr("10.96.0.7")}, false, true},
			{"a rule added", Change{Op: AddRule, Rule: rule}, true, false},
			{"a rule deleted", Change{Op: DeleteRule, Rule: rule}, true, false},
			{"a default route added", Change{Op: AddRoute, Route: Route{Family: ip.IPv4, Table: 1003, Dst: pfx("0.0.0.0/0"), Link: "eth1"}}, true, false},
			{"another route added", Change{Op: AddRoute, Route: Route{Family: ip.IPv4, Table: 254, Dst: pfx("10.13.0.1/32"), Link: "eth1"}}, false, false},
			{"another route deleted", Change{Op: DeleteRoute, Route: Route{Family: ip.IPv4, Table: 254, Dst: pfx("10.13.0.1/32"), Link: "eth1"}}, false, false},
			{"our route deleted", Change{Op: DeleteRoute, Route: Route{Family: ip.IPv4, Table: 250, Dst: pfx("10.12.192.1/32"), Link: "eth1"}}, false, true},
			{"the link deleted", Change{Op: DeleteLink}, false, true},
			{"the link added", Change{Op: AddLink}, false, false},
			{"an address on the new link", Change{Op: DeleteAddress, Address: addr("10.96.0.1")}, false, false},
		} {
			s.must(t, s.others(step.change))
			w.expect(step.name, step.inventory, step.removed)
		}
	})
}

// A guarded rule that another program deletes is restored immediately. A rule that is no
// longer guarded is not.
func TestGuard(t *testing.T) {
	want := wanted()
	skip := Rule{Family: ip.IPv4, Action: SkipLocal, Mark: 4, Mask: 4}
	want.Rules[skip] = struct{}{}
	each(t, func(t *testing.T, s subject) {
		s.reach(t, want)
		s.guard(slices.Collect(maps.Keys(want.Rules)))
		w := watch(t, s)
		defer w.end()
		w.expect("the beginning", true, true)
		var deletions []Change
		for r := range want.Rules {
			if r != skip {
				deletions = append(deletions, Change{Op: DeleteRule, Rule: r})
			}
		}
		for name, do := range map[string]func(){
			"lookups":              func() { s.must(t, s.others(deletions...)) },
			"a goto":               func() { s.directly(del(jumpRule(0, 1))) },
			"its target":           func() { s.directly(del(nopRule(1))) },
			"both":                 func() { s.directly(del(nopRule(1)), del(jumpRule(0, 1))) },
			"another local before": func() { s.directly(add(localRule(20)), del(localRule(0)), add(localRule(0)), del(localRule(20))) },
			"behind another local": func() { s.directly(del(jumpRule(0, 1)), add(localRule(0))) },
		} {
			do()
			began := time.Now()
			for !maps.Equal(s.observe(t).Rules, want.Rules) {
				if time.Since(began) > 5*time.Second {
					t.Fatalf("%s: there is %v", name, s.observe(t).Rules)
				}
				time.Sleep(time.Millisecond)
			}
			t.Logf("%s: back after %s", name, time.Since(began).Round(100*time.Microsecond))
		}
		s.guard(nil)
		s.must(t, s.others(deletions...))
		w.drain()
		if rules := s.observe(t).Rules; !maps.Equal(rules, set(skip)) {
			t.Errorf("an unguarded rule was restored: %v", rules)
		}
	})
}

// watching is a running Watch.
type watching struct {
	t                  *testing.T
	inventory, removed chan struct{}
	end                func()
}

// watch runs Watch on the test's thread, which is in the test's namespace.
func watch(t *testing.T, s subject) watching {
	ctx, cancel := context.WithCancel(context.Background())
	w := watching{t: t, inventory: make(chan struct{}, 1), removed: make(chan struct{}, 1)}
	ended := make(chan error, 1)
	inNamespace(t, func() {
		ended <- s.Watch(ctx, func() { signal(w.inventory) }, func(...Removal) { signal(w.removed) })
	})
	w.end = func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Watch ended with %v", err)
		}
	}
	return w
}

// inNamespace runs a function concurrently with the test. The end-to-end tests make sure
// that it runs in the test's network namespace.
var inNamespace = func(_ *testing.T, f func()) { go f() }

// expect waits for the pending calls and checks that there are no others.
func (w watching) expect(when string, inventory, removed bool) {
	w.t.Helper()
	for c, due := range map[chan struct{}]bool{w.inventory: inventory, w.removed: removed} {
		name := "removed"
		if c == w.inventory {
			name = "inventory"
		}
		wait := 100 * time.Millisecond
		if due {
			wait = 5 * time.Second
		}
		select {
		case <-c:
			if !due {
				w.t.Errorf("%s: %s was called", when, name)
			}
		case <-time.After(wait):
			if due {
				w.t.Errorf("%s: %s was not called", when, name)
			}
		}
	}
	w.drain()
}

// drain skips further messages about the same change.
func (w watching) drain() {
	time.Sleep(50 * time.Millisecond)
	for _, c := range []chan struct{}{w.inventory, w.removed} {
		for len(c) > 0 {
			<-c
		}
	}
}

func TestFakeHooksAndCounters(t *testing.T) {
	f := NewFake()
	f.Refuse = func(c Change) error {
		if c.Op == AddAddress {
			return unix.ENOBUFS
		}
		return nil
	}
	failures := f.Apply([]Change{{Op: AddLink}, {Op: AddAddress, Address: addr("10.96.0.1")}})
	if len(failures) != 1 || !errors.Is(failures[0], unix.ENOBUFS) || f.Applied() != 1 {
		t.Errorf("failures = %v, %d applied", failures, f.Applied())
	}
	f.FailObserve = func() error { return unix.EINTR }
	if state, err := f.Observe(); !errors.Is(err, unix.EINTR) || state.DummyLink {
		t.Errorf("Observe = %v, %v, want only EINTR", state, err)
	}
	if inv, err := f.Inventory(); !errors.Is(err, unix.EINTR) || inv.Links != nil {
		t.Errorf("Inventory = %v, %v, want only EINTR", inv, err)
	}
	if f.Observes() != 2 {
		t.Errorf("%d observes, want 2", f.Observes())
	}
}

func TestFakeInventory(t *testing.T) {
	f := NewFake()
	want := Inventory{
		Links:    []Link{{Index: 1, Name: "lo"}, {Index: 2, Name: "eth1", Up: true}},
		Rules:    []Rule{{Family: ip.IPv4, Table: 255}, {Family: ip.IPv4, Priority: 2000, Table: 1003}},
		Defaults: []Route{{Family: ip.IPv4, Table: 254, Dst: pfx("0.0.0.0/0"), Link: "eth1"}},
	}
	f.SetInventory(want)
	ours := Rule{Family: ip.IPv4, Priority: 512, Mark: 1, Mask: 1, Table: 254}
	route := Route{Family: ip.IPv4, Table: 250, Dst: pfx("0.0.0.0/0"), Link: "eth1"}
	if failures := f.Apply([]Change{{Op: AddRule, Rule: ours}, {Op: AddRoute, Route: route}}); len(failures) > 0 {
		t.Fatal(failures)
	}
	got, err := f.Inventory()
	if err != nil {
		t.Fatal(err)
	}
	ours.Own = true
	want.Rules = slices.Insert(want.Rules, 1, ours)
	want.Defaults = slices.Insert(want.Defaults, 0, route)
	if diff := cmp.Diff(want, got, byValue); diff != "" {
		t.Errorf("inventory (-want +got):\n%s", diff)
	}
}

func TestGuardGivesUp(t *testing.T) {
	var g guard
	now := time.Now()
	for i := range maxRestored + 1 {
		if g.allowed(now) != (i < maxRestored) {
			t.Fatalf("%d rules", i)
		}
	}
	if !g.allowed(now.Add(restorePeriod + 1)) {
		t.Error("nothing is allowed in the next period")
	}
}

// TestInventoryOmitsTheTableOfVIPs: reading a table costs time for each of its routes, and
// that of VIPs is read whenever a pod starts.
func TestInventoryOmitsTheTableOfVIPs(t *testing.T) {
	rules := []rawRule{{Rule: Rule{Family: ip.IPv4, Action: Lookup, Table: 1003}}, {Rule: Rule{Family: ip.IPv4, Action: Lookup, Table: 80080}}}
	if got, want := tablesOf(rules, ip.IPv4, 80080), []int{unix.RT_TABLE_MAIN, 1003}; !slices.Equal(got, want) {
		t.Errorf("tables %v are read, want %v", got, want)
	}
}

// TestLoopbackSetDown: the kernel does not report the routes that lo loses when it is set
// down, and routes of VIPs are among them.
func TestLoopbackSetDown(t *testing.T) {
	for name, want := range map[string]bool{"lo": true, "eth1": false} {
		w := newWatcher(&cache{})
		w.dummyLink = 9
		body := nlmsg.AppendAttr(make([]byte, unix.SizeofIfInfomsg), unix.IFLA_IFNAME, append([]byte(name), 0))
		w.message(syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: unix.RTM_NEWLINK}, Data: body})
		if _, anything := w.take(); anything != want {
			t.Errorf("a change of %s: everything is read: %t, want %t", name, anything, want)
		}
	}
}
