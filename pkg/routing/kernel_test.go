//go:build e2e

package routing

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func init() {
	subjects["kernel"] = kernelSubject
	inNamespace = sideThread
}

func kernelSubject(t *testing.T) subject {
	namespace(t)
	ipCommands(t, "link add eth1 type dummy", "link set eth1 up", "-6 addr flush dev eth1")
	n := open(t)
	addWrongScope := func(a netip.Addr) { ipCommands(t, fmt.Sprintf("addr add %s/32 dev %s", a, DummyLink)) }
	others := func(changes ...Change) []Failure { return apply(n.session(unix.RTPROT_STATIC), changes) }
	directly := func(steps ...step) { take(n.session(Protocol), steps) }
	return subject{n.Observe, n.Inventory, n.Apply, n.Watch, addWrongScope, others, n.session(Protocol), n.Guard, directly}
}

func open(t testing.TB) *Netlink {
	t.Helper()
	n, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

// namespace moves the test to a new network namespace, with lo up. The thread is never
// unlocked, so it ends with the test, and the namespace with it.
func namespace(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("new network namespace: %v", err)
	}
	ipCommands(t, "link set lo up")
}

// sideThread runs a function on a separate thread in the namespace of the caller.
func sideThread(t *testing.T, f func()) {
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		runtime.LockOSThread()
		defer here.Close()
		if err := netns.Set(here); err != nil {
			t.Error(err)
			return
		}
		f()
	}()
}

// ipCommands runs ip(8), each command in the test's namespace.
func ipCommands(t testing.TB, commands ...string) {
	t.Helper()
	for _, c := range commands {
		command(t, "ip "+c)
	}
}

