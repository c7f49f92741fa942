package reconcile

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Reconciler holds the desired state and the cached state of the kernel, and writes the
// difference. It is for one goroutine; only the function that BeginObserve returns, and
// Concerns, may run concurrently.
//
// At startup call SetNode, BeginObserve and Adopt, Flush, then Set and Flush for every
// Service, then Sweep and Flush.
type Reconciler struct {
	cfg    *plan.Config
	kernel Kernel

	parts   map[types.NamespacedName]*ownedPart
	servers serverTable
	members memberTable
	vips    vipTable
	sets    sets
	node    nodePart

	conflicts conflicts
	flows     flows
	numbers   *numbers

	realServers int // in the kernel, of all virtual servers
	ipv4Servers int // IPv4 virtual servers in the kernel

	cached        cachedState
	marked        map[ipvs.Key]ipvs.Key                     // address and port of each fwmark key, from the members of plan.Local in the kernel
	retired       map[ipvs.Key]ipvs.Key                     // address and port of each retired fwmark key, from the members of plan.Draining
	foreign       ipvs.State                                // virtual servers of other programs
	wrongScope    map[netip.Addr]struct{}                   // addresses bound with kube-proxy's scope
	staleRoutes   map[routing.Route]struct{}                // routes of an earlier configuration
	marks         []nat.MarkUse                             // rules of other programs that use marks
	seen          map[ip.Family]nat.State                   // the rules as last observed
	draining      map[ipvs.Key]map[netip.AddrPort]time.Time // real servers of weight 0 whose connections have not ended; see Drain
	drainingCount int                                       // real servers in draining
	toDrain       []ipvs.Key                                // those that this round of Drain has not checked yet
	cuts          []Cut                                     // since the last call of TakeCuts
	toCheck       []*server                                 // virtual servers that this round of Suspicious has not checked yet
	rules         atomic.Pointer[nat.Owned]                 // for Concerns
	rulesCurrent  bool                                      // the rules in the kernel are the plan's
	pruning       bool                                      // all Services are known: undesired state may be deleted
}

type (
	serverTable = table[ipvs.Key, wantedServer, actualServer]
	memberTable = table[memberKey, uint32, uint32] // the values are marks
	vipTable    = table[plan.VIP, struct{}, struct{}]

	server    = record[ipvs.Key, wantedServer, actualServer]
	member    = record[memberKey, uint32, uint32]
	vipRecord = record[plan.VIP, struct{}, struct{}]
)

// ownedPart is what one Service, or the node, wants.
type ownedPart struct {
	owner   *Owner
	servers []*server
	members []*member
	vips    []*vipRecord
}

// cachedState is what the kernel holds of the node's state, as far as the Reconciler knows.
type cachedState struct {
	link    bool
	rules   map[routing.Rule]struct{}
	sysctls sysctl.State
	nat     map[ip.Family]nat.State

	loopback  nft.Loopback
	kubeProxy nft.KubeProxy
	leftovers leftovers
}

// New returns an Reconciler with an empty cached state.
func New(cfg *plan.Config, kernel Kernel) *Reconciler {
	a := &Reconciler{
		cfg:       cfg,
		kernel:    kernel,
		parts:     map[types.NamespacedName]*ownedPart{},
		servers:   newTable[ipvs.Key, wantedServer, actualServer](),
		members:   newTable[memberKey, uint32, uint32](),
		vips:      newTable[plan.VIP, struct{}, struct{}](),
		sets:      sets{index: map[string]uint16{}},
		conflicts: newConflicts(),
		numbers:   newNumbers(cfg),
		flows:     newFlows(),
		cached:    cachedState{rules: map[routing.Rule]struct{}{}, sysctls: sysctl.State{}, nat: map[ip.Family]nat.State{}},
		marked:    map[ipvs.Key]ipvs.Key{},
		retired:   map[ipvs.Key]ipvs.Key{},
		foreign:   ipvs.State{},
		draining:  map[ipvs.Key]map[netip.AddrPort]time.Time{},
	}
	a.node.own.owner = nodeOwner
	a.members.counted = func(key memberKey, by int) { a.sets.list[key.set].wanted += by }
	return a
}

// Problem is state that could not be programmed.
type Problem struct {
	// Owners are the Services that lack it; empty if it belongs to the node, or to no
	// Service any more.
	Owners []types.NamespacedName
	Err    error
}

// Problems are the problems of one Flush.
type Problems []Problem

// Err joins the errors; nil if there are none.
func (p Problems) Err() error {
	errs := make([]error, len(p))
	for i := range p {
		errs[i] = p[i].Err
	}
	return errors.Join(errs...)
}

// Set replaces the desired state of a Service. Only keys that differ from its previous part
// become dirty. Set assigns the fwmarks of part.Internal and returns the plan with them; the
// error names the addresses and ports without one.
func (a *Reconciler) Set(owner *Owner, part plan.ServicePlan) (plan.ServicePlan, error) {
	part, err := a.assignMarks(owner.Name, part)
	a.set(owner, part)
	return part, err
}

