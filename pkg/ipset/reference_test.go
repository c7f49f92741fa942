package ipset

import "slices"

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
