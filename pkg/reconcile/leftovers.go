package reconcile

import (
	"errors"
	"fmt"
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

// count returns how many changes the removal takes.
func (l *leftovers) count() int {
	n := 0
	for _, s := range l.nat {
		n += len(nat.Diff(s, nat.State{}))
	}
	return n
}

// removeLeftovers removes the leftovers once every Service is served without them.
func (f *flush) removeLeftovers() {
	if !f.pruning {
		return
	}
	failures := f.dropLeftovers(func(_ ip.Family, s nat.State) nat.State { return s })
	for _, failure := range failures {
		f.fail(nil, failure)
	}
	if len(failures) == 0 {
		clear(f.cached.leftovers.nat)
	}
}

// dropLeftovers removes the leftovers that pick selects of each family. A chain that another
// program's rule refers to stays.
func (a *Reconciler) dropLeftovers(pick func(ip.Family, nat.State) nat.State) []nat.Failure {
	var out []nat.Failure
	for family, k := range a.kernel.Leftovers.NAT {
		changes := nat.Diff(pick(family, a.cached.leftovers.nat[family]), nat.State{})
		if len(changes) == 0 {
			continue
		}
		for _, failure := range a.kernel.writeNAT(k, changes) {
			if !errors.Is(failure, unix.EMLINK) {
				out = append(out, failure)
			}
		}
	}
	return out
}

// unseen describes where leftovers may be that cannot be read.
func (a *Reconciler) unseen() []string {
	var out []string
	if a.kernel.Leftovers.Unseen {
		out = append(out, "the iptables back end that kube-ipvs does not use may hold rules of kube-proxy, which take effect before IPVS, and its programs are not installed: install the complete iptables package, or remove such rules")
	}
	for _, family := range ip.Families {
		if err := a.cached.leftovers.unread[family]; err != nil {
			out = append(out, fmt.Sprintf("rules that kube-proxy may have left of %s in %s cannot be read: %v", family, a.kernel.Leftovers.Programs, err))
		}
	}
	return out
}
