package ipset

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// The tests of this file run on the Fake and, with the build tag e2e, on the kernel. Both
// must pass, so the Fake behaves like the kernel.

var allTests = []struct {
	name string
	test func(*testing.T, func(testing.TB) (*client, references))
}{
	{"errnos", testErrnos},
	{"swap", testSwap},
	{"apply", testApply},
	{"in use", testInUse},
	{"grow", testGrow},
	{"observe", testObserve},
}

// references prevent a set from being destroyed.
type references interface {
	Reference(name string)
	Release(name string)
}

var (
	addrs4  = Set{"addrs", HashIP, ip.IPv4}
	addrs6  = Set{"addrs6", HashIP, ip.IPv6}
	nets4   = Set{"nets", HashNet, ip.IPv4}
	nets6   = Set{"nets6", HashNet, ip.IPv6}
	vips4   = Set{"vips", HashIPPort, ip.IPv4}
	vips6   = Set{"vips6", HashIPPort, ip.IPv6}
	marks4  = Set{"marks", HashIPPortMark, ip.IPv4}
	marks6  = Set{"marks6", HashIPPortMark, ip.IPv6}
	loops4  = Set{"loops", HashIPPortIP, ip.IPv4}
	loops6  = Set{"loops6", HashIPPortIP, ip.IPv6}
	ranges4 = Set{"ranges", HashIPPortNet, ip.IPv4}
	ranges6 = Set{"ranges6", HashIPPortNet, ip.IPv6}
	ports   = Set{"ports", BitmapPort, 0}
)

// entry parses the format of Entry.String. An argument with a slash is a net.
func entry(s string) Entry {
	var e Entry
	for _, part := range strings.Split(s, ",") {
		protocol, port, isPort := strings.Cut(part, ":")
		number, known := map[string]ip.Protocol{"none": 0, "tcp": ip.TCP, "udp": ip.UDP, "sctp": ip.SCTP}[protocol]
		switch {
		case isPort && known:
			e.Protocol = number
			fmt.Sscan(port, &e.Port)
		case strings.Contains(part, "/"):
			e.Net = netip.MustParsePrefix(part)
		case !strings.ContainsAny(part, ".:"):
			fmt.Sscan(part, &e.Port)
		case !e.Addr.IsValid():
			e.Addr = netip.MustParseAddr(part)
		default:
			e.Addr2 = netip.MustParseAddr(part)
		}
	}
	return e
}

// marked parses an entry with an optional mark: "10.96.0.1,tcp:443 0x9".
func marked(s string) (e Entry, mark uint32) {
	s, number, _ := strings.Cut(s, " ")
	fmt.Sscan(number, &mark)
	return entry(s), mark
}

func contents(set Set, entries ...string) Contents {
	c := Contents{Set: set, Entries: map[Entry]uint32{}}
	for _, s := range entries {
		e, mark := marked(s)
		c.Entries[e] = mark
	}
	return c
}

func state(all ...Contents) State {
	s := State{}
	for _, c := range all {
		s[c.Name] = c
	}
	return s
}

// everything returns sets of all types in both families.
func everything() State {
	return state(
		contents(addrs4, "10.96.0.1", "10.96.0.2"), contents(addrs6, "fd00:96::1"),
		contents(nets4, "10.0.0.0/8", "192.0.2.1/32"), contents(nets6, "2001:db8::/32", "2001:db8::1/128"),
		contents(vips4, "10.96.0.1,tcp:443", "10.96.0.1,udp:53", "10.96.0.1,sctp:53"), contents(vips6, "fd00:96::1,udp:53"),
		contents(marks4, "10.96.0.1,tcp:443 0x9", "10.96.0.1,sctp:443 0xffffffff"), contents(marks6, "fd00:96::1,udp:53 0x400b"),
		contents(loops4, "192.0.2.1,tcp:80,192.0.2.1"), contents(loops6, "2001:db8::1,tcp:80,2001:db8::1"),
		contents(ranges4, "203.0.113.1,tcp:80,10.0.0.0/8", "203.0.113.1,tcp:80,192.0.2.1/32"), contents(ranges6, "fd00::1,tcp:80,2001:db8::/32"),
		contents(ports, "0", "30000", "65535"),
	)
}

