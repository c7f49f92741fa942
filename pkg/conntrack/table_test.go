package conntrack

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// The table of this file runs on the Fake and, with the build tag e2e, on the kernel.

// table is a conntrack table under test.
type table struct {
	client  *client
	add     func(...Entry)
	entries func() []Entry
}

// flow returns an entry from a client of the VIP's family to a VIP, answered by an
// endpoint.
func flow(protocol ip.Protocol, clientPort uint16, vip, endpoint string) Entry {
	dst := netip.MustParseAddrPort(vip)
	src := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.1"), clientPort)
	if ip.Of(dst.Addr()) == ip.IPv6 {
		src = netip.AddrPortFrom(netip.MustParseAddr("2001:db8:1::1"), clientPort)
	}
	return Entry{protocol, src, dst, netip.MustParseAddrPort(endpoint), src}
}

func endpoints(addrs ...string) map[netip.AddrPort]struct{} {
	m := map[netip.AddrPort]struct{}{}
	for _, a := range addrs {
		m[netip.MustParseAddrPort(a)] = struct{}{}
	}
	return m
}

// lifetime is how long an entry lives in the tests.
func lifetime(e Entry) time.Duration {
	return time.Hour + time.Duration(e.OriginalSrc.Port()%10)*time.Minute
}

func testLongest(t *testing.T, table table) {
	longest := map[string]Entry{}
	for _, e := range []Entry{
		flow(ip.TCP, 1, "10.96.0.1:80", "192.0.2.1:80"), flow(ip.TCP, 3, "10.96.0.1:80", "192.0.2.1:80"), flow(ip.TCP, 2, "10.96.0.1:80", "192.0.2.1:80"),
		flow(ip.TCP, 4, "10.96.0.1:80", "192.0.2.2:80"), flow(ip.TCP, 5, "10.96.0.2:80", "192.0.2.1:80"), flow(ip.UDP, 6, "10.96.0.1:80", "192.0.2.1:80"),
		flow(ip.TCP, 7, "[fd00:96::1]:80", "[2001:db8::1]:80"), flow(ip.TCP, 8, "[fd00:96::2]:80", "[2001:db8::1]:80"),
	} {
		table.add(e)
		key := e.Protocol.String() + e.OriginalDst.String() + e.ReplySrc.String()
		if known, exists := longest[key]; !exists || lifetime(e) > lifetime(known) {
			longest[key] = e
		}
	}
	for _, e := range longest {
		got, err := table.client.Longest(Match{Protocol: e.Protocol, OriginalDst: e.OriginalDst, ReplySrc: e.ReplySrc})
		if want := lifetime(e); err != nil || got > want || got < want-30*time.Second {
			t.Errorf("%s: %s, %v, want at most %s", e, got, err, want)
		}
	}
	none := Match{Protocol: ip.TCP, OriginalDst: netip.MustParseAddrPort("10.96.0.1:80"), ReplySrc: netip.MustParseAddrPort("192.0.2.3:80")}
	if got, err := table.client.Longest(none); got != 0 || err != nil {
		t.Errorf("no entry: %s, %v", got, err)
	}
}

