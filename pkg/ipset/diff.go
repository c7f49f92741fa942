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

// Diff returns the changes from have to want. Both may be parts of the kernel's state,
// if they are about the same sets.
//
// The order is deterministic: create sets, add members, delete members, destroy sets. A
// set whose type or family differs is created again with all its members, which only
// succeeds when nothing refers to it.
func Diff(have, want State) []Change {
	var p phases
	for _, name := range sortedNames(want) {
		p.set(have[name], want[name])
	}
	for _, name := range sortedNames(have) {
		if _, wanted := want[name]; !wanted {
			p.destroys = append(p.destroys, Change{Op: DestroySet, Set: have[name].Set})
		}
	}
	return p.changes()
}

// DiffEntries returns the changes from have to want of an existing set: first
// additions, then deletions.
func DiffEntries(set Set, have, want map[Entry]uint32) []Change {
	var p phases
	p.entries(set, have, want)
	return p.changes()
}

// phases collects changes by the phase in which they are made.
type phases struct {
	creates, adds, deletes, destroys []Change
}

func (p *phases) changes() []Change {
	return slices.Concat(p.creates, p.adds, p.deletes, p.destroys)
}

func (p *phases) set(have, want Contents) {
	if have.fits(want.Set) {
		p.entries(want.Set, have.Entries, want.Entries)
		return
	}
	p.creates = append(p.creates, Change{Op: CreateSet, Set: want.Set})
	p.entries(want.Set, nil, want.Entries)
}

func (p *phases) entries(set Set, have, want map[Entry]uint32) {
	for _, e := range sorted(want) {
		if mark, there := have[e]; !there || mark != want[e] {
			p.adds = append(p.adds, Change{Op: AddEntry, Set: set, Entry: e, Mark: want[e]})
		}
	}
	for _, e := range sorted(have) {
		if _, wanted := want[e]; !wanted {
			p.deletes = append(p.deletes, Change{Op: DeleteEntry, Set: set, Entry: e})
		}
	}
}

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