// testErrnos tests raw: the kernel's own answers.
func testErrnos(t *testing.T, open func(testing.TB) (*client, references)) {
	add := func(set Set, text string) func(raw) error {
		e, mark := marked(text)
		return func(r raw) error { return r.members([]Change{{Op: AddEntry, Set: set, Entry: e, Mark: mark}}) }
	}
	remove := func(set Set, e string) func(raw) error {
		return func(r raw) error { return r.members([]Change{{Op: DeleteEntry, Set: set, Entry: entry(e)}}) }
	}
	create := func(set Set) func(raw) error { return func(r raw) error { return r.create(set, 4) } }
	renamed := func(set Set, name string) Set { set.Name = name; return set }
	c, _ := open(t)
	mustApply(t, c, Diff(nil, everything()))
	for _, tc := range []struct {
		name string
		do   func(raw) error
		want error
	}{
		{"create what is there", create(vips4), unix.EEXIST},
		{"create with another type", create(renamed(nets4, "vips")), unix.EEXIST},
		{"create of no type", create(Set{"new", "hash:none", ip.IPv4}), ErrNoType},
		{"destroy a missing set", func(r raw) error { return r.destroy("none") }, unix.ENOENT},
		{"list what is not there", func(r raw) error { _, err := r.list("none", true); return err }, unix.ENOENT},
		{"list the header of a missing set", func(r raw) error { _, err := r.list("none", false); return err }, unix.ENOENT},
		{"add to what is not there", add(renamed(vips4, "none"), "10.0.0.1,tcp:1"), unix.ENOENT},
		{"remove from a missing set", remove(renamed(vips4, "none"), "10.0.0.1,tcp:1"), unix.ENOENT},
		{"add what is there", add(vips4, "10.96.0.1,tcp:443"), nil},
		{"add what is there, with another mark", add(marks4, "10.96.0.1,tcp:443 0xb"), nil},
		{"a mark in a set without marks", add(vips4, "10.96.0.1,tcp:443 0xb"), ErrNoMarks},
		{"add a port that is there", add(ports, "30000"), nil},
		{"remove what is not there", remove(vips4, "10.96.0.9,tcp:443"), nil},
		{"remove a missing port", remove(ports, "30001"), nil},
		{"other family", add(vips4, "fd00::1,tcp:1"), ErrProtocol},
		{"other family, IPv6", add(vips6, "10.0.0.1,tcp:1"), ErrProtocol},
		{"other family of the second address", add(loops4, "10.0.0.1,tcp:1,fd00::1"), ErrProtocol},
		{"other type", add(renamed(addrs4, "vips"), "10.0.0.1"), ErrProtocol},
		{"all addresses", add(nets4, "0.0.0.0/0"), ErrInvalidCIDR},
		{"all addresses, IPv6", add(nets6, "::/0"), ErrInvalidCIDR},
		{"all addresses to a port", add(ranges4, "10.0.0.1,tcp:1,0.0.0.0/0"), ErrInvalidCIDR},
		{"no address", add(addrs4, "0.0.0.0"), ErrNullElement},
		{"no address, IPv6", add(addrs6, "::"), ErrNullElement},
		{"port 0", add(vips4, "10.0.0.1,tcp:0"), nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := tc.do(c.raw); !errors.Is(err, tc.want) {
				t.Errorf("%v, want %v", err, tc.want)
			}
		})
	}
}

func testSwap(t *testing.T, open func(testing.TB) (*client, references)) {
	c, refs := open(t)
	other := vips4
	other.Name = "other"
	mustApply(t, c, Diff(nil, state(contents(vips4, "10.0.0.1,tcp:1"), contents(other, "10.0.0.2,tcp:2"), contents(nets4), contents(vips6))))
	refs.Reference("vips")
	for _, tc := range []struct {
		name, other string
		want        error
	}{
		{"none", "vips", unix.ENOENT},
		{"vips", "none", ErrNoOtherSet},
		{"vips", "nets", ErrTypeMismatch},
		{"vips", "vips6", ErrTypeMismatch},
		{"vips", "other", nil},
	} {
		if err := c.raw.swap(tc.name, tc.other); !errors.Is(err, tc.want) {
			t.Errorf("swap %s and %s: %v, want %v", tc.name, tc.other, err, tc.want)
		}
	}
	wantState(t, c, state(contents(other, "10.0.0.1,tcp:1"), contents(vips4, "10.0.0.2,tcp:2"), contents(nets4), contents(vips6)))
	if err := c.raw.destroy("other"); err != nil {
		t.Errorf("the reference moved with the members: %v", err)
	}
	if err := c.raw.destroy("vips"); !errors.Is(err, ErrBusy) {
		t.Errorf("the reference did not stay with the name: %v", err)
	}
}

