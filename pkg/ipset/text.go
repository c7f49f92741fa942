package ipset

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func sorted(entries map[Entry]uint32) []Entry {
	return slices.SortedFunc(maps.Keys(entries), Entry.Compare)
}

// Compare compares entries field by field, in the order of Entry.
func (e Entry) Compare(other Entry) int {
	return cmp.Or(
		e.Addr.Compare(other.Addr),
		cmp.Compare(e.Port, other.Port),
		cmp.Compare(e.Protocol, other.Protocol),
		e.Addr2.Compare(other.Addr2),
		comparePrefixes(e.Net, other.Net),
	)
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

func sortedNames(s State) []string { return slices.Sorted(maps.Keys(s)) }

// String returns the state in the format of "ipset restore", sorted by name and entry:
//
//	create KUBE-CLUSTER-IP hash:ip,port family inet
//	add KUBE-CLUSTER-IP 10.96.0.1,tcp:443
func (s State) String() string {
	var b strings.Builder
	for _, name := range sortedNames(s) {
		contents := s[name]
		fmt.Fprintf(&b, "create %s %s %s\n", name, contents.Type, contents.options())
		for _, e := range sorted(contents.Entries) {
			fmt.Fprintf(&b, "add %s %s\n", name, withMark(e, contents.Entries[e]))
		}
	}
	return b.String()
}

func (s Set) options() string {
	switch {
	case s.Type == BitmapPort:
		return "range 0-65535"
	case s.Family == ip.IPv6:
		return "family inet6"
	}
	return "family inet"
}