func command(t testing.TB, line string) string {
	t.Helper()
	fields := strings.Fields(line)
	out, err := exec.Command(fields[0], fields[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
	return string(out)
}

// TestDummyLinkAsKubeProxyLeavesIt compares the link and its addresses with kube-proxy's.
func TestDummyLinkAsKubeProxyLeavesIt(t *testing.T) {
	s := kernelSubject(t)
	s.reach(t, wanted())
	link := command(t, "ip -o link show "+DummyLink)
	if !strings.Contains(link, "NOARP") || strings.Contains(link, "UP") {
		t.Errorf("want it down and without ARP: %s", link)
	}
	addrs := command(t, "ip -o addr show "+DummyLink)
	for _, want := range []string{"10.96.0.1/32 scope link", "fd00::1/128 scope global nodad"} {
		if !strings.Contains(addrs, want) {
			t.Errorf("want %s: %s", want, addrs)
		}
	}
	for _, a := range []string{"10.96.0.1", "fd00::1", "10.12.116.77"} {
		if got := command(t, "ip route get "+a); !strings.HasPrefix(got, "local "+a) || !strings.Contains(got, " dev lo ") {
			t.Errorf("%s is not local: %s", a, got)
		}
	}
	t.Log(command(t, "ip rule show"), command(t, "ip -details route show table 250"))
}

// The kernel adds an address and routes to a link that is set up. They are not ours to
// delete.
func TestDummyLinkSetUp(t *testing.T) {
	s := kernelSubject(t)
	s.reach(t, wanted())
	ipCommands(t, "link set "+DummyLink+" up", "addr add 192.0.2.1/24 dev "+DummyLink)
	if left := Diff(s.observe(t), wanted()); len(left) > 0 {
		t.Errorf("remaining changes: %v", left)
	}
	ipCommands(t, "link set "+DummyLink+" down")
	s.reach(t, wanted())
}

func TestLinkOfAnotherType(t *testing.T) {
	s := kernelSubject(t)
	ipCommands(t, "link add "+DummyLink+" type bridge")
	if state, err := s.Observe(); !errors.Is(err, unix.EEXIST) || state.DummyLink {
		t.Errorf("Observe = %v, %v, want only EEXIST", state, err)
	}
}

func TestIPv6Disabled(t *testing.T) {
	s := kernelSubject(t)
	s.must(t, s.others(Change{Op: AddLink}))
	path := filepath.Join("/proc/sys/net/ipv6/conf", DummyLink, "disable_ipv6")
	if err := os.WriteFile(path, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	failures := s.Apply([]Change{{Op: AddAddress, Address: addr("fd00::1")}})
	if len(failures) != 1 || !errors.Is(failures[0], unix.EACCES) || !strings.Contains(failures[0].Error(), "disable_ipv6") {
		t.Errorf("failures = %v, want EACCES and the fix", failures)
	}
}

// TestScopeOfVIPs checks what addressScope claims: on a link without an address,
// MASQUERADE uses a VIP of global scope, but not one of link scope. Delivery and the
// source of the node's own connections are the same with both.
func TestScopeOfVIPs(t *testing.T) {
	for scope, want := range map[netlink.Scope]string{
		netlink.SCOPE_LINK:     "10.12.97.49",
		netlink.SCOPE_UNIVERSE: "10.96.0.1",
	} {
		t.Run(scope.String(), func(t *testing.T) {
			namespace(t)
			n := open(t)
			n.scope = scope
			// kube-ipvs0 comes before eth0 in the kernel's list of links.
			state := State{DummyLink: true, Addresses: set(addr("10.96.0.1"))}
			if failures := n.Apply(Diff(State{}, state)); len(failures) > 0 {
				t.Fatal(failures)
			}
			if got := masqueradeSource(t); got != want {
				t.Errorf("MASQUERADE took %s, want %s", got, want)
			}
			if got := connectSource(t, "10.96.0.1:80", "10.96.0.1:80"); got != "10.96.0.1" {
				t.Errorf("a connection to a local VIP has the source %s", got)
			}
			command(t, "ipvsadm -A -t 10.96.0.1:81")
			command(t, "ipvsadm -a -t 10.96.0.1:81 -r 127.0.0.1:8081 -m")
			if got := connectSource(t, "127.0.0.1:8081", "10.96.0.1:81"); got != "10.96.0.1" {
				t.Errorf("a connection through IPVS has the source %s", got)
			}
		})
	}
}

// masqueradeSource sends a datagram over a link without an address and returns the source
// address that arrives.
func masqueradeSource(t *testing.T) string {
	ipCommands(t,
		"link add eth0 type dummy", "addr add 10.12.97.49/24 dev eth0", "link set eth0 up",
		"link add eth1 type dummy", "link set eth1 up",
		"route add 198.51.100.0/24 dev eth1",
	)
	command(t, "iptables -t nat -A POSTROUTING -o eth1 -j MASQUERADE")
	conn, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(10, 12, 97, 49), Port: 999}, &net.UDPAddr{IP: net.IPv4(198, 51, 100, 7), Port: 7})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	return replyDestination(t, "198.51.100.7")
}

// replyDestination returns where a peer's reply would go according to conntrack: the source
// that the peer sees.
func replyDestination(t *testing.T, peer string) string {
	flows := command(t, "conntrack -L -p udp --orig-dst "+peer)
	_, reply, _ := strings.Cut(flows, "src="+peer+" dst=")
	source, _, _ := strings.Cut(reply, " ")
	return source
}

// connectSource connects to an address and returns the source that the server sees, which
// listens on another one.
func connectSource(t *testing.T, listen, connect string) string {
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := net.DialTimeout("tcp", connect, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	accepted, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	return netip.MustParseAddrPort(accepted.RemoteAddr().String()).Addr().String()
}

func TestInventory(t *testing.T) {
	namespace(t)
	ipCommands(t,
		"link add "+DummyLink+" type dummy", "addr add 10.96.0.1/32 dev "+DummyLink,
		"link add br0 type bridge", "link add veth0 type veth peer name veth1", "link set veth0 master br0",
		"link add eth1 type dummy", "link set eth1 address 0a:58:00:00:00:01", "link set eth1 up", "-6 addr flush dev eth1",
		"addr add 10.12.192.10/24 dev eth1", "addr add 10.12.192.11/24 dev eth1", "addr add 10.12.192.12/32 scope link dev eth1",
		"-6 addr add fd00::10/64 dev eth1 nodad",
		"rule add pref 1000 to 10.12.192.44 lookup main", "rule add pref 2000 from 10.12.192.44 lookup 1003",
		"rule add pref 2000 not fwmark 0x80/0xff iif eth1 oif lo lookup 1003",
		"rule add pref 2001 ipproto tcp dport 80 lookup 1003", "rule add pref 2002 lookup main suppress_prefixlength 0",
		"rule add pref 2003 from 10.0.0.0/8 blackhole", "rule add pref 2004 from 192.168.1.5/24 to 10.1.2.3/16 iif veth1 lookup 1003", "-6 rule add pref 600 fwmark 0x10/0x10 lookup 100",
		"route add 10.12.192.1 dev eth1 table 1003", "route add default via 10.12.192.1 dev eth1 table 1003",
		"route add default metric 7 nexthop via 10.12.192.1 dev eth1 nexthop via 10.12.192.2 dev eth1",
		"route add 10.244.7.0/24 via 10.12.192.7", "route add 10.244.8.0/24 via 10.12.192.8 table 1003", "route add 10.244.9.0/24 via 10.12.192.9 table 77",
		"route add local 10.77.0.1 dev lo table 1003",
		"link add flannel.1 type vxlan id 1 dev eth1 dstport 8472 nolearning", "-6 addr flush dev flannel.1",
		"route add unreachable default metric 9", "-6 route add default via fd00::1 dev eth1",
	)
	command(t, "bridge fdb add 02:00:00:00:00:01 dev flannel.1 dst 10.12.97.50")
	got, err := open(t).Inventory()
	if err != nil {
		t.Fatal(err)
	}
	peers := []netip.Addr{addr("10.12.97.50"), addr("10.12.192.1"), addr("10.12.192.2"), addr("10.12.192.7"), addr("10.12.192.8"), addr("fd00::1")}
	if diff := cmp.Diff(peers, got.Peers, byValue); diff != "" {
		t.Errorf("peers (-want +got):\n%s", diff)
	}
	if !slices.Equal(got.Gateways, []string{"eth1"}) {
		t.Errorf("links to gateways: %q", got.Gateways)
	}
	if diff := cmp.Diff(wantedLinks(), names(got.Links), byValue); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
	def := func(f ip.Family, table int, via string, metric int) Route {
		return Route{Family: f, Table: table, Dst: netip.PrefixFrom(f.Unspecified(), 0), Link: "eth1", Via: addr(via), Metric: metric}
	}
	hop := func(via string) Route {
		r := def(ip.IPv4, 254, via, 7)
		r.Multipath = true
		return r
	}
	if diff := cmp.Diff([]Route{
		hop("10.12.192.1"), hop("10.12.192.2"),
		def(ip.IPv4, 1003, "10.12.192.1", 0), def(ip.IPv6, 254, "fd00::1", 1024),
	}, got.Defaults, byValue); diff != "" {
		t.Errorf("default routes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]Route{{Family: ip.IPv4, Table: 1003, Dst: pfx("10.12.192.1/32"), Link: "eth1"}}, got.Attached, byValue); diff != "" {
		t.Errorf("routes to hosts at inputs (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]Route{
		{Family: ip.IPv4, Table: 254, Dst: pfx("10.12.192.0/24"), Link: "eth1", Src: addr("10.12.192.10")},
		{Family: ip.IPv4, Table: 254, Dst: pfx("10.244.7.0/24"), Link: "eth1", Via: addr("10.12.192.7")},
	}, got.Direct, byValue); diff != "" {
		t.Errorf("other routes (-want +got):\n%s", diff)
	}
	rule := func(priority, table int) Rule { return Rule{Family: ip.IPv4, Priority: priority, Table: table} }
	to, from, not, tcp, suppress, blackhole := rule(1000, 254), rule(2000, 1003), rule(2000, 1003), rule(2001, 1003), rule(2002, 254), rule(2003, 0)
	unmasked := rule(2004, 1003)
	unmasked.From, unmasked.To, unmasked.IIf = pfx("192.168.1.0/24"), pfx("10.1.0.0/16"), "veth1"
	to.To, from.From = pfx("10.12.192.44/32"), pfx("10.12.192.44/32")
	not.Invert, not.Mark, not.Mask, not.IIf, not.OIf = true, 0x80, 0xff, "eth1", "lo"
	blackhole.From = pfx("10.0.0.0/8")
	tcp.Other, suppress.Other, blackhole.Other = true, true, true
	if diff := cmp.Diff([]Rule{
		rule(0, 255), to, from, not, tcp, suppress, blackhole, unmasked, rule(32766, 254), rule(32767, 253),
		{Family: ip.IPv6, Table: 255}, {Family: ip.IPv6, Priority: 600, Mark: 0x10, Mask: 0x10, Table: 100}, {Family: ip.IPv6, Priority: 32766, Table: 254},
	}, got.Rules, byValue); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
}

// names drops what the kernel chooses: the indexes of the links, and all but one MAC address.
func names(links []Link) []Link {
	out := slices.Clone(links)
	for i := range out {
		out[i].Index = 0
		if out[i].Name != "eth1" && len(out[i].MAC) == len("0a:58:00:00:00:01") {
			out[i].MAC = "any"
		}
	}
	slices.SortFunc(out, func(a, b Link) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func wantedLinks() []Link {
	return []Link{
		{Name: "br0", Type: "bridge", MAC: "any"},
		{Name: "eth1", Type: "dummy", Up: true, MAC: "0a:58:00:00:00:01", Addresses: []Address{
			{Prefix: pfx("10.12.192.12/32")}, // the kernel lists narrow scopes first
			{Prefix: pfx("10.12.192.10/24"), Global: true},
			{Prefix: pfx("10.12.192.11/24"), Global: true, Secondary: true},
			{Prefix: pfx("fd00::10/64"), Global: true},
		}},
		{Name: "flannel.1", Type: "vxlan", MAC: "any"},
		{Name: "lo", Type: "device", Up: true, Loopback: true, Addresses: []Address{{Prefix: pfx("127.0.0.1/8")}, {Prefix: pfx("::1/128")}}},
		{Name: "veth0", Type: "veth", Master: "br0", MAC: "any"},
		{Name: "veth1", Type: "veth", MAC: "any"},
	}
}

// TestInventoryFollowsChanges: while Watch runs, each change is in the Inventory as a new reader
// finds it. Changes of pods' links are applied to what is cached, and others are read.
func TestInventoryFollowsChanges(t *testing.T) {
	namespace(t)
	ipCommands(t, "link add br0 type bridge", "link add eth1 type bridge", "link set eth1 up", "-6 addr flush dev eth1",
		"addr add 10.12.192.10/24 dev eth1", "route add default via 10.12.192.1 dev eth1", "link add old type veth peer name oldpeer", "link set old up",
		"link add old2 type veth peer name oldpeer2")
	n, fresh := open(t), open(t)
	w := watch(t, subject{Watch: n.Watch})
	defer w.end()
	w.expect("the beginning", true, true)
	inventoryOf(t, n)
	const cached, read = true, false
	for _, tc := range []struct {
		commands string
		cached   bool
	}{
		{"link add pod1 type veth peer name peer1", cached},
		{"link set pod1 up", cached},
		{"link set peer1 up", cached}, // with carrier, pod1 gets a link-local address and a route to its network
		{"link set pod1 master br0", cached},
		{"link set pod1 down", cached}, // before Linux 6.3, only links that are down can be renamed
		{"link set pod1 name pod9", cached},
		{"link set pod9 up", cached},
		{"link set pod9 address 0a:58:00:00:00:09", cached},
		{"link set pod9 nomaster", cached},
		{"-6 addr flush dev pod9", cached},
		{"link set pod9 down", cached},
		{"route add 10.13.0.5/32 dev old", cached}, // not in the Inventory
		{"link set old down", cached},
		{"link set old name older", cached},
		{"link set older up", cached},
		{"link del pod9", cached},
		{"addr add 10.13.0.1/24 dev older", read},
		{"link set older down", read},
		{"addr del 10.13.0.1/24 dev older", read},
		{"link set older up", cached},
		{"route add 10.14.0.0/16 dev older", read},
		{"route add 10.15.0.0/16 via 10.12.192.9", read},
		{"route add 10.16.0.5/32 dev older table 77", cached}, // not in the Inventory yet
		{"rule add iif older lookup 77", read},
		{"rule del iif older lookup 77", read},
		{"-6 route add fd00:13::/64 dev eth1", read},
		{"link set eth1 down", read},
		{"link set eth1 up", read},
		{"addr del 10.12.192.10/24 dev eth1", read},
		{"link set br0 name br1", read},
		{"link add br2 type bridge", read},
		{"route add default dev older table 1003", read},
		{"rule add from 10.13.0.5 lookup 1003", read},
		{"link set older down", read}, // loses its default route without a message
		{"link set older up", cached},
		{"route add default dev older table 1003", read},
		{"link del older", read},
		{"link del old2", cached},
	} {
		before := readAt(n)
		ipCommands(t, tc.commands)
		again := func() bool { return !readAt(n).Equal(before) }
		deadline := time.Now().Add(5 * time.Second)
		for diff := "not compared"; diff != "" || again() == tc.cached; {
			if diff = cmp.Diff(inventoryOf(t, fresh), inventoryOf(t, n), byValue); time.Now().After(deadline) {
				t.Fatalf("after ip %s the node was read again: %t, want %t, (-want +got):\n%s", tc.commands, again(), !tc.cached, diff)
			}
		}
	}
}

// TestInventoryAmidChanges: after many changes that are made while the Inventory is read, it is as
// a new reader finds it.
func TestInventoryAmidChanges(t *testing.T) {
	namespace(t)
	ipCommands(t, "link add br0 type bridge", "link set br0 up", "link add eth1 type bridge", "link set eth1 up", "-6 addr flush dev eth1",
		"addr add 10.12.192.10/24 dev eth1")
	n, fresh := open(t), open(t)
	w := watch(t, subject{Watch: n.Watch})
	defer w.end()
	w.expect("the beginning", true, true)
	done := make(chan struct{})
	inNamespace(t, func() {
		defer close(done)
		for i := range 60 {
			pod := fmt.Sprintf("pod%d", i)
			peer := fmt.Sprintf("peer%d", i)
			ipCommands(t, "link add "+pod+" type veth peer name "+peer, "link set "+pod+" master br0", "link set "+peer+" up", "link set "+pod+" up",
				fmt.Sprintf("addr add 10.12.192.%d/24 dev eth1", 20+i%5), fmt.Sprintf("route add default via 10.12.192.%d dev eth1 table %d", 200+i%3, 100+i%4),
				fmt.Sprintf("rule add from 10.13.0.%d lookup %d", i%9, 100+i%4))
			ipCommands(t, fmt.Sprintf("rule del from 10.13.0.%d lookup %d", i%9, 100+i%4), fmt.Sprintf("route del default table %d", 100+i%4),
				fmt.Sprintf("addr del 10.12.192.%d/24 dev eth1", 20+i%5))
			if i%7 != 6 {
				ipCommands(t, "link del "+peer)
			}
			if i%7 == 6 {
				ipCommands(t, "link set "+pod+" down", "link set "+pod+" name kept"+fmt.Sprint(i))
			}
		}
	})
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		default:
			_, _ = n.Inventory() // may fail while links change
		}
	}
	deadline := time.Now().Add(10 * time.Second)
	for diff := "not compared"; diff != ""; {
		if diff = cmp.Diff(inventoryOf(t, fresh), inventoryOf(t, n), byValue); diff != "" && time.Now().After(deadline) {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	}
}

// readAt returns when something was last read and cached.
func readAt(n *Netlink) time.Time {
	n.cache.mu.Lock()
	defer n.cache.mu.Unlock()
	if n.cache.linksRead.After(n.cache.routesRead) {
		return n.cache.linksRead
	}
	return n.cache.routesRead
}

func inventoryOf(t *testing.T, n *Netlink) Inventory {
	t.Helper()
	inv, err := n.Inventory()
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

// TestReadsAmidChanges checks that each read is complete while another thread keeps
// changing addresses: it contains the addresses that stay.
func TestReadsAmidChanges(t *testing.T) {
	s := kernelSubject(t)
	const stay = 2000
	want := State{DummyLink: true, Addresses: map[netip.Addr]struct{}{}}
	for i := range stay {
		want.Addresses[netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})] = struct{}{}
	}
	s.must(t, s.Apply(Diff(empty(), want)))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan int)
	other := open(t)
	go func() {
		rounds := 0
		for ; ctx.Err() == nil; rounds++ {
			other.Apply([]Change{{Op: AddAddress, Address: addr("10.97.0.1")}, {Op: DeleteAddress, Address: addr("10.97.0.1")}})
		}
		ended <- rounds
	}()
	whole, failed := 0, 0
	for range 12 {
		state, err := s.Observe()
		if err != nil {
			failed++
			continue
		}
		whole++
		for a := range want.Addresses {
			if _, ok := state.Addresses[a]; !ok {
				t.Fatalf("%s is missing among %d", a, len(state.Addresses))
			}
		}
	}
	cancel()
	t.Logf("%d complete reads, %d given up, during %d changes", whole, failed, 2*<-ended)
}

// Changes of routes other than default routes are collected. Those to single addresses do
// not wake the watcher.
func TestWatchRoutes(t *testing.T) {
	s := kernelSubject(t)
	s.must(t, s.Apply([]Change{{Op: AddLink}}))
	n := open(t)
	n.pause = 500 * time.Millisecond
	s.Watch = n.Watch
	w := watch(t, s)
	defer w.end()
	w.expect("the beginning", true, true)
	ipCommands(t, "route add 10.13.0.1/32 dev eth1", "-6 route add fd00:13::1/128 dev eth1", "route del 10.13.0.1/32 dev eth1")
	time.Sleep(2 * n.pause)
	w.expect("routes to single addresses", false, false)
	ipCommands(t, "route add 10.13.0.0/16 dev eth1", "route add 10.14.0.0/16 dev eth1")
	w.expect("other routes", true, false)
}

// Messages that overrun the socket's buffer cause both calls, even if none of them alone
// would cause a call of inventory.
func TestWatchOverrun(t *testing.T) {
	s := kernelSubject(t)
	s.must(t, s.Apply([]Change{{Op: AddLink}}))
	n := open(t)
	n.buffer = 1
	s.Watch = n.Watch
	w := watch(t, s)
	defer w.end()
	w.expect("the beginning", true, true)
	var adds []Change
	for i := range 3000 {
		adds = append(adds, Change{Op: AddAddress, Address: netip.AddrFrom4([4]byte{10, 98, byte(i >> 8), byte(i)})})
	}
	s.must(t, s.Apply(adds))
	w.expect("the overrun", true, true)
}

// TestManyAddresses logs the time: the kernel searches all addresses of the link for each
// new one.
func TestManyAddresses(t *testing.T) {
	s := kernelSubject(t)
	s.must(t, s.Apply([]Change{{Op: AddLink}}))
	var adds []Change
	for i := range 5000 {
		adds = append(adds, Change{Op: AddAddress, Address: netip.AddrFrom4([4]byte{10, 98, byte(i >> 8), byte(i)})})
	}
	for n, started := 0, time.Now(); n < len(adds); n += 1000 {
		s.must(t, s.Apply(adds[n:n+1000]))
		t.Logf("%d addresses bound in %s", n+1000, time.Since(started))
	}
	started := time.Now()
	if state := s.observe(t); len(state.Addresses) != len(adds) {
		t.Errorf("%d addresses", len(state.Addresses))
	}
	t.Logf("and read in %s", time.Since(started))
}

// BenchmarkVIPs writes addresses and local routes in batches, and one by one through the
// library. One iteration adds and deletes a thousand.
func BenchmarkVIPs(b *testing.B) {
	for what, ops := range map[string][2]Op{"addresses": {AddAddress, DeleteAddress}, "routes": {AddRoute, DeleteRoute}} {
		for _, batched := range []bool{true, false} {
			b.Run(fmt.Sprintf("%s/together=%t", what, batched), func(b *testing.B) {
				namespace(b)
				n := open(b)
				for _, f := range n.Apply([]Change{{Op: AddLink}}) {
					b.Fatal(f)
				}
				for b.Loop() {
					for _, op := range ops {
						writeVIPs(b, n, op, batched)
					}
				}
			})
		}
	}
}

func writeVIPs(b *testing.B, n *Netlink, op Op, batched bool) {
	var changes []Change
	for i := range 1000 {
		c := Change{Op: op}
		a := netip.AddrFrom4([4]byte{10, 98, byte(i >> 8), byte(i)})
		if op == AddRoute || op == DeleteRoute {
			c.Route = Route{Family: ip.IPv4, Table: 80080, Dst: netip.PrefixFrom(a, 32), Link: "lo", Local: true}
		} else {
			c.Address = a
		}
		changes = append(changes, c)
	}
	s := n.session(Protocol)
	if batched {
		changes = s.applyBatch(changes)
		if len(changes) > 0 {
			b.Fatalf("%d changes are left, such as %s", len(changes), changes[0])
		}
	}
	for _, c := range changes {
		if err := change(s, c, s.wrongScope); err != nil {
			b.Fatal(err)
		}
	}
}

// With the rule, marked packets to an address of the node are forwarded and all others
// are delivered, both received packets and those that the node sends.
func TestSkipLocalRoutes(t *testing.T) {
	s := kernelSubject(t)
	ipCommands(t, "addr add 192.0.2.1/24 dev eth1", "-6 addr add fd00:2::1/64 dev eth1 nodad",
		"route add default via 192.0.2.254", "-6 route add default via fd00:2::fe")
	for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	want := wanted()
	want.Rules, want.Routes = set[Rule](), set[Route]()
	for _, f := range ip.Families {
		want.Rules[Rule{Family: f, Action: SkipLocal, Mark: 4, Mask: 4}] = struct{}{}
	}
	for _, skips := range []bool{true, false} {
		if !skips {
			want.Rules = set[Rule]()
		}
		s.reach(t, want)
		t.Log(command(t, "ip -details rule show"), command(t, "ip -6 -details rule show"))
		for mark, local := range map[int]bool{0: true, 4: !skips, 0xc: !skips, 8: true} {
			for vip, client := range map[string]string{"10.96.0.1": "192.0.2.7", "fd00::1": "fd00:2::7"} {
				enters := command(t, fmt.Sprintf("ip route get %s from %s iif eth1 mark %d", vip, client, mark))
				if strings.HasPrefix(enters, "local ") != local {
					t.Errorf("skips %t, enters with mark %d: %s", skips, mark, enters)
				}
				if got := isDelivered(t, vip, mark); got != local {
					t.Errorf("skips %t, sent to %s with mark %d: delivered %t", skips, vip, mark, got)
				}
			}
		}
	}
}

// isDelivered sends a datagram with a mark to an address of the node, and reports whether a
// local socket received it. Otherwise it must leave by eth1.
func isDelivered(t *testing.T, to string, mark int) bool {
	t.Helper()
	listener, err := net.ListenPacket("udp", netip.AddrPortFrom(addr(to), 7).String())
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark); err != nil {
				t.Error(err)
			}
		})
	}}
	conn, err := dialer.Dial("udp", listener.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	sent := transmitted(t)
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if transmitted(t) > sent {
		return false
	}
	_ = listener.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, _, err := listener.ReadFrom(make([]byte, 1)); err != nil {
		t.Errorf("neither sent nor delivered: %v", err)
	}
	return true
}

