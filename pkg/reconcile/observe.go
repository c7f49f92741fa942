package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Parts says what an observation reads. Sysctls are always read.
type Parts struct {
	State bool // virtual servers, sets, and what package routing knows
	Rules bool // iptables and nftables, which need a program to read them
}

// Everything reads all parts.
var Everything = Parts{State: true, Rules: true}

// Observation is the observed state of the kernel.
type Observation struct {
	parts   Parts
	servers ipvs.State
	sets    ipset.State
	routing routing.State
	sysctls sysctl.State
	nat     map[ip.Family]nat.State

	loopback  nft.Loopback
	kubeProxy nft.KubeProxy
	leftovers leftovers

	vips        map[plan.VIP]struct{}      // from routing
	staleRoutes map[routing.Route]struct{} // our routes that claim no VIP as configured now
}

// BeginObserve returns a function that observes everything. The function may run in another
// goroutine while Set and Flush are called; pass its result to Adopt.
func (a *Reconciler) BeginObserve() func() (*Observation, error) {
	return a.BeginObserveParts(Everything)
}

// BeginObserveParts is BeginObserve for some parts. Parts that are not read keep their
// cached state. The first observation must read everything.
func (a *Reconciler) BeginObserveParts(parts Parts) func() (*Observation, error) {
	a.servers.beginObserve()
	a.members.beginObserve()
	a.vips.beginObserve()
	r := reader{
		parts:   parts,
		cfg:     a.cfg,
		kernel:  a.kernel,
		sets:    setNames(a.cfg),
		sysctls: slices.Concat(slices.Sorted(maps.Keys(a.node.Sysctls)), a.node.Watched),
		nat:     ownedRules(&a.node.NodePlan),
	}
	return r.observe
}

// reader is what an observation needs to know, copied from the Reconciler.
type reader struct {
	parts   Parts
	cfg     *plan.Config
	kernel  Kernel
	sets    map[string]bool
	sysctls []string
	nat     nat.Owned
}

// observe reads all parts of the kernel concurrently, because some wait for a program. If
// any part cannot be read it fails: a failed read must never be taken for empty state. The
// exception are sysctls: an unreadable one is written, and the write reports the error.
func (r reader) observe() (*Observation, error) {
	o := Observation{parts: r.parts, nat: map[ip.Family]nat.State{}}
	reads := []func() error{func() error { o.sysctls = r.readSysctls(); return nil }}
	if r.parts.State {
		reads = append(reads, r.stateReads(&o)...)
	}
	if r.parts.Rules {
		reads = append(reads, r.rulesReads(&o)...)
	}
	if err := parallel(reads); err != nil {
		return nil, fmt.Errorf("reading the kernel's state: %w", err)
	}
	o.vips, o.staleRoutes = vipsIn(r.cfg, &o.routing)
	return &o, nil
}

func (r reader) stateReads(o *Observation) []func() error {
	return []func() error{
		func() (err error) { o.servers, err = r.kernel.IPVS.Observe(); return err },
		func() (err error) {
			o.sets, err = r.kernel.IPSet.Observe(func(name string) bool { return r.sets[name] })
			return err
		},
		func() (err error) { o.routing, err = r.kernel.Routing.Observe(); return err },
	}
}

func (r reader) rulesReads(o *Observation) []func() error {
	var reads []func() error
	var mu sync.Mutex // of the map
	for family, k := range r.kernel.NAT {
		reads = append(reads, func() error {
			s, err := k.Observe(r.nat)
			mu.Lock()
			defer mu.Unlock()
			o.nat[family] = s
			return err
		})
	}
	reads = append(reads, func() error { o.leftovers = r.readLeftovers(); return nil })
	if k := r.kernel.Loopback; k != nil {
		reads = append(reads, func() (err error) { o.loopback, err = k.Observe(); return err })
	}
	if k := r.kernel.KubeProxy; k != nil {
		reads = append(reads, func() (err error) { o.kubeProxy, err = k.Observe(); return err })
	}
	return reads
}

// vipsIn returns the VIPs of the served families that addresses and routes claim, and the
// stale routes of another configuration, for example with another table.
func vipsIn(cfg *plan.Config, s *routing.State) (vips map[plan.VIP]struct{}, staleRoutes map[routing.Route]struct{}) {
	vips, staleRoutes = map[plan.VIP]struct{}{}, map[routing.Route]struct{}{}
	for _, addresses := range []map[netip.Addr]struct{}{s.Addresses, s.Misbound} {
		for addr := range addresses {
			if servesFamily(cfg, ip.Of(addr)) && !excluded(cfg, addr) {
				vips[plan.VIP{Addr: addr, Claim: plan.ClaimAddress}] = struct{}{}
			}
		}
	}
	for r := range s.Routes {
		if !servesFamily(cfg, r.Family) {
			continue
		}
		if vip, ok := vipOf(cfg, r); ok {
			vips[vip] = struct{}{}
		} else {
			staleRoutes[r] = struct{}{}
		}
	}
	return vips, staleRoutes
}

// vipOf returns the VIP that a route claims.
func vipOf(cfg *plan.Config, r routing.Route) (plan.VIP, bool) {
	for _, claim := range []plan.ClaimMode{plan.ClaimPort, plan.ClaimRoute} {
		vip := plan.VIP{Addr: r.Dst.Addr(), Claim: claim}
		if own, _ := cfg.VIPs.Route(vip); r == own {
			return vip, true
		}
	}
	return plan.VIP{}, false
}

// servesFamily reports whether a family is served. State of another family is not read,
// compared or removed.
func servesFamily(cfg *plan.Config, family ip.Family) bool {
	return slices.Contains(cfg.Families, family)
}