func testDelete(t *testing.T, open func(testing.TB) table) {
	all := map[string]Entry{
		"to a":         flow(ip.UDP, 1, "10.96.0.1:53", "192.0.2.1:5353"),
		"to b":         flow(ip.UDP, 2, "10.96.0.1:53", "192.0.2.2:5353"),
		"again to b":   flow(ip.UDP, 3, "10.96.0.1:53", "192.0.2.2:5353"),
		"b, same port": flow(ip.UDP, 4, "10.96.0.1:53", "192.0.2.2:53"),
		"untranslated": flow(ip.UDP, 5, "10.96.0.1:53", "10.96.0.1:53"),
		"other port":   flow(ip.UDP, 6, "10.96.0.1:54", "192.0.2.2:5353"),
		"other VIP":    flow(ip.UDP, 7, "10.96.0.2:53", "192.0.2.2:5353"),
		"TCP":          flow(ip.TCP, 8, "10.96.0.1:53", "192.0.2.2:5353"),
		"SCTP":         flow(ip.SCTP, 9, "10.96.0.1:53", "192.0.2.2:5353"),
		"IPv6 to a":    flow(ip.UDP, 1, "[fd00:96::1]:53", "[2001:db8::1]:5353"),
		"IPv6 to b":    flow(ip.UDP, 2, "[fd00:96::1]:53", "[2001:db8::2]:5353"),
	}
	snat, snat6 := all["TCP"], all["IPv6 to b"]
	snat.OriginalSrc, snat.ReplyDst = netip.MustParseAddrPort("10.244.0.9:10"), netip.MustParseAddrPort("198.51.100.1:10")
	snat6.OriginalSrc, snat6.ReplyDst = netip.MustParseAddrPort("[fd00:244::9]:10"), netip.MustParseAddrPort("[2001:db8:1::1]:10")
	all["SNAT"], all["IPv6 SNAT"] = snat, snat6
	vip, vip6, a, b := netip.MustParseAddrPort("10.96.0.1:53"), netip.MustParseAddrPort("[fd00:96::1]:53"), "192.0.2.1:5353", "192.0.2.2:5353"
	endpoint := netip.MustParseAddrPort
	for _, tc := range []struct {
		name    string
		matches []Match
		deleted []string
	}{
		{name: "nothing"},
		{
			name:    "all but to the serving endpoint",
			matches: []Match{{Protocol: ip.UDP, OriginalDst: vip, Keep: endpoints(a)}},
			deleted: []string{"again to b", "b, same port", "to b", "untranslated"},
		},
		{
			name:    "none serves",
			matches: []Match{{Protocol: ip.UDP, OriginalDst: vip}},
			deleted: []string{"again to b", "b, same port", "to a", "to b", "untranslated"},
		},
		{
			name:    "all serve",
			matches: []Match{{Protocol: ip.UDP, OriginalDst: vip, Keep: endpoints(a, b, "192.0.2.2:53", "10.96.0.1:53")}},
		},
		{
			name:    "to one endpoint",
			matches: []Match{{Protocol: ip.UDP, OriginalDst: vip, ReplySrc: endpoint(b)}},
			deleted: []string{"again to b", "to b"},
		},
		{
			name: "many matches, both families",
			matches: []Match{
				{Protocol: ip.UDP, OriginalDst: vip, ReplySrc: endpoint(b)},
				{Protocol: ip.UDP, OriginalDst: vip, ReplySrc: endpoint(a)},
				{Protocol: ip.UDP, OriginalDst: vip6, Keep: endpoints("[2001:db8::1]:5353")},
				{Protocol: ip.SCTP, OriginalDst: vip},
				{Protocol: ip.TCP, OriginalDst: vip, ReplySrc: endpoint(b)},
			},
			deleted: []string{"IPv6 SNAT", "IPv6 to b", "SCTP", "SNAT", "TCP", "again to b", "to a", "to b"},
		},
		{
			// The clients of the other entries have that address themselves.
			name:    "by the source that was translated to",
			matches: []Match{{Source: netip.MustParseAddr("198.51.100.1")}, {Source: netip.MustParseAddr("2001:db8:1::1")}},
			deleted: []string{"IPv6 SNAT", "SNAT"},
		},
		{
			name:    "by the source, of one protocol",
			matches: []Match{{Protocol: ip.TCP, Source: netip.MustParseAddr("198.51.100.1")}, {Protocol: ip.TCP, Source: netip.MustParseAddr("2001:db8:1::1")}},
			deleted: []string{"SNAT"},
		},
		{
			name:    "by the source, of one protocol and of any",
			matches: []Match{{Protocol: ip.TCP, Source: netip.MustParseAddr("2001:db8:1::1")}, {Source: netip.MustParseAddr("2001:db8:1::1")}},
			deleted: []string{"IPv6 SNAT"},
		},
		{
			// Only UDP entries that are translated in both directions.
			name:    "by the client",
			matches: []Match{{Client: netip.MustParsePrefix("10.244.0.0/24")}, {Client: netip.MustParsePrefix("fd00:244::9/128")}, {Client: netip.MustParsePrefix("198.51.100.0/24")}},
			deleted: []string{"IPv6 SNAT"},
		},
		{
			name:    "by another client",
			matches: []Match{{Client: netip.MustParsePrefix("fd00:244::8/128")}},
		},
		{
			name:    "another source",
			matches: []Match{{Source: netip.MustParseAddr("198.51.100.2")}},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			table := open(t)
			for _, e := range all {
				table.add(e)
			}
			n, err := table.client.Delete(tc.matches)
			if err != nil || n != len(tc.deleted) {
				t.Errorf("%d deleted, want %d; %v", n, len(tc.deleted), err)
			}
			left := map[Entry]bool{}
			for _, e := range table.entries() {
				left[e] = true
			}
			var deleted []string
			for name, e := range all {
				if !left[e] {
					deleted = append(deleted, name)
				}
			}
			slices.SortFunc(deleted, strings.Compare)
			if d := cmp.Diff(tc.deleted, deleted); d != "" {
				t.Error(d)
			}
		})
	}
}
