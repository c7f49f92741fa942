package reconcile

import (
	"errors"
	"iter"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/index"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Reconciler holds the desired state and the cached state of the kernel, and writes the
// difference. It is for one goroutine.
//
// At startup call SetNode, Load and Flush, then Set and Flush for every Service, then Prune
// and Flush. From then on call Flush after changes, Step when it is due (see Next), and Settle
// after both.
type Reconciler struct {
	cfg    *plan.Config
	kernel Kernel

	owned   index.Index[types.NamespacedName, ownedState] // by Service
	servers serverTable
	members memberTable
	vips    vipTable
	sets    sets
	input   nodeInput
	node    nodeState

	conflicts conflicts
	flows     flows
	fwmarks   *markAllocator
	schedule

	realServers int // in the kernel
	ipv4Servers int // IPv4 virtual servers in the kernel

	cached        cachedState                // the node's state in the kernel
	kubeProxyErr  error                      // why kube-proxy's nftables tables could not be read last
	sectionWrites int                        // number of writes that changed it
	inLocal       map[ipvs.Key]ipvs.Key      // fwmark key to address and port, from the members of plan.Local in the kernel
	retired       map[ipvs.Key]ipvs.Key      // likewise for retired virtual servers, from the members of plan.Draining
	foreign       ipvs.State                 // virtual servers of other programs
	unsure        map[ipvs.Key]struct{}      // virtual servers whose addition failed; a failure without an answer may have added them
	wrongScope    map[netip.Addr]struct{}    // addresses that kube-proxy added, with another scope
	staleRoutes   map[routing.Route]struct{} // routes of an earlier configuration
	markUses      []nat.MarkUse              // rules of other programs that use marks
	seen          map[ip.Family]nat.State    // the rules as last observed
	drainer       drainer
	spotChecker   spotChecker
	foundServers  bool           // Load found virtual servers of ours or kube-proxy's
	rulesCurrent  bool           // the rules in the kernel are the plan's
	pruning       bool           // all Services are known: undesired state may be deleted
	vipsRemoved   bool           // desired VIPs were deleted, and are to be claimed again
	uses          plan.SetsInUse // see useSet
}

type (
	serverTable = table[ipvs.Key, wantedServer, cachedServer]
	memberTable = table[memberKey, uint32, uint32] // the values are marks
	vipTable    = table[plan.VIP, struct{}, struct{}]

	server    = record[ipvs.Key, wantedServer, cachedServer]
	member    = record[memberKey, uint32, uint32]
	vipRecord = record[plan.VIP, struct{}, struct{}]
)

// ownedState is what one Service, or the node, wants.
type ownedState struct {
	owner   *Owner
	servers []*server
	members []*member
	vips    []*vipRecord
	deps    plan.Deps // of a Service
}

// cachedState is the cached state of the sections.
type cachedState struct {
	link    bool
	rules   map[routing.Rule]struct{}
	routes  map[routing.Route]struct{} // those that claim no VIP; see plan.NodePlan.Routes
	sysctls sysctl.State
	nat     map[ip.Family]nat.State

	loopback  nft.Loopback
	kubeProxy nft.KubeProxy
	leftovers leftovers
}

// New returns a Reconciler with an empty cached state.
func New(cfg *plan.Config, kernel Kernel, periods Periods) *Reconciler {
	r := &Reconciler{
		cfg:       cfg,
		kernel:    kernel,
		owned:     index.OfNames(func(o *ownedState) types.NamespacedName { return o.owner.Name }),
		servers:   newTable[ipvs.Key, wantedServer, cachedServer](hashServer),
		members:   newTable[memberKey, uint32, uint32](hashMember),
		vips:      newTable[plan.VIP, struct{}, struct{}](hashVIP),
		sets:      sets{index: map[string]uint16{}},
		conflicts: newConflicts(),
		fwmarks:   newMarkAllocator(cfg),
		schedule:  newSchedule(periods),
		uses:      plan.SetsInUse{},
		flows:     newFlows(),
		cached:    cachedState{rules: map[routing.Rule]struct{}{}, routes: map[routing.Route]struct{}{}, sysctls: sysctl.State{}, nat: map[ip.Family]nat.State{}},
		inLocal:   map[ipvs.Key]ipvs.Key{},
		retired:   map[ipvs.Key]ipvs.Key{},
		foreign:   ipvs.State{},
		unsure:    map[ipvs.Key]struct{}{},
		drainer:   drainer{draining: map[ipvs.Key]map[netip.AddrPort]silence{}},
	}
	r.node.own.owner = nodeOwner
	r.members.counted = func(key memberKey, by int) {
		set := r.sets.list[key.set]
		if set.wanted += by; set.wanted > 0 {
			r.useSet(set.name)
		}
	}
	return r
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

// Set replaces the desired state of a Service. Only keys that differ from the state before
// become dirty. Set assigns the fwmarks of desired.Internal; the error names the addresses and
// ports without one.
func (r *Reconciler) Set(owner *Owner, desired plan.ServicePlan) error {
	desired, err := r.assignMarks(owner.Name, desired)
	r.setDesired(owner, desired)
	return err
}

func (r *Reconciler) setDesired(owner *Owner, desired plan.ServicePlan) {
	o := r.owned.Get(owner.Name)
	if o == nil {
		o = &ownedState{owner: owner}
		r.owned.Put(o)
	}
	if !o.owner.Created.Equal(owner.Created) {
		o.owner = owner
	}
	o.deps = desired.Deps
	r.setServers(o, desired.VirtualServers)
	r.setMembers(o, desired.Members)
	if !r.pruning {
		r.setFoundDirty(o)
	}
	o.vips = r.vips.replace(o.owner, o.vips, len(desired.VIPs),
		func(i int) entry[plan.VIP, struct{}] { return entry[plan.VIP, struct{}]{key: desired.VIPs[i]} },
		func(struct{}, struct{}) bool { return true })
}

// Delete removes the desired state of a Service.
func (r *Reconciler) Delete(name types.NamespacedName) {
	_, _ = r.fwmarks.assign(name, nil, nil) // never fails: it requests no fwmark
	r.retries.succeeded(name)
	if o := r.owned.Get(name); o != nil {
		r.setDesired(o.owner, plan.ServicePlan{})
		r.owned.Delete(name)
	}
}

// Services returns the number of Services with a desired state.
func (r *Reconciler) Services() int { return r.owned.Len() }

// Dependencies returns the Services with a desired state, and the facts that it depends on.
func (r *Reconciler) Dependencies() iter.Seq2[types.NamespacedName, plan.Deps] {
	return func(yield func(types.NamespacedName, plan.Deps) bool) {
		for o := range r.owned.All() {
			if !yield(o.owner.Name, o.deps) {
				return
			}
		}
	}
}

func (r *Reconciler) setServers(o *ownedState, want []plan.VirtualServer) {
	var last []endpoint // the virtual servers of a Service often have the same endpoints
	o.servers = replaceAll(&r.servers, o.owner, o.servers, len(want),
		func(i int) entry[ipvs.Key, wantedServer] {
			value := newWanted(&want[i], last)
			last = value.endpoints
			return entry[ipvs.Key, wantedServer]{want[i].Key, want[i].Precedence, value}
		}, sameWanted,
		func(s *server, e entry[ipvs.Key, wantedServer]) {
			r.adoptForeign(s)
			before := r.servers.owners(s.key)
			r.servers.put(s, o.owner, e.precedence, e.value)
			if slices.ContainsFunc(e.value.endpoints, func(e endpoint) bool { return e.Flags&plan.IsUnreachable != 0 }) {
				r.drainAt = time.Time{} // check at once: connections to them may have to be cut
			}
			r.ownersChanged(s.key, before)
		}, func(s *server) {
			before := r.servers.owners(s.key)
			r.servers.drop(s, o.owner)
			r.ownersChanged(s.key, before)
		})
}

func (r *Reconciler) setMembers(o *ownedState, want []plan.Member) {
	o.members = r.members.replace(o.owner, o.members, len(want),
		func(i int) entry[memberKey, uint32] {
			return entry[memberKey, uint32]{key: r.sets.key(want[i]), value: want[i].Mark}
		}, func(a, b uint32) bool { return a == b })
}

// ownersChanged makes everything dirty that depends on which Service has a virtual server.
// It is called after the owners of key changed from before.
func (r *Reconciler) ownersChanged(key ipvs.Key, before []types.NamespacedName) {
	owners := r.servers.owners(key)
	r.conflicts.update(key, owners)
	r.setFWMarkServerDirty(key)
	r.setRetiredDirty(key)
	if len(before) > 1 || len(owners) > 1 {
		r.setMembersDirty(key, owners)
	}
}

// setCachedServer records that the kernel has a virtual server.
func (r *Reconciler) setCachedServer(s *server, is cachedServer) {
	if !s.exists && s.key.Addr.Is4() {
		r.ipv4Servers++
	}
	r.realServers += len(is.reals) - len(s.cached.reals)
	r.servers.setCached(s, is)
}

// clearCachedServer records that the kernel does not have a virtual server.
func (r *Reconciler) clearCachedServer(s *server) {
	if s.exists && s.key.Addr.Is4() {
		r.ipv4Servers--
	}
	r.realServers -= len(s.cached.reals)
	r.drainer.removeAll(s.key)
	place := s.cached.place
	r.servers.clearCached(s)
	s.cached.place = place
}

// setCachedRealServer records that the kernel has a real server.
func (r *Reconciler) setCachedRealServer(s *server, dest netip.AddrPort, rs ipvs.RealServer) {
	before := len(s.cached.reals)
	s.cached.setRealServer(dest, rs)
	r.realServers += len(s.cached.reals) - before
}

// clearCachedRealServer records that the kernel does not have a real server.
func (r *Reconciler) clearCachedRealServer(s *server, dest netip.AddrPort) {
	before := len(s.cached.reals)
	s.cached.deleteRealServer(dest)
	r.realServers += len(s.cached.reals) - before
}

// cachedServer returns the virtual server in the kernel; nil if there is none.
func (r *Reconciler) cachedServer(key ipvs.Key) *cachedServer {
	if s := r.servers.records.Get(key); s != nil && s.exists {
		return &s.cached
	}
	return nil
}

// adoptForeign makes another program's virtual server ours, because a Service wants its key.
func (r *Reconciler) adoptForeign(s *server) {
	if is, ok := r.foreign[s.key]; ok {
		r.setCachedServer(s, newCached(is))
		delete(r.foreign, s.key)
	}
}

// retry makes the next Flush retry what the kernel refused of Services. The zero name stands
// for the node and for keys without an owner.
func (r *Reconciler) retry(names ...types.NamespacedName) {
	due := make(map[types.NamespacedName]bool, len(names))
	for _, name := range names {
		due[name] = true
	}
	r.servers.retry(due)
	r.members.retry(due)
	r.vips.retry(due)
	if due[nodeOwner.Name] {
		r.flows.failed = false
	}
}
