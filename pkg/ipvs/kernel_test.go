//go:build e2e

package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

func TestKernel(t *testing.T) {
	for _, tt := range allTests {
		t.Run(tt.name, func(t *testing.T) { tt.test(t, openKernel) })
	}
}

// openKernel moves the test to a new network namespace, where it stays: the thread is never
// unlocked, so the runtime ends it with the test.
func openKernel(t testing.TB) *client {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	// Without a link that is up there is no local table, and the kernel takes every real
	// server's address for a broadcast address.
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	n, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return &n.client
}

// TestText compares State.String with the output of ipvsadm.
func TestText(t *testing.T) {
	c := openKernel(t)
	sticky := service("rr", "192.0.2.1:80", "192.0.2.2:81=0")
	sticky.Flags, sticky.Timeout = FlagPersistent, 10800
	hashing := service("mh", "[2001:db8::1]:80")
	hashing.Flags = FlagSched1 | FlagSched2
	other := service("rr")
	other.Flags = FlagSched1 | FlagSched3 | FlagOnePacket
	mustApply(t, c, Diff(nil, State{
		tcp1: sticky, tcp6: hashing, udp1: other,
		key(ip.SCTP, "10.96.0.1:443"): service("rr"),
		mark(ip.IPv4, 7):              service("rr", "192.0.2.1:80"),
		mark(ip.IPv6, 7):              service("rr"),
	}))
	state, err := c.Observe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ipvsadm", "-Sn").CombinedOutput()
	if err != nil {
		t.Fatal(err, string(out))
	}
	if d := cmp.Diff(sortedLines(string(out)), sortedLines(state.String())); d != "" {
		t.Error(d)
	}
}

func sortedLines(s string) []string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	slices.Sort(lines)
	return lines
}

// TestListMatchesDumps compares the two ways to read real servers, with a list of several
// pages and a second network namespace with virtual servers: some kernels then omit some
// from the list.
func TestListMatchesDumps(t *testing.T) {
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })
	crowded := func(c *client) {
		want := State{mark(ip.IPv4, 7): service("rr", "192.0.2.1:80")}
		for i := range 60 {
			port := uint16(1 + i)
			v4, v6 := key(ip.TCP, "10.96.0.1:1"), key(ip.UDP, "[fd00::1]:1")
			v4.Port, v6.Port = port, port
			want[v4], want[v6] = service("rr", "192.0.2.1:80", "192.0.2.2:81=0"), service("mh", "[2001:db8::1]:80")
		}
		mustApply(t, c, Diff(nil, want))
	}
	ready := make(chan struct{})
	go func() {
		crowded(openKernel(t))
		close(ready)
		<-done // the namespace lives as long as its thread
	}()
	<-ready
	c := openKernel(t)
	crowded(c)
	list, err := c.raw.list()
	if err != nil || len(list) == 0 {
		t.Fatalf("%d virtual servers in the list: %v", len(list), err)
	}
	for key, got := range list {
		want, err := c.realServers(key)
		if err != nil || !maps.Equal(got, want) {
			t.Errorf("%s: %v in the list, %v by themselves, %v", key, got, want, err)
		}
	}
	t.Logf("%d of 120 virtual servers are in the list", len(list))
	if state, err := c.Observe(); err != nil || len(state) != 121 {
		t.Errorf("%d virtual servers, want 121: %v", len(state), err)
	}
}

// TestConnectionIsCounted makes a connection through a virtual server.
func TestConnectionIsCounted(t *testing.T) {
	c := openKernel(t)
	server, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	vip := key(ip.TCP, "127.0.0.2:80")
	mustApply(t, c, Diff(nil, State{vip: service("rr", server.Addr().String())}))
	conn, err := net.DialTimeout("tcp4", "127.0.0.2:80", 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	got, err := c.Connections(vip)
	if err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	for _, n := range got {
		if n != (Connections{Active: 1}) {
			t.Errorf("%+v", n)
		}
	}
}

// TestOptionMatchesDumps compares the two ways to read the real servers of one virtual
// server: few, as many as fit into one request, and more.
func TestOptionMatchesDumps(t *testing.T) {
	c := openKernel(t)
	s := c.raw.(*socket)
	for _, key := range []Key{tcp1, udp1, key(ip.SCTP, "10.96.0.1:443"), mark(ip.IPv4, 7)} {
		for _, count := range []int{0, 1, 15, 16, 17, 64, 200} {
			vs := service("rr")
			for i := range count {
				vs.RealServers[netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)}), uint16(8000+i))] = RealServer{Weight: i}
			}
			mustApply(t, c, Diff(nil, State{key: vs}))
			want, err := s.dumpDestinations(key)
			if err != nil || len(want) != count {
				t.Fatalf("%s: %d real servers dumped, want %d: %v", key, len(want), count, err)
			}
			got, err := s.options.destinations(key)
			if err != nil || !maps.Equal(byDest(got), byDest(want)) {
				t.Errorf("%s with %d: %v, want %v: %v", key, count, got, want, err)
			}
			mustApply(t, c, Diff(State{key: vs}, nil))
		}
		if got, err := s.options.destinations(key); err != nil || len(got) != 0 {
			t.Errorf("%s, which does not exist: %v, %v", key, got, err)
		}
	}
}