// testApply tests client: the guarantees to callers.
func testApply(t *testing.T, open func(testing.TB) (*client, references)) {
	change := func(op Op, set Set, e string) Change {
		c := Change{Op: op, Set: set}
		if e != "" {
			c.Entry, c.Mark = marked(e)
		}
		return c
	}
	net4 := func(name string) Set { return Set{name, HashNet, ip.IPv4} }
	before := contents(vips4, "10.0.0.1,tcp:1")
	for _, tc := range []struct {
		name    string
		changes []Change
		fail    []error // one per failure, in order
		want    State
	}{
		{
			name: "what is so already",
			changes: []Change{
				change(CreateSet, vips4, ""), change(AddEntry, vips4, "10.0.0.1,tcp:1"), change(DeleteEntry, vips4, "10.0.0.2,tcp:1"),
				change(DestroySet, nets4, ""), change(DeleteEntry, nets4, "10.0.0.0/8"),
			},
			want: state(before),
		},
		{
			name:    "another type is replaced",
			changes: []Change{change(CreateSet, net4("vips"), ""), change(AddEntry, net4("vips"), "10.0.0.0/8")},
			want:    state(contents(net4("vips"), "10.0.0.0/8")),
		},
		{
			name: "marks",
			changes: []Change{
				change(CreateSet, marks4, ""), change(AddEntry, marks4, "10.0.0.1,tcp:1 0x9"), change(AddEntry, marks4, "10.0.0.2,tcp:1 0xd"),
				change(AddEntry, marks4, "10.0.0.3,tcp:1 0x19"), change(AddEntry, marks4, "10.0.0.1,tcp:1 0xb"), change(DeleteEntry, marks4, "10.0.0.2,tcp:1"),
			},
			want: state(before, contents(marks4, "10.0.0.1,tcp:1 0xb", "10.0.0.3,tcp:1 0x19")),
		},
		{
			name:    "a set without marks is replaced by one with marks",
			changes: []Change{change(CreateSet, Set{"vips", HashIPPortMark, ip.IPv4}, ""), change(AddEntry, Set{"vips", HashIPPortMark, ip.IPv4}, "10.0.0.1,tcp:1 0x9")},
			want:    state(contents(Set{"vips", HashIPPortMark, ip.IPv4}, "10.0.0.1,tcp:1 0x9")),
		},
		{
			name:    "a set of another family is replaced",
			changes: []Change{change(CreateSet, Set{"vips", HashIPPort, ip.IPv6}, "")},
			want:    state(contents(Set{"vips", HashIPPort, ip.IPv6})),
		},
		{
			name:    "destroyed with members",
			changes: []Change{change(DestroySet, vips4, "")},
			want:    State{},
		},
		{
			name: "a refused change does not affect the others",
			changes: []Change{
				change(CreateSet, Set{"", HashIP, ip.IPv4}, ""),
				change(CreateSet, Set{strings.Repeat("x", 32), HashIP, ip.IPv4}, ""),
				change(CreateSet, Set{"new", "hash:mac", 0}, ""),
				change(CreateSet, Set{"new", HashIP, 0}, ""),
				change(CreateSet, Set{"new", BitmapPort, ip.IPv4}, ""),
				change(AddEntry, nets4, "10.0.0.0/8"),
				change(AddEntry, vips4, "fd00::1,tcp:1"),
				change(AddEntry, vips4, "::ffff:10.0.0.1,tcp:1"),
				change(AddEntry, vips4, "0.0.0.0,tcp:1"),
				change(AddEntry, vips4, "10.0.0.1"),
				change(AddEntry, vips4, "10.0.0.1,none:1"),
				change(AddEntry, vips4, "10.0.0.1,tcp:1,10.0.0.1"),
				change(AddEntry, net4("vips"), "10.0.0.1/8"),
				change(AddEntry, net4("vips"), "0.0.0.0/0"),
				change(AddEntry, vips4, "10.0.0.1,tcp:1 0x9"),
				change(AddEntry, Set{"vips", HashIPPortMark, ip.IPv4}, "10.0.0.1,tcp:1"),
				{Op: 77, Set: vips4},
				change(AddEntry, vips4, "10.0.0.2,tcp:2"),
				change(CreateSet, Set{strings.Repeat("x", 31), HashIP, ip.IPv4}, ""),
			},
			fail: []error{
				unix.EINVAL, unix.EINVAL, unix.EINVAL, unix.EINVAL, unix.EINVAL, unix.ENOENT, unix.EINVAL, unix.EINVAL,
				unix.EINVAL, unix.EINVAL, unix.EINVAL, unix.EINVAL, unix.EINVAL, ErrInvalidCIDR, unix.EINVAL, unix.EINVAL, unix.EINVAL,
			},
			want: state(contents(vips4, "10.0.0.1,tcp:1", "10.0.0.2,tcp:2"), contents(Set{strings.Repeat("x", 31), HashIP, ip.IPv4})),
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, _ := open(t)
			mustApply(t, c, Diff(nil, state(before)))
			failures := c.Apply(tc.changes)
			for i, f := range failures {
				if i >= len(tc.fail) || !errors.Is(f, tc.fail[i]) {
					t.Errorf("unexpected: %v", f)
				}
			}
			if len(failures) < len(tc.fail) {
				t.Errorf("failures %v, want %v", failures, tc.fail)
			}
			wantState(t, c, tc.want)
		})
	}
}

