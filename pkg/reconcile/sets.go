package reconcile

import (
	"maps"
	"net/netip"
	"unique"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// setState is what is known of a set, and the numbers of its members.
type setState struct {
	name     string
	set      ipset.Set // if it exists
	exists   bool
	failed   bool // the kernel refuses to create it, for example because it lacks its type
	existing int  // members in the kernel
	wanted   int  // members that an owner wants
	// demanded means that the set is in use without a desired member; see plan.Demands.
	demanded bool
}

// inUse reports whether rules must match the set.
func (s *setState) inUse() bool { return s.wanted > 0 || s.demanded }

// memberKey is a plan.Member without its mark, in a third of the memory.
type memberKey struct {
	addr     netip.Addr
	more     unique.Handle[memberRest] // the zero Handle if there is none
	port     uint16
	set      uint16 // index in sets.list
	protocol ip.Protocol
}

// memberRest holds the fields that few members have.
type memberRest struct {
	addr2 netip.Addr
	net   netip.Prefix
}

// sets lists the sets that were ever seen or desired. Their indexes do not change.
type sets struct {
	list  []*setState
	index map[string]uint16
	uses  plan.SetsInUse // see use
}

// named returns the index of a set.
func (s *sets) named(name string) uint16 {
	i, ok := s.index[name]
	if !ok {
		i = uint16(len(s.list))
		s.index[name] = i
		s.list = append(s.list, &setState{name: name})
	}
	return i
}

func (s *sets) get(name string) *setState { return s.list[s.named(name)] }

// key returns the key of a member.
func (s *sets) key(m plan.Member) memberKey {
	k := memberKey{addr: m.Entry.Addr, port: m.Entry.Port, protocol: m.Entry.Protocol, set: s.named(m.Set)}
	if rest := (memberRest{m.Entry.Addr2, m.Entry.Net}); rest != (memberRest{}) {
		k.more = unique.Make(rest)
	}
	return k
}

// member returns the member that a key stands for.
func (s *sets) member(k memberKey) plan.Member {
	m := plan.Member{Set: s.list[k.set].name, Entry: ipset.Entry{Addr: k.addr, Port: k.port, Protocol: k.protocol}}
	if k.more != (unique.Handle[memberRest]{}) {
		rest := k.more.Value()
		m.Entry.Addr2, m.Entry.Net = rest.addr2, rest.net
	}
	return m
}

// use records that a set is in use, so that the plan has rules that match it. Before Prune, a set
// is in use if it has members or ever had desired ones. After Prune, only desired members count. The
// sets of plan.Demands stay in use once they have had members. The map is immutable, because the
// node's plan has it.
func (s *sets) use(name string) {
	if !s.uses[name] {
		uses := maps.Clone(s.uses)
		uses[name] = true
		s.uses = uses
	}
}

// dropUnused removes the sets from those in use that have no desired members any more.
func (s *sets) dropUnused() {
	n := 0
	for _, set := range s.list {
		if set.inUse() {
			n++
		}
	}
	if n == len(s.uses) {
		return
	}
	s.uses = plan.SetsInUse{}
	for _, set := range s.list {
		if set.inUse() {
			s.uses[set.name] = true
		}
	}
}