// transmitted returns the number of packets that left by eth1.
func transmitted(t *testing.T) int {
	t.Helper()
	link, err := netlink.LinkByName("eth1")
	if err != nil {
		t.Fatal(err)
	}
	return int(link.Attrs().Statistics.TxPackets)
}

// If the source of a packet may decide its route, replies need the second lookup.
func TestInventoryReroute(t *testing.T) {
	namespace(t)
	ipCommands(t, "link set lo up", "link add eth1 type veth peer name eth2", "link set eth2 up", "link set eth1 up", "-6 addr add fd00::10/64 dev eth1 nodad")
	n := open(t)
	check := func(what string, want Reroute) {
		t.Helper()
		if inv, err := n.Inventory(); err != nil || inv.Reroute != want {
			t.Errorf("%s: %d, %v, want %d", what, inv.Reroute, err, want)
		}
	}
	check("nothing", RerouteUnneeded)
	ipCommands(t, "rule add pref 100 fwmark 4/4 lookup 80080")
	check("a rule to an unknown table", RerouteNeeded)
	n.VIPTable = 80080
	check("a rule to the table of claimed VIPs", RerouteUnneeded)
	ipCommands(t, "rule del pref 100")
	for _, c := range []struct{ add, del string }{
		{"rule add pref 1000 from 10.0.0.1 lookup 100", "rule del pref 1000"},
		{"rule add pref 32767 fwmark 1 lookup 100", "rule del pref 32767 fwmark 1"},
		{"-6 rule add pref 1000 iif eth1 lookup 100", "-6 rule del pref 1000"},
		{"-6 route add 2001:db8::/64 from fd00:1::/64 dev eth1", "-6 route del 2001:db8::/64 from fd00:1::/64 dev eth1"},
		{"xfrm policy add src 10.0.0.0/8 dst 192.0.2.0/24 dir out", "xfrm policy flush"},
		{"rule del pref 0", "rule add pref 0 lookup local"},
	} {
		ipCommands(t, c.add)
		check(c.add, RerouteNeeded)
		ipCommands(t, c.del)
		check(c.del, RerouteUnneeded)
	}
}

