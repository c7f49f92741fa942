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

// Applier holds the desired state and the cached state of the kernel, and writes the
// difference. It is for one goroutine; only the function that BeginObserve returns, and
// Concerns, may run concurrently.
//
// At startup call SetNode, BeginObserve and Adopt, Flush, then Set and Flush for every
// Service, then Sweep and Flush.
type Applier struct {
	cfg    *plan.Config
	kernel Kernel

	parts        map[types.NamespacedName]ownedPart
	servers      table[ipvs.Key, *plan.VirtualServer]
	members      table[plan.Member, uint32] // by member without its mark, which is the value
	memberCounts map[string]int             // desired members of each set
	vips         table[plan.VIP, struct{}]
	node         nodePart

	conflicts conflicts
	flows     flows

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
	toCheck       []ipvs.Key                                // virtual servers that this round of Suspicious has not checked yet
	touched       *touched                                  // written since BeginObserve; nil when no observation runs
	rules         atomic.Pointer[nat.Owned]                 // for Concerns
	failedSets    map[string]bool                           // sets that the kernel refuses to create, for example because it lacks their type
	rulesCurrent  bool                                      // the rules in the kernel are the plan's
	pruning       bool                                      // all Services are known: undesired state may be deleted
}

// ownedPart is the desired state of one Service.
type ownedPart struct {
	owner *Owner
	part  plan.ServicePlan
}

// cachedState is what the kernel holds of ours, as far as the Applier knows.
type cachedState struct {
	servers     ipvs.State // changed only by setServer and deleteServer
	realServers int        // real servers of all virtual servers
	ipv4Servers int        // IPv4 virtual servers in servers
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

// New returns an Applier with an empty cached state.
func New(cfg *plan.Config, kernel Kernel) *Applier {
	a := &Applier{
		cfg:          cfg,
		kernel:       kernel,
		parts:        map[types.NamespacedName]ownedPart{},
		servers:      newTable[ipvs.Key, *plan.VirtualServer](),
		members:      newTable[plan.Member, uint32](),
		vips:         newTable[plan.VIP, struct{}](),
		conflicts:    newConflicts(),
		flows:        newFlows(),
		cached:       cachedState{servers: ipvs.State{}, sets: ipset.State{}, vips: map[plan.VIP]struct{}{}, rules: map[routing.Rule]struct{}{}, sysctls: sysctl.State{}, nat: map[ip.Family]nat.State{}},
		marked:       map[ipvs.Key]ipvs.Key{},
		retired:      map[ipvs.Key]ipvs.Key{},
		memberCounts: map[string]int{},
		foreign:      ipvs.State{},
		failedSets:   map[string]bool{},
		draining:     map[ipvs.Key]map[netip.AddrPort]time.Time{},
	}
	a.members.counted = a.countMember
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
// become dirty.
func (a *Applier) Set(owner *Owner, part plan.ServicePlan) {
	old := a.parts[owner.Name].part
	a.parts[owner.Name] = ownedPart{owner, part}
	a.setServers(owner, old.VirtualServers, part.VirtualServers)
	setAll(&a.members, owner, old.Members, part.Members, unmarked)
	setAll(&a.vips, owner, old.VIPs, part.VIPs, func(vip plan.VIP) (plan.VIP, struct{}) { return vip, struct{}{} })
}

// Delete removes the desired state of a Service.
func (a *Applier) Delete(name types.NamespacedName) {
	if p, ok := a.parts[name]; ok {
		a.Set(p.owner, plan.ServicePlan{})
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
			a.servers.put(vs.Key, owner, vs.Precedence, vs)
			a.ownersChanged(vs.Key, before)
		}
		delete(before, vs.Key)
	}
	for key := range before {
		owners := a.servers.owners(key)
		a.servers.drop(key, owner)
		a.ownersChanged(key, owners)
	}
}

// ownersChanged marks everything dirty that depends on which Service has a virtual server.
// It is called after the owners of key changed from before.
func (a *Applier) ownersChanged(key ipvs.Key, before []types.NamespacedName) {
	owners := a.servers.owners(key)
	a.conflicts.update(key, owners)
	a.markFWMarkServer(key)
	a.markRetired(key)
	if len(before) > 1 || len(owners) > 1 {
		a.markMembersOf(key, owners)
	}
}

func sameServer(a, b *plan.VirtualServer) bool {
	return a.Precedence == b.Precedence && a.VirtualServer == b.VirtualServer && a.MaxConnections == b.MaxConnections && slices.Equal(a.RealServers, b.RealServers) &&
		slices.Equal(a.Endpoints, b.Endpoints) && slices.Equal(a.Lost, b.Lost)
}

func (c *cachedState) setServer(key ipvs.Key, s ipvs.Service, realServersBefore int) {
	if _, there := c.servers[key]; !there && key.Addr.Is4() {
		c.ipv4Servers++
	}
	c.servers[key] = s
	c.realServers += len(s.RealServers) - realServersBefore
}

func (c *cachedState) deleteServer(key ipvs.Key) {
	s, there := c.servers[key]
	if !there {
		return
	}
	if key.Addr.Is4() {
		c.ipv4Servers--
	}
	delete(c.servers, key)
	c.realServers -= len(s.RealServers)
}

// adoptForeign takes over another program's virtual server whose key a Service wants.
func (a *Applier) adoptForeign(key ipvs.Key) {
	if s, ok := a.foreign[key]; ok {
		a.cached.setServer(key, s, 0)
		delete(a.foreign, key)
	}
}

// setAll puts and drops the entries in which two lists differ. entry splits a list element
// into key and value.
func setAll[E any, K, V comparable](t *table[K, V], owner *Owner, old, want []E, entry func(E) (K, V)) {
	before := make(map[K]V, len(old))
	for _, e := range old {
		k, v := entry(e)
		before[k] = v
	}
	for _, e := range want {
		k, v := entry(e)
		if was, ok := before[k]; !ok || was != v {
			t.put(k, owner, 0, v)
		}
		delete(before, k)
	}
	for k := range before {
		t.drop(k, owner)
	}
}

// unmarked splits a member into the member without its mark, and the mark.
func unmarked(m plan.Member) (plan.Member, uint32) {
	mark := m.Mark
	m.Mark = 0
	return m, mark
}

// Retry makes the next Flush retry what the kernel refused to a Service. The zero name
// stands for the node and for keys without an owner.
func (a *Applier) Retry(name types.NamespacedName) {
	a.servers.retry(name)
	a.members.retry(name)
	a.vips.retry(name)
	if name == nodeOwner.Name {
		a.flows.failed = false
	}
}

// Held counts our objects in the kernel.
func (a *Applier) Held() (virtualServers, realServers, draining int) {
	return len(a.cached.servers), a.cached.realServers, a.Draining()
}