func byDest(dests []destination) map[netip.AddrPort]destination {
	m := make(map[netip.AddrPort]destination, len(dests))
	for _, d := range dests {
		m[d.Dest] = d
	}
	return m
}

// TestServicesByOption compares the two ways to list virtual servers: few, as many as fit
// into one request, and more than were counted. With an IPv6 virtual server the option's
// list must not be taken for complete.
func TestServicesByOption(t *testing.T) {
	c := openKernel(t)
	s := c.raw.(*socket)
	sticky, hashing, once := service("wrr", "192.0.2.1:80"), service("mh"), service("rr")
	sticky.Flags, sticky.Timeout = FlagPersistent, 10800
	hashing.Flags, once.Flags = FlagSched1|FlagSched2, FlagOnePacket
	want := State{
		tcp1: sticky, tcp2: hashing, udp1: once,
		key(ip.SCTP, "10.96.0.1:443"): service("rr"), mark(ip.IPv4, 7): service("rr", "192.0.2.1:80"),
	}
	for i := range 3 * spareServices {
		want[numbered(i)] = service("rr")
	}
	mustApply(t, c, Diff(nil, want))
	dumped, err := s.dumpServices()
	if err != nil || len(dumped) != len(want) {
		t.Fatalf("%d virtual servers dumped, want %d: %v", len(dumped), len(want), err)
	}
	for _, room := range []int{1, spareServices, len(want), len(want) + 1} {
		got, err := s.options.servicesIn(room)
		if err != nil || !slices.Equal(got, dumped) {
			t.Errorf("with room for %d: %d virtual servers, want %d: %v", room, len(got), len(dumped), err)
		}
	}
	for key, vs := range map[Key]Service{tcp6: service("rr", "[2001:db8::1]:80"), mark(ip.IPv6, 7): service("rr")} {
		want[key] = vs
		mustApply(t, c, Diff(nil, State{key: vs}))
		if state, err := c.Observe(); err != nil || state.String() != want.String() {
			t.Errorf("observed\n%s, want\n%s: %v", state, want, err)
		}
	}
	mustApply(t, c, Diff(State{tcp6: want[tcp6], mark(ip.IPv6, 7): want[mark(ip.IPv6, 7)]}, nil))
	delete(want, tcp6)
	delete(want, mark(ip.IPv6, 7))
	if state, err := c.Observe(); err != nil || state.String() != want.String() {
		t.Errorf("observed\n%s, want\n%s: %v", state, want, err)
	}
}

// TestModuleUsers checks that all references to the module are accounted for: otherwise
// everything would be correct, but slow.
func TestModuleUsers(t *testing.T) {
	c := openKernel(t)
	s := c.raw.(*socket)
	base := func() int {
		all, modules, err := moduleUsers()
		if err != nil {
			t.Skip(err) // built in
		}
		return all - modules
	}
	for _, scheduler := range []string{"rr", "wrr", "mh"} {
		if err := c.Probe(scheduler); err != nil {
			t.Fatal(err)
		}
	}
	others := base() // virtual servers of other network namespaces
	mustApply(t, c, Diff(nil, State{tcp1: service("rr", "192.0.2.1:80"), tcp2: service("mh"), udp1: service("wrr")}))
	if got := base(); got != others+3 {
		t.Errorf("%d references, want %d", got, others+3)
	}
	if others == 0 && !onlyIPv4(s.options.count, moduleUsers) {
		t.Error("not recognized as IPv4 only")
	}
	mustApply(t, c, Diff(nil, State{tcp6: service("rr")}))
	if got := base(); got != others+4 {
		t.Errorf("with an IPv6 virtual server: %d references, want %d", got, others+4)
	}
	if onlyIPv4(s.options.count, moduleUsers) {
		t.Error("the IPv6 virtual server is not recognized")
	}
}