func excluded(cfg *plan.Config, addr netip.Addr) bool {
	return slices.ContainsFunc(cfg.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// parallel runs functions concurrently, and joins their errors in order.
func parallel(do []func() error) error {
	errs := make([]error, len(do))
	var all sync.WaitGroup
	for i, f := range do {
		all.Go(func() { errs[i] = f() })
	}
	all.Wait()
	return errors.Join(errs...)
}

func (r reader) readSysctls() sysctl.State {
	out := sysctl.State{}
	for _, key := range r.sysctls {
		if s, err := r.kernel.Sysctl.Observe([]string{key}); err == nil {
			out[key] = s[key]
		}
	}
	return out
}

func setNames(cfg *plan.Config) map[string]bool {
	names := map[string]bool{}
	for _, family := range cfg.Families {
		for _, s := range plan.Sets(family) {
			names[s.Name], names[ipset.TemporaryName(s.Name)] = true, true
		}
	}
	return names
}

// FilledSets returns the names of the sets that have members in the kernel.
func (a *Reconciler) FilledSets() []string {
	var names []string
	for _, set := range a.sets.list {
		if set.held > 0 {
			names = append(names, set.name)
		}
	}
	return names
}

// WantedSets returns the sets in which a Service or the node wants a member.
func (a *Reconciler) WantedSets() plan.SetsInUse {
	sets := plan.SetsInUse{}
	for _, set := range a.sets.list {
		if set.wanted > 0 {
			sets[set.name] = true
		}
	}
	return sets
}

// CountWantedSets returns the number of WantedSets, without building the map.
func (a *Reconciler) CountWantedSets() int {
	n := 0
	for _, set := range a.sets.list {
		if set.wanted > 0 {
			n++
		}
	}
	return n
}

// nodeDifferences returns how many of the node's objects are missing or stale.
func (a *Reconciler) nodeDifferences() int {
	n := len(sysctl.Diff(a.cached.sysctls, a.node.Sysctls)) + len(nft.DiffLoopback(a.cached.loopback, a.node.Loopback))
	if !a.cached.link {
		n++
	}
	for _, s := range a.node.Sets {
		if set := a.sets.get(s.Name); !set.exists && !set.failed {
			n++
		}
	}
	rules := len(a.cached.rules)
	for _, r := range a.node.Rules {
		if _, there := a.cached.rules[r]; there {
			rules--
		} else {
			n++
		}
	}
	for family := range a.kernel.NAT {
		n += len(nat.Diff(a.cached.nat[family], ofFamily(a.node.NAT, family)))
	}
	if a.pruning {
		n += a.cached.leftovers.count()
	}
	return n + rules + len(a.staleRoutes)
}

// Seen returns the foreign state that the last observation found, and the sysctls as set
// since.
func (a *Reconciler) Seen() plan.Foreign {
	return plan.Foreign{Marks: a.marks, Sysctls: a.cached.sysctls, Rules: a.seen, Unseen: a.unseen()}
}

// ours reports whether a virtual server is ours: one of our sets lists its address and port,
// or its fwmark. Members are written before the virtual server and deleted after it, so this
// holds after a crash too. All other virtual servers (keepalived's, for example) are foreign
// and never changed.
func (a *Reconciler) ours(key ipvs.Key) bool {
	address, known := a.addressOf(key)
	if key.FWMark != 0 {
		return known && !excluded(a.cfg, address.Addr)
	}
	return !excluded(a.cfg, key.Addr) && a.listed(key)
}

// owning are the sets whose members prove that a virtual server is ours.
var owning = []plan.SetName{plan.ClusterIP, plan.LoadBalancer, plan.ExternalIP, plan.ExternalIPLocal, plan.NodePorts}

// listed reports whether a set lists an address and port. On a node taken over from
// kube-proxy, node ports are listed by port alone.
func (a *Reconciler) listed(key ipvs.Key) bool {
	family := key.Family()
	has := func(name plan.SetName, e ipset.Entry) bool {
		return a.members.holds(a.sets.key(plan.Member{Set: name.In(family), Entry: e}))
	}
	full := entryOf(key)
	for _, name := range owning {
		if has(name, full) {
			return true
		}
	}
	if a.sets.get(plan.NodePorts.In(family)).exists {
		return false
	}
	port := ipset.Entry{Port: key.Port}
	switch key.Protocol {
	case ip.TCP:
		return has(plan.NodePortTCP, port)
	case ip.UDP:
		return has(plan.NodePortUDP, port)
	}
	return has(plan.NodePortSCTP, full)
}

// rebind treats desired addresses that kube-proxy bound, with another scope, as missing, so
// that they are bound again. Undesired ones are deleted like any other stale address.
func (a *Reconciler) rebind() {
	for addr := range a.wrongScope {
		if v := a.vips.records[plan.VIP{Addr: addr, Claim: plan.ClaimAddress}]; v != nil && v.wanted() {
			a.vips.lose(v)
		}
	}
}

// Sweep declares that every Service is known: from now on undesired state is deleted. This
// includes UDP flows that an earlier process did not delete before it ended. Desired state
// was compared when it was set.
func (a *Reconciler) Sweep() {
	a.pruning = true
	a.rebind()
	for s := range a.servers.allHeld() {
		a.markFlowsStale(s.key)
		if !s.wanted() {
			a.servers.setDirty(s, true)
		}
	}
	for m := range a.members.allHeld() {
		if _, known := a.node.sets[a.sets.list[m.key.set].name]; !known {
			continue // the whole set is destroyed
		}
		if _, wanted := a.wantMember(m); !wanted {
			a.members.setDirty(m, true)
		}
	}
	for _, v := range a.vips.list() {
		a.vips.setDirty(v, v.wanted() != v.there)
	}
}