// BenchmarkInventory reads the network of a node with 50 pods, which is what the loop waits for
// when an interface other than a pod's changes. The number of VIPs should make no difference.
func BenchmarkInventory(b *testing.B) {
	for _, vips := range []int{100, 44125} {
		for _, table := range []int{unix.RT_TABLE_LOCAL, 80080} {
			b.Run(fmt.Sprintf("%d in table %d", vips, table), func(b *testing.B) {
				namespace(b)
				n := open(b)
				n.VIPTable = 80080
				for i := range 50 {
					ipCommands(b, fmt.Sprintf("link add pod%d type veth peer name peer%d", i, i))
				}
				for first := 0; first < vips; first += 1000 {
					var adds []Change
					for i := first; i < min(first+1000, vips); i++ {
						a := netip.AddrFrom4([4]byte{10, 98, byte(i >> 8), byte(i)})
						adds = append(adds, Change{Op: AddRoute, Route: Route{Family: ip.IPv4, Table: table, Dst: netip.PrefixFrom(a, 32), Link: "lo", Local: true}})
					}
					for _, f := range n.Apply(adds) {
						b.Fatal(f)
					}
				}
				if table != unix.RT_TABLE_LOCAL {
					for _, f := range n.Apply([]Change{{Op: AddRule, Rule: Rule{Family: ip.IPv4, Priority: 99, Mark: 1, Mask: 1, Table: table}}}) {
						b.Fatal(f)
					}
				}
				var used time.Duration // unlike the elapsed time, it does not grow on a busy machine
				for b.Loop() {
					before := threadTime(b)
					if _, err := n.Inventory(); err != nil {
						b.Fatal(err)
					}
					used += threadTime(b) - before
				}
				b.ReportMetric(float64(used.Microseconds())/float64(b.N), "cpu-us/op")
			})
		}
	}
}

// threadTime returns the CPU time of the calling thread, which is locked.
func threadTime(b *testing.B) time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		b.Fatal(err)
	}
	return time.Duration(now.Nano())
}

// TestRejectAndThrowRoutes reads routes that forward no packets. They have no link.
func TestRejectAndThrowRoutes(t *testing.T) {
	namespace(t)
	ipCommands(t, "route add blackhole 10.244.1.0/26", "route add throw 10.244.2.0/24 table 100", "-6 route add unreachable fd00:1::/64")
	n := open(t)
	routes, err := n.Routes()
	if err != nil {
		t.Fatal(err)
	}
	got := map[netip.Prefix]RouteType{}
	for _, r := range routes {
		got[r.Dst] = r.Type
	}
	for dst, want := range map[string]RouteType{"10.244.1.0/26": Reject, "10.244.2.0/24": Throw, "fd00:1::/64": Reject} {
		if got[netip.MustParsePrefix(dst)] != want {
			t.Errorf("%s: %d, want %d of %v", dst, got[netip.MustParsePrefix(dst)], want, routes)
		}
	}
	if s, err := n.Observe(); err != nil || len(s.Routes) > 0 {
		t.Errorf("ours: %v, %v", s.Routes, err)
	}
}
