package apply

import (
	"errors"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kubeproxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Applier holds what is wanted and what the kernel has, and writes the
// difference. It is for one goroutine; only Observe may run beside it.
//
// The order of use at the start is SetNode, BeginObserve and Adopt, Flush,
// then Set and Flush for every Service, then Sweep and Flush.
type Applier struct {
	cfg    *plan.Config
	kernel Kernel

	parts   map[types.NamespacedName]ownedPart
	servers ledger[ipvs.Key, *plan.VirtualServer]
	members ledger[plan.Member, uint32] // by member without its mark, which is the value
	wanted  map[string]int              // members of each set that are wanted
	vips    ledger[plan.VIP, struct{}]
	node    nodePart

	conflicts conflicts
	flows     flows

	have          have
	marked        map[ipvs.Key]ipvs.Key                     // the address and port that a mark is for, by the members in the kernel
	retired       map[ipvs.Key]ipvs.Key                     // the address and port of retired virtual servers with a mark, by their records
	foreign       ipvs.State                                // virtual servers that are not ours
	misbound      map[netip.Addr]struct{}                   // addresses that were bound as kube-proxy does
	strays        map[routing.Route]struct{}                // routes that an earlier configuration has left
	marks         []nat.MarkUse                             // rules of others that have to do with marks
	seen          map[ip.Family]nat.State                   // the rules as they were last observed
	draining      map[ipvs.Key]map[netip.AddrPort]time.Time // real servers of weight 0 that wait for their connections to end; see Drain
	drainingCount int                                       // real servers in draining
	toDrain       []ipvs.Key                                // those of them at which this round of Drain has not looked
	cuts          []Cut                                     // since TakeCuts was last called
	toLook        []ipvs.Key                                // virtual servers at which this round of Suspicious has not looked
	touched       *touched                                  // what was written since Observe began; nil when none runs
	rules         atomic.Pointer[nat.Own]                   // for Concerns
	lost          map[string]bool                           // sets that the kernel refuses to create, as it lacks their type, say
	current       bool                                      // the rules that stood at the start are those of the plan
	swept         bool                                      // all Services are known: what nobody wants may go
}

// ownedPart is what a Service wants.
type ownedPart struct {
	owner *Owner
	part  plan.Part
}

// have is what the kernel holds of ours, as far as is known.
type have struct {
	servers     ipvs.State // changed by setServer and deleteServer alone
	realServers int        // in all of servers
	ofIPv4      int        // of servers
	sets        ipset.State
	link        bool
	vips        map[plan.VIP]struct{}
	rules       map[routing.Rule]struct{}
	sysctls     sysctl.State
	nat         map[ip.Family]nat.State

	loopback  loopback.State
	kubeProxy kubeproxy.State
	leftovers leftovers
}

// New makes an Applier that knows nothing of the kernel yet.
func New(cfg *plan.Config, kernel Kernel) *Applier {
	a := &Applier{
		cfg:       cfg,
		kernel:    kernel,
		parts:     map[types.NamespacedName]ownedPart{},
		servers:   newLedger[ipvs.Key, *plan.VirtualServer](),
		members:   newLedger[plan.Member, uint32](),
		vips:      newLedger[plan.VIP, struct{}](),
		conflicts: newConflicts(),
		flows:     newFlows(),
		have:      have{servers: ipvs.State{}, sets: ipset.State{}, vips: map[plan.VIP]struct{}{}, rules: map[routing.Rule]struct{}{}, sysctls: sysctl.State{}, nat: map[ip.Family]nat.State{}},
		marked:    map[ipvs.Key]ipvs.Key{},
		retired:   map[ipvs.Key]ipvs.Key{},
		wanted:    map[string]int{},
		foreign:   ipvs.State{},
		lost:      map[string]bool{},
		draining:  map[ipvs.Key]map[netip.AddrPort]time.Time{},
	}
	a.members.counted = a.countMember
	return a
}

// Problem is something that could not be programmed.
type Problem struct {
	// Owners are the Services that lack it; none if it is the node's, or
	// nobody's any more.
	Owners []types.NamespacedName
	Err    error
}

// Problems are those of one Flush.
type Problems []Problem

// Err joins them, or is nil.
func (p Problems) Err() error {
	errs := make([]error, len(p))
	for i := range p {
		errs[i] = p[i].Err
	}
	return errors.Join(errs...)
}

// Set makes a part the one that a Service wants. Only what differs from its
// part before becomes work.
func (a *Applier) Set(owner *Owner, part plan.Part) {
	old := a.parts[owner.Name].part
	a.parts[owner.Name] = ownedPart{owner, part}
	a.setServers(owner, old.VirtualServers, part.VirtualServers)
	setAll(&a.members, owner, old.Members, part.Members, unmarked)
	setAll(&a.vips, owner, old.VIPs, part.VIPs, func(vip plan.VIP) (plan.VIP, struct{}) { return vip, struct{}{} })
}

// Delete takes back all that a Service wanted.
func (a *Applier) Delete(name types.NamespacedName) {
	if p, ok := a.parts[name]; ok {
		a.Set(p.owner, plan.Part{})
		delete(a.parts, name)
	}
}

func (a *Applier) setServers(owner *Owner, old, want []plan.VirtualServer) {
	before := make(map[ipvs.Key]*plan.VirtualServer, len(old))
	for i := range old {
		before[old[i].Key] = &old[i]
	}
	for i := range want {
		vs := &want[i]
		if was, ok := before[vs.Key]; !ok || !sameServer(was, vs) {
			a.adoptForeign(vs.Key)
			before := a.servers.owners(vs.Key)
			a.servers.put(vs.Key, owner, vs.Right, vs)
			a.claimed(vs.Key, before)
		}
		delete(before, vs.Key)
	}
	for key := range before {
		owners := a.servers.owners(key)
		a.servers.drop(key, owner)
		a.claimed(key, owners)
	}
}

// claimed has all looked at that depends on who has a virtual server, after a
// claim on it has changed.
func (a *Applier) claimed(key ipvs.Key, before []types.NamespacedName) {
	owners := a.servers.owners(key)
	a.conflicts.claimed(key, owners)
	a.markTwin(key)
	a.lookAtRetired(key)
	if len(before) > 1 || len(owners) > 1 {
		a.markBound(key, owners)
	}
}

func sameServer(a, b *plan.VirtualServer) bool {
	return a.Right == b.Right && a.VirtualServer == b.VirtualServer && a.MaxConnections == b.MaxConnections && slices.Equal(a.RealServers, b.RealServers) &&
		slices.Equal(a.Endpoints, b.Endpoints) && slices.Equal(a.Lost, b.Lost)
}

func (h *have) setServer(key ipvs.Key, s ipvs.Service, realServersBefore int) {
	if _, there := h.servers[key]; !there && key.Addr.Is4() {
		h.ofIPv4++
	}
	h.servers[key] = s
	h.realServers += len(s.RealServers) - realServersBefore
}

func (h *have) deleteServer(key ipvs.Key) {
	s, there := h.servers[key]
	if !there {
		return
	}
	if key.Addr.Is4() {
		h.ofIPv4--
	}
	delete(h.servers, key)
	h.realServers -= len(s.RealServers)
}

// adoptForeign takes over a virtual server of somebody else whose key a
// Service claims.
func (a *Applier) adoptForeign(key ipvs.Key) {
	if s, ok := a.foreign[key]; ok {
		a.have.setServer(key, s, 0)
		delete(a.foreign, key)
	}
}

// setAll puts and drops that in which two lists differ, as keys and values.
func setAll[E any, K, V comparable](l *ledger[K, V], owner *Owner, old, want []E, entry func(E) (K, V)) {
	before := make(map[K]V, len(old))
	for _, e := range old {
		k, v := entry(e)
		before[k] = v
	}
	for _, e := range want {
		k, v := entry(e)
		if was, ok := before[k]; !ok || was != v {
			l.put(k, owner, 0, v)
		}
		delete(before, k)
	}
	for k := range before {
		l.drop(k, owner)
	}
}

// unmarked is a member by itself, and the mark that it carries.
func unmarked(m plan.Member) (plan.Member, uint32) {
	mark := m.Mark
	m.Mark = 0
	return m, mark
}

// Retry has what the kernel refused to a Service tried again with the next
// Flush; with the zero name, what it refused to the node, or to nobody.
func (a *Applier) Retry(name types.NamespacedName) {
	a.servers.retry(name)
	a.members.retry(name)
	a.vips.retry(name)
	if name == nodeOwner.Name {
		a.flows.wait = false
	}
}

// Held counts what the kernel holds of ours.
func (a *Applier) Held() (virtualServers, realServers, draining int) {
	return len(a.have.servers), a.have.realServers, a.Draining()
}
