//go:build e2e

package conntrack

import (
	"errors"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func TestKernel(t *testing.T) { testDelete(t, openKernel) }

func TestKernelLongest(t *testing.T) { testLongest(t, openKernel(t)) }

// openKernel moves the test to a new network namespace, where it stays: the thread is
// never unlocked, so the runtime ends it with the test.
func openKernel(t testing.TB) table {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	n, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return table{
		client: &n.client,
		add: func(entries ...Entry) {
			for _, e := range entries {
				track(t, e)
			}
		},
		entries: func() []Entry { return list(t, n.raw) },
	}
}

// track adds an entry as if packets had created it.
func track(t testing.TB, e Entry) {
	t.Helper()
	flow := &netlink.ConntrackFlow{
		FamilyType: ip.Of(e.OriginalDst.Addr()).AF(),
		Forward: netlink.IPTuple{
			Protocol: uint8(e.Protocol),
			SrcIP:    e.OriginalSrc.Addr().AsSlice(), SrcPort: e.OriginalSrc.Port(),
			DstIP: e.OriginalDst.Addr().AsSlice(), DstPort: e.OriginalDst.Port(),
		},
		Reverse: netlink.IPTuple{
			Protocol: uint8(e.Protocol),
			SrcIP:    e.ReplySrc.Addr().AsSlice(), SrcPort: e.ReplySrc.Port(),
			DstIP: e.ReplyDst.Addr().AsSlice(), DstPort: e.ReplyDst.Port(),
		},
		TimeOut: uint32(lifetime(e) / time.Second),
	}
	if err := netlink.ConntrackCreate(netlink.ConntrackTable, netlink.InetFamily(flow.FamilyType), flow); err != nil {
		t.Fatalf("%s: %v", e, err)
	}
}

func list(t testing.TB, r raw) []Entry {
	t.Helper()
	var entries []Entry
	for _, family := range ip.Families {
		all, err := r.dump(family, filter{}, func(Entry) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			entries = append(entries, e.Entry)
		}
	}
	return entries
}

// TestExpiredEntry deletes an entry that has expired since it was listed.
func TestExpiredEntry(t *testing.T) {
	table := openKernel(t)
	table.add(flow(ip.UDP, 1, "10.96.0.1:53", "192.0.2.1:53"))
	entries, err := table.client.raw.dump(ip.IPv4, filter{}, func(Entry) bool { return true })
	if err != nil || len(entries) != 1 {
		t.Fatal(entries, err)
	}
	for _, want := range []error{nil, unix.ENOENT} {
		if err := table.client.raw.remove(ip.IPv4, entries[0]); !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
}

// TestFilter checks that the kernel omits entries that do not pass, so that they are not
// even parsed.
func TestFilter(t *testing.T) {
	table := openKernel(t)
	translated := flow(ip.TCP, 3, "10.96.0.2:80", "192.0.2.1:80")
	translated.ReplyDst = netip.MustParseAddrPort("10.12.0.9:3000")
	translated6 := flow(ip.UDP, 4, "[fd00:96::2]:80", "[2001:db8::1]:80")
	translated6.ReplyDst = netip.MustParseAddrPort("[fd00:12::9]:3000")
	udp6, other6 := flow(ip.UDP, 5, "[fd00:96::1]:53", "[2001:db8::1]:53"), flow(ip.UDP, 6, "[fd00:96::2]:53", "[2001:db8::1]:53")
	table.add(udp6, other6)
	udp, other := flow(ip.UDP, 1, "10.96.0.1:53", "192.0.2.1:53"), flow(ip.UDP, 2, "10.96.0.1:54", "192.0.2.1:53")
	table.add(udp, other, translated, translated6)
	for _, tc := range []struct {
		family ip.Family
		filter filter
		want   []Entry
	}{
		{ip.IPv4, filter{protocol: ip.UDP, originalDst: udp.OriginalDst}, []Entry{udp}},
		{ip.IPv4, filter{protocol: ip.UDP}, []Entry{udp, other}},
		{ip.IPv4, filter{replyDst: translated.ReplyDst.Addr()}, []Entry{translated}},
		{ip.IPv4, filter{replyDst: netip.MustParseAddr("10.12.0.8")}, nil},
		// The kernel cannot filter these by address; see filter.attributes.
		{ip.IPv6, filter{protocol: ip.UDP, originalDst: udp6.OriginalDst}, []Entry{udp6, other6}},
		{ip.IPv6, filter{replyDst: translated6.ReplyDst.Addr()}, []Entry{translated6, udp6, other6}},
	} {
		var seen []Entry
		if _, err := table.client.raw.dump(tc.family, tc.filter, func(e Entry) bool { seen = append(seen, e); return false }); err != nil {
			t.Errorf("%+v: %v", tc.filter, err)
		}
		byPort := func(a, b Entry) int { return a.OriginalSrc.Compare(b.OriginalSrc) }
		if slices.SortFunc(seen, byPort); !slices.Equal(seen, tc.want) {
			t.Errorf("%+v: the kernel sent %v, want %v", tc.filter, seen, tc.want)
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

// BenchmarkDelete deletes the entries of one removed endpoint from a table of other entries:
// in the usual size of the table, and in that of a node whose table is nearly full.
func BenchmarkDelete(b *testing.B) {
	for _, size := range []int{20000, 260000} {
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			table := openKernel(b)
			for i := range size {
				e := flow(ip.UDP, uint16(i), "10.96.0.1:53", "192.0.2.1:53")
				e.OriginalSrc = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i >> 16), 1}), uint16(i))
				e.ReplyDst = e.OriginalSrc
				e.OriginalDst = netip.AddrPortFrom(e.OriginalDst.Addr(), uint16(53+i%1000))
				table.add(e)
			}
			endpoint := netip.MustParseAddrPort("192.0.2.9:53")
			var used time.Duration // unlike the elapsed time, it does not grow on a busy machine
			for b.Loop() {
				gone := flow(ip.UDP, 1, "10.96.0.2:53", endpoint.String())
				table.add(gone)
				before := threadTime(b)
				n, err := table.client.Delete([]Match{{Protocol: ip.UDP, OriginalDst: gone.OriginalDst, ReplySrc: endpoint}})
				if used += threadTime(b) - before; err != nil || n != 1 {
					b.Fatal(n, err)
				}
			}
			b.ReportMetric(float64(used.Microseconds())/float64(b.N), "cpu-us/op")
			b.ReportMetric(float64(used.Nanoseconds())/float64(b.N*size), "cpu-ns/entry")
		})
	}
}
