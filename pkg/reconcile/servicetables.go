package reconcile

import (
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/index"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// serviceTables is the desired and the cached state that Services own, with its indexes. It decides
// what is desired and dirty, and writes nothing. Its own methods need several of its parts; those that
// need only one are methods of that part.
type serviceTables struct {
	cfg *plan.Config

	owned   index.Index[types.NamespacedName, ownedState] // by Service
	servers serverTable
	members memberTable
	vips    vipTable
	sets    *sets

	marks     markIndex
	allocator *markAllocator
	conflicts conflicts
	flows     flows
	drainer   drainer

	// These determine the stage.
	foundServers bool // Load found virtual servers of ours or kube-proxy's
	rulesCurrent bool // the rules in the kernel are the plan's, no earlier ones; see detectCurrentRules
	pruning      bool // Prune was called: all Services are known, so undesired state is deleted
}

type (
	server    = record[ipvs.Key, wantedServer, cachedServer]
	member    = record[memberKey, uint32, uint32]
	vipRecord = record[plan.VIP, struct{}, struct{}]
)

// ownedState lists the records that one Service, or the node, wants.
type ownedState struct {
	owner   *Owner
	servers []*server
	members []*member
	vips    []*vipRecord
	deps    plan.Deps // of a Service
}

func newServiceTables(cfg *plan.Config) *serviceTables {
	t := &serviceTables{
		cfg:       cfg,
		owned:     index.OfNames(func(o *ownedState) types.NamespacedName { return o.owner.Name }),
		sets:      &sets{index: map[string]uint16{}, uses: plan.SetsInUse{}},
		allocator: newMarkAllocator(cfg),
		conflicts: newConflicts(),
		flows:     newFlows(),
		drainer:   drainer{draining: map[ipvs.Key][]drainingServer{}},
	}
	t.servers = serverTable{
		table:   newTable[ipvs.Key, wantedServer, cachedServer](hashServer),
		foreign: ipvs.State{}, unsure: map[ipvs.Key]struct{}{},
	}
	t.members = memberTable{table: newTable[memberKey, uint32, uint32](hashMember), sets: t.sets}
	t.vips = vipTable{table: newTable[plan.VIP, struct{}, struct{}](hashVIP), cfg: cfg, members: &t.members}
	t.marks = markIndex{
		cfg: cfg, servers: &t.servers, members: &t.members,
		inLocal: map[ipvs.Key]ipvs.Key{}, retired: map[ipvs.Key]ipvs.Key{},
	}
	t.members.counted = func(key memberKey, by int) {
		set := t.sets.list[key.set]
		if set.wanted += by; set.wanted > 0 {
			t.sets.use(set.name)
		}
	}
	t.vips.counted = func(key plan.VIP, _ int) {
		if key.Claim == plan.ClaimPort {
			t.portClaimChanged(key.Addr)
		}
	}
	return t
}

func (t *serviceTables) setDesired(owner *Owner, desired plan.ServicePlan) {
	o := t.owned.Get(owner.Name)
	if o == nil {
		o = &ownedState{owner: owner}
		t.owned.Put(o)
	}
	if !o.owner.Created.Equal(owner.Created) { // the Service was deleted and created again
		o.owner = owner
	}
	o.deps = desired.Deps
	t.setServers(o, desired.VirtualServers)
	t.setMembers(o, desired.Members)
	if !t.pruning {
		t.setFoundDirty(o)
	}
	o.vips = t.vips.replace(o.owner, o.vips, len(desired.VIPs),
		func(i int) entry[plan.VIP, struct{}] {
			return entry[plan.VIP, struct{}]{key: desired.VIPs[i], precedence: precedenceOf(desired, desired.VIPs[i].Addr)}
		},
		func(struct{}, struct{}) bool { return true })
}

// precedenceOf returns the highest precedence that a plan has at an address.
func precedenceOf(desired plan.ServicePlan, a netip.Addr) plan.Precedence {
	highest := plan.FromSpec
	for i := range desired.VirtualServers {
		if vs := &desired.VirtualServers[i]; vs.Key.Addr == a {
			highest = min(highest, vs.Precedence)
		}
	}
	return highest
}

func (t *serviceTables) setServers(o *ownedState, want []plan.VirtualServer) {
	var last []endpoint // the virtual servers of a Service often have the same endpoints
	o.servers = replaceAll(&t.servers.table, o.owner, o.servers, len(want),
		func(i int) entry[ipvs.Key, wantedServer] {
			value := newWanted(&want[i], last)
			last = value.endpoints
			return entry[ipvs.Key, wantedServer]{want[i].Key, want[i].Precedence, value}
		}, sameWanted,
		func(s *server, e entry[ipvs.Key, wantedServer]) {
			t.servers.adoptForeign(s)
			before := t.servers.owners(s.key)
			t.servers.put(s, o.owner, e.precedence, e.value)
			if slices.ContainsFunc(e.value.endpoints, func(e endpoint) bool { return e.Flags&plan.IsUnreachable != 0 }) {
				t.drainer.checkAt = time.Time{} // check at once: connections to them may have to be cut
			}
			t.ownersChanged(s.key, before)
		}, func(s *server) {
			before := t.servers.owners(s.key)
			t.servers.drop(s, o.owner)
			t.ownersChanged(s.key, before)
		})
}

func (t *serviceTables) setMembers(o *ownedState, want []plan.Member) {
	o.members = t.members.replace(o.owner, o.members, len(want),
		func(i int) entry[memberKey, uint32] {
			return entry[memberKey, uint32]{key: t.sets.key(want[i]), value: want[i].Mark}
		}, func(a, b uint32) bool { return a == b })
}

// ownersChanged makes everything dirty that depends on which Service has a virtual server.
// It is called after the owners of key changed from before.
func (t *serviceTables) ownersChanged(key ipvs.Key, before []types.NamespacedName) {
	owners := t.servers.owners(key)
	t.conflicts.update(key, owners)
	t.marks.setServerDirty(key)
	t.marks.setRetiredDirty(key)
	if len(before) > 1 || len(owners) > 1 {
		t.setMembersDirty(key, owners)
	}
}

// clearCachedServer records that the kernel has neither a virtual server nor its draining real
// servers.
func (t *serviceTables) clearCachedServer(s *server) {
	t.drainer.removeAll(s.key)
	t.servers.clearCached(s)
}

// retry makes the next Flush retry what the kernel refused of Services. The zero name stands
// for the node and for keys without an owner.
func (t *serviceTables) retry(names ...types.NamespacedName) {
	due := make(map[types.NamespacedName]bool, len(names))
	for _, name := range names {
		due[name] = true
	}
	t.servers.retry(due)
	t.members.retry(due)
	t.vips.retry(due)
	if due[nodeOwner.Name] {
		t.flows.failed = false
	}
}