func testInUse(t *testing.T, open func(testing.TB) (*client, references)) {
	c, refs := open(t)
	have := state(contents(vips4, "10.0.0.1,tcp:1"))
	mustApply(t, c, Diff(nil, have))
	refs.Reference("vips")
	for _, change := range []Change{{Op: DestroySet, Set: vips4}, {Op: CreateSet, Set: Set{"vips", HashNet, ip.IPv4}}} {
		failures := c.Apply([]Change{change})
		if len(failures) != 1 || !errors.Is(failures[0], ErrBusy) {
			t.Errorf("%s: %v", change, failures)
		} else {
			t.Log(failures[0])
		}
	}
	wantState(t, c, have)
	refs.Release("vips")
	mustApply(t, c, Diff(have, nil))
	wantState(t, c, State{})
}

// testGrow fills sets to their capacity.
func testGrow(t *testing.T, open func(testing.TB) (*client, references)) {
	long := Set{strings.Repeat("x", maxNameLength), HashIPPort, ip.IPv4}
	for _, set := range []Set{vips4, long, marks4} {
		c, refs := open(t)
		if err := c.raw.create(set, 4); err != nil {
			t.Fatal(err)
		}
		refs.Reference(set.Name)
		leftover := set
		leftover.Name = TemporaryName(set.Name)
		var mark uint32
		if set.Type.hasMarks() {
			mark = 0x9
		}
		mustApply(t, c, []Change{{Op: CreateSet, Set: leftover}, {Op: AddEntry, Set: leftover, Entry: entry("10.9.9.9,tcp:9"), Mark: mark}})
		want := contents(set)
		for i := range 20 {
			e := entry(fmt.Sprintf("10.0.0.%d,udp:53", i))
			want.Entries[e] = mark
			mustApply(t, c, []Change{{Op: AddEntry, Set: set, Entry: e, Mark: mark}})
		}
		wantState(t, c, state(want))
		sets, err := c.raw.list(set.Name, false)
		if err != nil || len(sets) != 1 || sets[0].maxElem != 32 {
			t.Errorf("%+v, %v, want room for 32", sets, err)
		}
	}
}

func testObserve(t *testing.T, open func(testing.TB) (*client, references)) {
	c, _ := open(t)
	wantState(t, c, State{})
	all := everything()
	mustApply(t, c, Diff(nil, all))
	wantState(t, c, all)
	names := append(slices.Collect(maps.Keys(all)), "none-such")
	for _, other := range []int{len(all), listedForOne*len(names) + 1} { // sets of the kernel
		c.sets = other
		sizes, err := c.Sizes(names)
		if err != nil || len(sizes) != len(all) {
			t.Errorf("%d sets are counted, %v, want %d", len(sizes), err, len(all))
		}
		for name, set := range all {
			if n, there := sizes[name]; n != len(set.Entries) || !there {
				t.Errorf("%s: %d members, there: %t, want %d", name, n, there, len(set.Entries))
			}
		}
	}
	for name, set := range all {
		for e := range set.Entries {
			if has, err := c.Has(set.Set, e); !has || err != nil {
				t.Errorf("%s has %s: %t, %v", name, e, has, err)
			}
			e.Port ^= 0x5555
			if has, err := c.Has(set.Set, e); e.Port != 0x5555 && (has || err != nil) {
				t.Errorf("%s has %s: %t, %v, want not", name, e, has, err)
			}
		}
	}
	if has, err := c.Has(Set{Name: "none-such", Type: HashIP, Family: ip.IPv4}, Entry{Addr: netip.MustParseAddr("10.0.0.1")}); has || !errors.Is(err, unix.ENOENT) {
		t.Errorf("a set that does not exist has a member: %t, %v", has, err)
	}
	got, err := c.Observe(func(name string) bool { return strings.HasPrefix(name, "vips") })
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(state(all["vips"], all["vips6"]).String(), got.String()); d != "" {
		t.Error(d)
	}
	mustApply(t, c, Diff(all, nil))
	wantState(t, c, State{})
}

func wantState(t *testing.T, c *client, want State) {
	t.Helper()
	got, err := c.Observe(nil)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want.String(), got.String()); d != "" {
		t.Error(d)
	}
}

func mustApply(t testing.TB, c *client, changes []Change) {
	t.Helper()
	if err := kernel.Join(c.Apply(changes)); err != nil {
		t.Fatal(err)
	}
}