func (a *Reconciler) set(owner *Owner, part plan.ServicePlan) {
	p := a.parts[owner.Name]
	if p == nil {
		p = &ownedPart{}
		a.parts[owner.Name] = p
	}
	if p.owner == nil || !p.owner.Created.Equal(owner.Created) {
		p.owner = owner
	}
	a.setServers(p, part.VirtualServers)
	a.setMembers(p, part.Members)
	p.vips = a.vips.replace(p.owner, p.vips, len(part.VIPs),
		func(i int) entry[plan.VIP, struct{}] { return entry[plan.VIP, struct{}]{key: part.VIPs[i]} },
		func(struct{}, struct{}) bool { return true })
}

// Delete removes the desired state of a Service.
func (a *Reconciler) Delete(name types.NamespacedName) {
	_, _ = a.numbers.assign(name, nil, nil) // never fails: no number is wanted
	if p, ok := a.parts[name]; ok {
		a.set(p.owner, plan.ServicePlan{})
		delete(a.parts, name)
	}
}

func (a *Reconciler) setServers(p *ownedPart, want []plan.VirtualServer) {
	var last []endpoint // the virtual servers of a Service often have the same endpoints
	p.servers = replaceAll(&a.servers, p.owner, p.servers, len(want),
		func(i int) entry[ipvs.Key, wantedServer] {
			value := newWanted(&want[i], last)
			last = value.endpoints
			return entry[ipvs.Key, wantedServer]{want[i].Key, want[i].Precedence, value}
		}, sameWanted,
		func(s *server, e entry[ipvs.Key, wantedServer]) {
			a.adoptForeign(s)
			before := a.servers.owners(s.key)
			a.servers.put(s, p.owner, e.right, e.value)
			a.ownersChanged(s.key, before)
		}, func(s *server) {
			before := a.servers.owners(s.key)
			a.servers.drop(s, p.owner)
			a.ownersChanged(s.key, before)
		})
}

func (a *Reconciler) setMembers(p *ownedPart, want []plan.Member) {
	p.members = a.members.replace(p.owner, p.members, len(want),
		func(i int) entry[memberKey, uint32] {
			return entry[memberKey, uint32]{key: a.sets.key(want[i]), value: want[i].Mark}
		}, func(a, b uint32) bool { return a == b })
}

// ownersChanged marks everything dirty that depends on which Service has a virtual server.
// It is called after the owners of key changed from before.
func (a *Reconciler) ownersChanged(key ipvs.Key, before []types.NamespacedName) {
	owners := a.servers.owners(key)
	a.conflicts.update(key, owners)
	a.markFWMarkServer(key)
	a.markRetired(key)
	if len(before) > 1 || len(owners) > 1 {
		a.markMembersOf(key, owners)
	}
}

// holdServer records that the kernel holds a virtual server.
func (a *Reconciler) holdServer(s *server, is actualServer) {
	if !s.there && s.key.Addr.Is4() {
		a.ipv4Servers++
	}
	a.realServers += len(is.reals) - len(s.actual.reals)
	a.servers.hold(s, is)
}

// loseServer records that the kernel does not hold a virtual server.
func (a *Reconciler) loseServer(s *server) {
	if s.there && s.key.Addr.Is4() {
		a.ipv4Servers--
	}
	a.realServers -= len(s.actual.reals)
	a.servers.lose(s)
}

// setRealServer records that the kernel holds a real server.
func (a *Reconciler) setRealServer(s *server, dest netip.AddrPort, rs ipvs.RealServer) {
	before := len(s.actual.reals)
	s.actual.setRealServer(dest, rs)
	a.realServers += len(s.actual.reals) - before
}

// deleteRealServer records that the kernel does not hold a real server.
func (a *Reconciler) deleteRealServer(s *server, dest netip.AddrPort) {
	before := len(s.actual.reals)
	s.actual.deleteRealServer(dest)
	a.realServers += len(s.actual.reals) - before
}

// actual returns the virtual server that the kernel has under a key; nil if none.
func (a *Reconciler) actual(key ipvs.Key) *actualServer {
	if s := a.servers.records[key]; s != nil && s.there {
		return &s.actual
	}
	return nil
}

// adoptForeign takes over another program's virtual server whose key a Service wants.
func (a *Reconciler) adoptForeign(s *server) {
	if is, ok := a.foreign[s.key]; ok {
		a.holdServer(s, newActual(is))
		delete(a.foreign, s.key)
	}
}

// Retry makes the next Flush retry what the kernel refused to a Service. The zero name
// stands for the node and for keys without an owner.
func (a *Reconciler) Retry(name types.NamespacedName) {
	a.servers.retry(name)
	a.members.retry(name)
	a.vips.retry(name)
	if name == nodeOwner.Name {
		a.flows.failed = false
	}
}

// Held counts our objects in the kernel.
func (a *Reconciler) Held() (virtualServers, realServers, draining int) {
	return a.servers.held, a.realServers, a.Draining()
}
