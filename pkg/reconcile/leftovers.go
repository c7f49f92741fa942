package reconcile

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// leftovers are the rules with our names in the iptables back end that is not in use. The
// kernel evaluates them too, those of the older back end first: a DNAT rule that kube-proxy
// left there takes effect before IPVS.
type leftovers struct {
	nat    map[ip.Family]nat.State
	unread map[ip.Family]error
}

// readLeftovers reads the leftovers. A family that cannot be read is recorded in unread, and
// left as it is.
func (r reader) readLeftovers() leftovers {
	l := leftovers{nat: map[ip.Family]nat.State{}, unread: map[ip.Family]error{}}
	var mu sync.Mutex
	var all sync.WaitGroup
	for family, k := range r.kernel.Leftovers.NAT {
		all.Go(func() {
			s, err := k.Observe(r.nat)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				l.unread[family] = err
			} else {
				l.nat[family] = s
			}
		})
	}
	all.Wait()
	return l
}

// leftovers are removed once every Service is served without them and our rules of their
// family are written, a section for each family.
func (ns *nodeSections) leftovers() []nodeSection {
	written := func(family ip.Family, s nat.State) nat.State {
		if len(s.Chains)+len(s.Jumps) > 0 && !ns.rulesWritten(family) {
			return nat.State{}
		}
		return s
	}
	return ns.leftoverSections(written, func(f ip.Family) { delete(ns.cached.leftovers.nat, f) })
}

// leftoverSections removes the leftovers that pick selects of each family. A chain that
// another program's rule refers to stays.
func (ns *nodeSections) leftoverSections(pick func(ip.Family, nat.State) nat.State, done func(ip.Family)) []nodeSection {
	var sections []nodeSection
	for family, k := range ns.kernel.Leftovers.NAT {
		sections = append(sections, section[nat.Change]{
			diff: func() []nat.Change { return nat.Diff(pick(family, ns.cached.leftovers.nat[family]), nat.State{}) },
			write: func(changes []nat.Change) []nat.Failure {
				return slices.DeleteFunc(ns.kernel.writeNAT(k, changes), func(f nat.Failure) bool { return errors.Is(f, unix.EMLINK) })
			},
			done: whole[nat.Change](func() { done(family) }),
		})
	}
	return sections
}

// unseen describes where leftovers, or rules of other programs, may be that cannot be read.
func (ns *nodeSections) unseen() []string {
	var out []string
	if ns.kernel.Leftovers.Unseen {
		out = append(out, "the iptables back end that kube-ipvs does not use may hold rules of kube-proxy, which take effect before IPVS, and its programs are not installed: install the complete iptables package, or remove such rules")
	}
	for _, family := range ip.Families {
		if err := ns.cached.leftovers.unread[family]; err != nil {
			out = append(out, fmt.Sprintf("cannot read the %s rules in %s, where kube-proxy may have left some: %v", family, ns.kernel.Leftovers.Programs, err))
		}
	}
	if ns.kubeProxyErr != nil {
		out = append(out, fmt.Sprintf("cannot read nftables, where kube-proxy may have left tables: %v", ns.kubeProxyErr))
	}
	if ns.nativeErr != nil {
		out = append(out, fmt.Sprintf("cannot read nftables rules of other programs, which may use marks of kube-ipvs: %v", ns.nativeErr))
	}
	return out
}
