package ipvs

import (
	"errors"
	"maps"
	"math"
	"net/netip"
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
	test func(*testing.T, func(testing.TB) *client)
}{
	{"errnos", testErrnos},
	{"apply", testApply},
	{"timeouts", testTimeouts},
	{"probe", testProbe},
	{"connections", testConnections},
}

// testErrnos tests raw: the kernel's own answers.
func testErrnos(t *testing.T, open func(testing.TB) *client) {
	dest := netip.MustParseAddrPort
	rr := VirtualServer{Scheduler: "rr"}
	vs := func(op Op, k Key, v VirtualServer) Change { return Change{Op: op, Key: k, VirtualServer: v} }
	rs := func(op Op, k Key, d string) Change { return Change{Op: op, Key: k, Dest: dest(d)} }
	for _, tc := range []struct {
		name   string
		change Change
		want   error
	}{
		{"add existing virtual server", vs(AddVirtualServer, tcp1, rr), unix.EEXIST},
		{"add existing IPv6 virtual server", vs(AddVirtualServer, tcp6, rr), unix.EEXIST},
		{"update missing virtual server", vs(UpdateVirtualServer, tcp2, rr), unix.ESRCH},
		{"delete missing virtual server", vs(DeleteVirtualServer, tcp2, rr), unix.ESRCH},
		{"add with unknown scheduler", vs(AddVirtualServer, tcp2, VirtualServer{Scheduler: "none-such"}), unix.ENOENT},
		{"update to unknown scheduler", vs(UpdateVirtualServer, tcp1, VirtualServer{Scheduler: "none-such"}), unix.ENOENT},
		{"mark of the other family is another", vs(DeleteVirtualServer, mark(ip.IPv6, 7), rr), unix.ESRCH},
		{"add to missing virtual server", rs(AddRealServer, tcp2, "192.0.2.1:80"), unix.ESRCH},
		{"update on missing virtual server", rs(UpdateRealServer, tcp2, "192.0.2.1:80"), unix.ESRCH},
		{"delete from missing virtual server", rs(DeleteRealServer, tcp2, "192.0.2.1:80"), unix.ESRCH},
		{"add existing real server", rs(AddRealServer, tcp1, "192.0.2.1:80"), unix.EEXIST},
		{"update missing real server", rs(UpdateRealServer, tcp1, "192.0.2.1:81"), unix.ENOENT},
		{"delete missing real server", rs(DeleteRealServer, tcp1, "192.0.2.9:80"), unix.ENOENT},
		{"unspecified address", rs(AddRealServer, tcp1, "0.0.0.0:80"), unix.EINVAL},
		{"broadcast address", rs(AddRealServer, tcp1, "255.255.255.255:80"), unix.EINVAL},
		{"multicast address", rs(AddRealServer, tcp1, "224.0.0.1:80"), unix.EINVAL},
		{"link-local IPv4 address", rs(AddRealServer, tcp1, "169.254.20.10:80"), nil},
		{"loopback address", rs(AddRealServer, tcp1, "127.0.0.1:80"), nil},
		{"real server's port 0", rs(AddRealServer, tcp1, "192.0.2.1:0"), nil},
		{"unspecified IPv6 address", rs(AddRealServer, tcp6, "[::]:80"), unix.EINVAL},
		{"multicast IPv6 address", rs(AddRealServer, tcp6, "[ff02::1]:80"), unix.EINVAL},
		{"link-local IPv6 address", rs(AddRealServer, tcp6, "[fe80::1]:80"), unix.EINVAL},
		{"loopback IPv6 address", rs(AddRealServer, tcp6, "[::1]:80"), nil},
		{"port 0", vs(AddVirtualServer, key(ip.TCP, "10.96.0.9:0"), rr), nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := open(t)
			mustApply(t, c, Diff(nil, State{
				tcp1:             service("rr", "192.0.2.1:80"),
				tcp6:             service("rr"),
				mark(ip.IPv4, 7): service("rr"),
			}))
			if err := c.raw.execute([]Change{tc.change})[0]; !errors.Is(err, tc.want) {
				t.Errorf("%s: %v, want %v", tc.change, err, tc.want)
			}
		})
	}
}