// TestTimedOutSocket sends a request that is never answered, and another one after the
// timeout.
func TestTimedOutSocket(t *testing.T) {
	c := openKernel(t)
	s := c.raw.(*socket)
	s.timeout = 50 * time.Millisecond
	err := s.call(func(*ipvs.Handle) error { time.Sleep(100 * time.Millisecond); return nil })
	if err == nil {
		t.Error("no timeout")
	}
	s.timeout = answerTimeout
	mustApply(t, c, Diff(nil, State{tcp1: service("rr")}))
}

// TestManyChanges sends more changes than fit into one write. Some are refused; each has
// its own answer.
func TestManyChanges(t *testing.T) {
	c := openKernel(t)
	var changes []Change
	for i := range 3*nlmsg.BatchSize + 1 {
		vs := VirtualServer{Scheduler: "rr"}
		if i%50 == 49 {
			vs.Scheduler = "nosuch"
		}
		changes = append(changes, Change{Op: AddVirtualServer, Key: numbered(i), VirtualServer: vs})
	}
	var refused []Key
	for _, failure := range c.Apply(changes) {
		refused = append(refused, failure.Change.Key)
	}
	if !slices.Equal(refused, []Key{numbered(49), numbered(99), numbered(149)}) {
		t.Errorf("refused: %v", refused)
	}
	state, err := c.Observe()
	if err != nil || len(state) != len(changes)-len(refused) {
		t.Errorf("%d virtual servers, %v", len(state), err)
	}
}

func numbered(i int) Key {
	return key(ip.TCP, fmt.Sprintf("10.%d.%d.%d:443", i>>16&255, i>>8&255, i&255))
}

// BenchmarkApply programs a virtual server with two real servers, alone and in a batch.
// BenchmarkLibrary does the same through the library.
func BenchmarkApply(b *testing.B) {
	for _, at := range []int{1, 1000} {
		b.Run(fmt.Sprint(at), func(b *testing.B) {
			c := openKernel(b)
			for i := 0; b.Loop(); {
				want := State{}
				for range at {
					want[numbered(i)] = service("rr", "192.0.2.1:80", "192.0.2.2:80")
					i++
				}
				mustApply(b, c, Diff(nil, want))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*at), "ns/service")
		})
	}
}

// BenchmarkObserve reads many IPv4 virtual servers with two real servers each: with Observe,
// without and with one IPv6 virtual server beside them, and with the dump and the list that
// Observe used before.
func BenchmarkObserve(b *testing.B) {
	for _, n := range []int{1000, 10000, 44125} {
		run := func(name string, observe func(*client) (int, error), more State) {
			b.Run(fmt.Sprintf("%d/%s", n, name), func(b *testing.B) {
				c := openKernel(b)
				b.Cleanup(func() { mustApply(b, c, deleteAll(c)) })
				want := maps.Clone(more)
				for i := range n {
					want[numbered(i)] = service("rr", "192.0.2.1:80", "192.0.2.2:80")
				}
				mustApply(b, c, Diff(nil, want))
				for b.Loop() {
					if got, err := observe(c); err != nil || got != len(want) {
						b.Fatalf("%d virtual servers, want %d: %v", got, len(want), err)
					}
				}
			})
		}
		observe := func(c *client) (int, error) { state, err := c.Observe(); return len(state), err }
		run("IPv4", observe, State{})
		run("IPv6 too", observe, State{tcp6: service("rr", "[2001:db8::1]:80")})
		run("dumps", func(c *client) (int, error) {
			services, err := c.raw.(*socket).dumpServices()
			_, listErr := c.raw.list()
			return len(services), errors.Join(err, listErr)
		}, State{})
	}
}

// BenchmarkAddBesideDeleted adds real servers one by one after others were deleted, which the
// kernel still keeps and looks each added one up among (ip_vs_trash_get_dest in
// net/netfilter/ipvs/ip_vs_ctl.c). BenchmarkUpdateBesideDeleted changes a weight, which needs no
// such look-up.
func BenchmarkAddBesideDeleted(b *testing.B) {
	besideDeleted(b, func(c *client, n int) Change {
		return Change{Op: AddRealServer, Key: tcp1, Dest: manyDests(100000 + n), RealServer: RealServer{Weight: 1}}
	})
}

