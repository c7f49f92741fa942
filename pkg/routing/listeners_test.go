package routing

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

const tcpListing = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1
   2: 0B00A8C0:0016 0100A8C0:C350 01 00000000:00000000 00:00000000 00000000     0        0 3 1
   3: 00000000:0017 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1
`

func TestReadListeners(t *testing.T) {
	got, err := readListeners(strings.NewReader(tcpListing), ip.TCP, "0A")
	want := []Listener{{ip.TCP, netip.MustParseAddr("127.0.0.1"), 8080}, {ip.TCP, netip.IPv4Unspecified(), 22}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	for _, broken := range []string{"x\n 0: 00:16", "x\n 0: 0100007F:10000 0:0 0A", "x\n 0: 0100:16 0:0 0A", "x\n 0: zz:16 0:0 0A"} {
		if got, err := readListeners(strings.NewReader(broken), ip.TCP, "0A"); err == nil {
			t.Errorf("%q is read as %v", broken, got)
		}
	}
}

// TestListeners finds its own sockets, but not one that has a peer.
func TestListeners(t *testing.T) {
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp", "[::]:0")
	if err != nil {
		t.Skip(err)
	}
	defer udp.Close()
	client, err := net.Dial("udp4", "127.0.0.1:9")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	list, err := (&Netlink{}).Listeners()
	if err != nil {
		t.Fatal(err)
	}
	at := func(protocol ip.Protocol, a net.Addr) Listener {
		to := netip.MustParseAddrPort(fmt.Sprint(a))
		return Listener{protocol, to.Addr(), to.Port()}
	}
	for _, want := range []Listener{at(ip.TCP, tcp.Addr()), at(ip.UDP, udp.LocalAddr())} {
		if !slices.Contains(list, want) {
			t.Errorf("%v is not in %v", want, list)
		}
	}
	if peer := at(ip.UDP, client.LocalAddr()); slices.Contains(list, peer) {
		t.Errorf("%v, which has a peer, is in %v", peer, list)
	}
}

// TestListenersByNetlink: sockets of TCP are read by netlink as the files list them, without
// those that have a peer.
func TestListenersByNetlink(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "[::]:0"} {
		server, err := net.Listen("tcp", address)
		if err != nil && strings.HasPrefix(address, "[") {
			continue // a machine without IPv6
		}
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		client, err := net.Dial("tcp", server.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
	}
	for _, l := range listings[:2] {
		listed, err := l.readFile()
		if err != nil {
			t.Fatal(err)
		}
		got, err := tcpListeners(l.family)
		if err != nil {
			t.Skip(err) // a kernel without tcp_diag
		}
		if diff := cmp.Diff(sortListeners(listed), sortListeners(got), byValue); diff != "" {
			t.Errorf("%s (-file +netlink):\n%s", l.name, diff)
		}
	}
}

// BenchmarkListeners reads all ports, and only those of TCP from the files.
func BenchmarkListeners(b *testing.B) {
	b.Run("all", func(b *testing.B) {
		for b.Loop() {
			if _, err := (&Netlink{}).Listeners(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("TCP by files", func(b *testing.B) {
		for b.Loop() {
			for _, l := range listings[:2] {
				if _, err := l.readFile(); err != nil {
					b.Fatal(err)
				}
			}
		}
	})
}

// FuzzSockets: a message about a socket is parsed or rejected.
func FuzzSockets(f *testing.F) {
	f.Add(make([]byte, diagMessageSize))
	f.Fuzz(func(t *testing.T, m []byte) {
		if l, ok := parseSocket(m); ok && (!l.Addr.IsValid() || l.Addr.Is4In6()) {
			t.Errorf("invalid listener %v", l)
		}
	})
}

// FuzzListeners: a listing is parsed or rejected.
func FuzzListeners(f *testing.F) {
	f.Add(tcpListing, true)
	f.Add("heading\n 0: 00000000000000000000000001000000:0035 0:0 07 0\n", false)
	f.Fuzz(func(t *testing.T, listing string, tcp bool) {
		protocol, waits := ip.UDP, "07"
		if tcp {
			protocol, waits = ip.TCP, "0A"
		}
		list, err := readListeners(strings.NewReader(listing), protocol, waits)
		for _, l := range list {
			if err == nil && (!l.Addr.IsValid() || l.Addr.Is4In6()) {
				t.Errorf("invalid listener %v", l)
			}
		}
	})
}