// testApply tests client: the guarantees to callers.
func testApply(t *testing.T, open func(testing.TB) *client) {
	dest := netip.MustParseAddrPort
	rr, wrr := VirtualServer{Scheduler: "rr"}, VirtualServer{Scheduler: "wrr"}
	sticky := VirtualServer{Scheduler: "rr", Flags: FlagPersistent, Timeout: 10800}
	hashing := VirtualServer{Scheduler: "mh", Flags: FlagSched1 | FlagSched2}
	vs := func(op Op, k Key, v VirtualServer) Change { return Change{Op: op, Key: k, VirtualServer: v} }
	rs := func(op Op, k Key, d string, weight int) Change {
		return Change{Op: op, Key: k, Dest: dest(d), RealServer: RealServer{Weight: weight}}
	}
	const before = "-A -t 10.96.0.1:443 -s rr\n-a -t 10.96.0.1:443 -r 192.0.2.1:80 -m -w 1\n"
	for _, tc := range []struct {
		name    string
		changes []Change
		fail    []error // one per failure, in order
		want    string
	}{
		{
			name:    "add what is there: update",
			changes: []Change{vs(AddVirtualServer, tcp1, wrr), rs(AddRealServer, tcp1, "192.0.2.1:80", 7)},
			want:    "-A -t 10.96.0.1:443 -s wrr\n-a -t 10.96.0.1:443 -r 192.0.2.1:80 -m -w 7\n",
		},
		{
			name: "a limit of connections",
			changes: []Change{
				{Op: AddRealServer, Key: tcp1, Dest: dest("192.0.2.1:80"), RealServer: RealServer{Weight: 1, MaxConnections: 200}},
				{Op: AddRealServer, Key: tcp1, Dest: dest("192.0.2.2:80"), RealServer: RealServer{Weight: 1, MaxConnections: math.MaxInt32}},
			},
			want: "-A -t 10.96.0.1:443 -s rr\n-a -t 10.96.0.1:443 -r 192.0.2.1:80 -m -w 1 -x 200\n-a -t 10.96.0.1:443 -r 192.0.2.2:80 -m -w 1 -x 2147483647\n",
		},
		{
			name:    "update what is not there: add, and what depends on it",
			changes: []Change{vs(UpdateVirtualServer, tcp2, rr), rs(AddRealServer, tcp2, "192.0.2.1:80", 1), rs(UpdateRealServer, tcp2, "192.0.2.2:80", 0)},
			want:    before + "-A -t 10.96.0.2:443 -s rr\n-a -t 10.96.0.2:443 -r 192.0.2.1:80 -m -w 1\n-a -t 10.96.0.2:443 -r 192.0.2.2:80 -m -w 0\n",
		},
		{
			name:    "delete what is not there",
			changes: []Change{vs(DeleteVirtualServer, tcp2, rr), rs(DeleteRealServer, tcp2, "192.0.2.1:80", 0), rs(DeleteRealServer, tcp1, "192.0.2.2:80", 0)},
			want:    before,
		},
		{
			name:    "a virtual server is deleted with its real servers",
			changes: []Change{vs(DeleteVirtualServer, tcp1, rr)},
		},
		{
			name:    "drain",
			changes: []Change{rs(UpdateRealServer, tcp1, "192.0.2.1:80", 0)},
			want:    "-A -t 10.96.0.1:443 -s rr\n-a -t 10.96.0.1:443 -r 192.0.2.1:80 -m -w 0\n",
		},
		{
			name:    "flags",
			changes: []Change{vs(UpdateVirtualServer, tcp1, sticky), vs(AddVirtualServer, tcp2, hashing), vs(AddVirtualServer, udp1, VirtualServer{Scheduler: "rr", Flags: FlagOnePacket})},
			want: "-A -t 10.96.0.1:443 -s rr -p 10800\n-a -t 10.96.0.1:443 -r 192.0.2.1:80 -m -w 1\n" +
				"-A -u 10.96.0.1:443 -s rr -o\n-A -t 10.96.0.2:443 -s mh -b mh-fallback,mh-port\n",
		},
		{
			name:    "heaviest weight",
			changes: []Change{rs(UpdateRealServer, tcp1, "192.0.2.1:80", math.MaxUint16)},
			want:    "-A -t 10.96.0.1:443 -s rr\n-a -t 10.96.0.1:443 -r 192.0.2.1:80 -m -w 65535\n",
		},
		{
			name: "IPv6, SCTP, marks of both families, all ports",
			changes: []Change{
				vs(AddVirtualServer, tcp6, sticky), rs(AddRealServer, tcp6, "[2001:db8::1]:80", 1),
				vs(AddVirtualServer, key(ip.SCTP, "10.96.0.1:443"), rr),
				vs(AddVirtualServer, mark(ip.IPv4, 7), rr), rs(AddRealServer, mark(ip.IPv4, 7), "192.0.2.1:80", 1),
				vs(AddVirtualServer, mark(ip.IPv6, 7), rr), rs(AddRealServer, mark(ip.IPv6, 7), "[2001:db8::1]:80", 1),
				vs(AddVirtualServer, key(ip.TCP, "10.96.0.1:0"), sticky),
			},
			want: "-A -t 10.96.0.1:0 -s rr -p 10800\n" + before + "-A --sctp-service 10.96.0.1:443 -s rr\n" +
				"-A -t [fd00:96::1]:443 -s rr -p 10800\n-a -t [fd00:96::1]:443 -r [2001:db8::1]:80 -m -w 1\n" +
				"-A -f 7 -s rr\n-a -f 7 -r 192.0.2.1:80 -m -w 1\n-A -f 7 -6 -s rr\n-a -f 7 -6 -r [2001:db8::1]:80 -m -w 1\n",
		},
		{
			name: "what is refused keeps nothing else from being done",
			changes: []Change{
				vs(AddVirtualServer, tcp2, VirtualServer{Scheduler: "none-such"}),
				rs(AddRealServer, tcp2, "192.0.2.1:80", 1),
				rs(AddRealServer, tcp1, "0.0.0.0:80", 1),
				rs(AddRealServer, tcp1, "[2001:db8::1]:80", 1),
				rs(AddRealServer, tcp1, "[::ffff:192.0.2.1]:80", 1),
				rs(AddRealServer, tcp1, "192.0.2.2:80", -1),
				rs(AddRealServer, tcp1, "192.0.2.2:80", math.MaxUint16+1),
				vs(AddVirtualServer, key(ip.TCP, "10.96.0.9:0"), rr),
				vs(AddVirtualServer, key(0, "10.96.0.9:1"), rr),
				vs(AddVirtualServer, Key{Addr: tcp1.Addr, FWMark: 7}, rr),
				vs(AddVirtualServer, Key{Protocol: ip.TCP, Port: 80}, rr),
				{Op: 77, Key: tcp1},
				rs(AddRealServer, tcp1, "192.0.2.3:80", 1),
			},
			fail: []error{
				unix.ENOENT, unix.ESRCH, unix.EINVAL, unix.EINVAL, unix.EINVAL, unix.ERANGE, unix.ERANGE,
				unix.EINVAL, unix.EINVAL, unix.EINVAL, unix.EINVAL, unix.EINVAL,
			},
			want: before + "-a -t 10.96.0.1:443 -r 192.0.2.3:80 -m -w 1\n",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := open(t)
			mustApply(t, c, Diff(nil, State{tcp1: service("rr", "192.0.2.1:80")}))
			failures := c.Apply(tc.changes)
			for i, f := range failures {
				if i >= len(tc.fail) || !errors.Is(f, tc.fail[i]) {
					t.Errorf("unexpected: %v", f)
				}
			}
			if len(failures) < len(tc.fail) {
				t.Errorf("failures %v, want %v", failures, tc.fail)
			}
			state, err := c.Observe()
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tc.want, state.String()); d != "" {
				t.Error(d)
			}
			mustApply(t, c, Diff(state, nil))
			if state, err := c.Observe(); err != nil || len(state) > 0 {
				t.Errorf("after deleting everything: %v, %v", state, err)
			}
		})
	}
}