func BenchmarkUpdateBesideDeleted(b *testing.B) {
	besideDeleted(b, func(c *client, n int) Change {
		return Change{Op: UpdateRealServer, Key: tcp1, Dest: manyDests(99999), RealServer: RealServer{Weight: 1 + n%2}}
	})
}

func besideDeleted(b *testing.B, change func(c *client, n int) Change) {
	for _, deleted := range []int{0, 1000, 10000, 60000} {
		b.Run(fmt.Sprint(deleted), func(b *testing.B) {
			c := openKernel(b)
			mustApply(b, c, Diff(nil, State{tcp1: service("rr")}))
			mustApply(b, c, []Change{{Op: AddRealServer, Key: tcp1, Dest: manyDests(99999), RealServer: RealServer{Weight: 1}}})
			// In portions: the kernel searches all real servers of a virtual server too.
			for part := range slices.Chunk(slices.Collect(seq(deleted)), 100) {
				var add, remove []Change
				for _, i := range part {
					add = append(add, Change{Op: AddRealServer, Key: tcp1, Dest: manyDests(i), RealServer: RealServer{Weight: 1}})
					remove = append(remove, Change{Op: DeleteRealServer, Key: tcp1, Dest: manyDests(i)})
				}
				mustApply(b, c, add)
				mustApply(b, c, remove)
			}
			for n := 0; b.Loop(); n++ {
				mustApply(b, c, []Change{change(c, n)})
			}
		})
	}
}

func seq(n int) func(func(int) bool) {
	return func(yield func(int) bool) {
		for i := range n {
			if !yield(i) {
				return
			}
		}
	}
}

func manyDests(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
}

// deleteAll deletes immediately what the kernel would delete some time after the network
// namespace ends.
func deleteAll(c *client) []Change {
	state, _ := c.Observe()
	return Diff(state, nil)
}

func BenchmarkLibrary(b *testing.B) {
	s := openKernel(b).raw.(*socket)
	for i := 0; b.Loop(); i++ {
		vs := serviceOf(numbered(i))
		vs.SchedName, vs.Netmask = "rr", 0xffffffff
		err := s.handle.NewService(vs)
		for _, address := range []string{"192.0.2.1", "192.0.2.2"} {
			err = errors.Join(err, s.handle.NewDestination(vs, &ipvs.Destination{Address: net.ParseIP(address), Port: 80, Weight: 1}))
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkConnections counts the connections of a virtual server with two real servers.
// BenchmarkDump does the same through the library.
func BenchmarkConnections(b *testing.B) {
	c := openKernel(b)
	mustApply(b, c, Diff(nil, State{tcp1: service("rr", "192.0.2.1:80", "192.0.2.2:80")}))
	for b.Loop() {
		if _, err := c.Connections(tcp1); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDump(b *testing.B) {
	c := openKernel(b)
	mustApply(b, c, Diff(nil, State{tcp1: service("rr", "192.0.2.1:80", "192.0.2.2:80")}))
	for b.Loop() {
		if _, err := c.raw.(*socket).dumpDestinations(tcp1); err != nil {
			b.Fatal(err)
		}
	}
}

// TestCount counts IPv4 virtual servers.
func TestCount(t *testing.T) {
	c := openKernel(t)
	mustApply(t, c, Diff(nil, State{
		tcp1: service("rr", "192.0.2.1:80"), tcp2: service("rr"), mark(ip.IPv4, 7): service("rr"),
		tcp6: service("rr", "[2001:db8::1]:80"), mark(ip.IPv6, 7): service("rr"),
	}))
	if n, err := c.Count(); n != 3 || err != nil {
		t.Errorf("%d, %v, want 3", n, err)
	}
	for key, want := range map[Key]int{tcp1: 1, tcp2: 0, tcp6: 1} {
		if rs, err := c.RealServers(key); len(rs) != want || err != nil {
			t.Errorf("%s: %v, %v", key, rs, err)
		}
	}
}

func BenchmarkCount(b *testing.B) {
	c := openKernel(b)
	for b.Loop() {
		if _, err := c.Count(); err != nil {
			b.Fatal(err)
		}
	}
}