func testTimeouts(t *testing.T, open func(testing.TB) *client) {
	c := open(t)
	for _, step := range []struct {
		set, want Timeouts
		err       error
	}{
		{Timeouts{}, Timeouts{900, 120, 300}, nil},
		{Timeouts{TCP: 1000}, Timeouts{1000, 120, 300}, nil},
		{Timeouts{TCPFin: 100, UDP: 20}, Timeouts{1000, 100, 20}, nil},
		{Timeouts{UDP: 1 << 31}, Timeouts{1000, 100, 20}, unix.EINVAL},
	} {
		if err := c.SetTimeouts(step.set); !errors.Is(err, step.err) {
			t.Errorf("set %+v: %v, want %v", step.set, err, step.err)
		}
		if got, err := c.Timeouts(); err != nil || got != step.want {
			t.Errorf("after %+v: %+v, %v, want %+v", step.set, got, err, step.want)
		}
	}
}

func testProbe(t *testing.T, open func(testing.TB) *client) {
	c := open(t)
	for _, scheduler := range []string{"rr", "mh"} {
		if err := c.Probe(scheduler); err != nil {
			t.Error(err)
		}
	}
	if err := c.Probe("none-such"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("probe of an unknown scheduler: %v", err)
	} else {
		t.Log(err)
	}
	if state, err := c.Observe(); err != nil || len(state) > 0 {
		t.Errorf("remaining: %v, %v", state, err)
	}
}

func testConnections(t *testing.T, open func(testing.TB) *client) {
	c := open(t)
	mustApply(t, c, Diff(nil, State{tcp1: service("rr", "192.0.2.1:80", "192.0.2.2:80=0")}))
	got, err := c.Connections(tcp1)
	want := map[netip.AddrPort]Connections{netip.MustParseAddrPort("192.0.2.1:80"): {}, netip.MustParseAddrPort("192.0.2.2:80"): {}}
	if err != nil || !maps.Equal(got, want) {
		t.Error(got, err)
	}
	if got, err := c.Connections(tcp2); err != nil || len(got) > 0 {
		t.Errorf("of a missing virtual server: %v, %v", got, err)
	}
	if _, err := c.Connections(Key{}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("of no key: %v", err)
	}
}

func mustApply(t testing.TB, c *client, changes []Change) {
	t.Helper()
	if err := kernel.Join(c.Apply(changes)); err != nil {
		t.Fatal(err)
	}
}
