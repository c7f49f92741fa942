package apply

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
	"github.com/kube-ipvs/kube-ipvs/pkg/kubeproxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Parts says what an observation reads. Kernel parameters are always read.
type Parts struct {
	State bool // virtual servers, sets, and what package routing knows
	Rules bool // what takes a program to read: iptables and nftables
}

// Everything is all parts.
var Everything = Parts{State: true, Rules: true}

// Observation is what the kernel held when it was read.
type Observation struct {
	parts   Parts
	servers ipvs.State
	sets    ipset.State
	routing routing.State
	sysctls sysctl.State
	nat     map[ip.Family]nat.State

	loopback  loopback.State
	kubeProxy kubeproxy.State
	leftovers leftovers

	vips   map[plan.VIP]struct{}      // those in routing
	strays map[routing.Route]struct{} // of ours in routing that claim no VIP as configured
}

// touched lists what was written while the kernel was being read: of this,
// the reading may be older than the writing. A nil one lists nothing.
type touched struct {
	servers map[ipvs.Key]struct{}
	members map[plan.Member]struct{}
	vips    map[plan.VIP]struct{}
}

func (t *touched) server(k ipvs.Key) {
	if t != nil {
		t.servers[k] = struct{}{}
	}
}

func (t *touched) member(m plan.Member) {
	if t != nil {
		t.members[m] = struct{}{}
	}
}

func (t *touched) vip(v plan.VIP) {
	if t != nil {
		t.vips[v] = struct{}{}
	}
}

// BeginObserve prepares for an Observe of everything, and returns it. The function may
// run in another goroutine, while Set and Flush go on; its result goes to Adopt.
func (a *Applier) BeginObserve() func() (*Observation, error) { return a.BeginObserveParts(Everything) }

// BeginObserveParts does the same for some parts. What is not read is taken to be as it
// was when it was last written or read; at first, everything must be read.
func (a *Applier) BeginObserveParts(parts Parts) func() (*Observation, error) {
	a.touched = &touched{
		servers: map[ipvs.Key]struct{}{},
		members: map[plan.Member]struct{}{},
		vips:    map[plan.VIP]struct{}{},
	}
	r := reader{
		parts:   parts,
		cfg:     a.cfg,
		kernel:  a.kernel,
		sets:    setNames(a.cfg),
		sysctls: slices.Concat(slices.Sorted(maps.Keys(a.node.Sysctls)), a.node.Watched),
		nat:     own(&a.node.NodePart),
	}
	return r.observe
}

// reader knows what of the kernel is to be read.
type reader struct {
	parts   Parts
	cfg     *plan.Config
	kernel  Kernel
	sets    map[string]bool
	sysctls []string
	nat     nat.Own
}

// observe reads the kernel, all its parts at once: some take a program, and to
// wait for one costs nothing. If any part cannot be read nothing is known:
// a list that could not be read must never pass for an empty one. The
// exception is a sysctl, which then is written, and that tells what is wrong.
func (r reader) observe() (*Observation, error) {
	o := Observation{parts: r.parts, nat: map[ip.Family]nat.State{}}
	reads := []func() error{func() error { o.sysctls = r.readSysctls(); return nil }}
	if r.parts.State {
		reads = append(reads, r.stateReads(&o)...)
	}
	if r.parts.Rules {
		reads = append(reads, r.rulesReads(&o)...)
	}
	if err := together(reads); err != nil {
		return nil, fmt.Errorf("reading the kernel's state: %w", err)
	}
	o.vips, o.strays = vipsIn(r.cfg, &o.routing)
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

// vipsIn returns the VIPs of the served families that addresses and routes
// claim, and the routes that another configuration has left, such as one with
// another table.
func vipsIn(cfg *plan.Config, s *routing.State) (vips map[plan.VIP]struct{}, strays map[routing.Route]struct{}) {
	vips, strays = map[plan.VIP]struct{}{}, map[routing.Route]struct{}{}
	for _, addresses := range []map[netip.Addr]struct{}{s.Addresses, s.Misbound} {
		for addr := range addresses {
			if serves(cfg, ip.Of(addr)) && !excluded(cfg, addr) {
				vips[plan.VIP{Addr: addr, Claim: plan.ClaimAddress}] = struct{}{}
			}
		}
	}
	for r := range s.Routes {
		if !serves(cfg, r.Family) {
			continue
		}
		if vip, ok := vipOf(cfg, r); ok {
			vips[vip] = struct{}{}
		} else {
			strays[r] = struct{}{}
		}
	}
	return vips, strays
}

// vipOf returns the VIP that a route claims.
func vipOf(cfg *plan.Config, r routing.Route) (plan.VIP, bool) {
	for _, claim := range []plan.Claim{plan.ClaimPort, plan.ClaimRoute} {
		vip := plan.VIP{Addr: r.Dst.Addr(), Claim: claim}
		if own, _ := cfg.VIPs.Route(vip); r == own {
			return vip, true
		}
	}
	return plan.VIP{}, false
}

// serves reports whether a family is served. What there is of another one is not
// read, not compared and not removed.
func serves(cfg *plan.Config, family ip.Family) bool { return slices.Contains(cfg.Families, family) }

func excluded(cfg *plan.Config, addr netip.Addr) bool {
	return slices.ContainsFunc(cfg.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// together does several things at once, and joins their errors in their order.
func together(do []func() error) error {
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
func (a *Applier) FilledSets() []string {
	var names []string
	for name, set := range a.have.sets {
		if len(set.Entries) > 0 {
			names = append(names, name)
		}
	}
	return names
}

// WantedSets returns the sets that a Service or the node wants a member in.
func (a *Applier) WantedSets() plan.SetsInUse {
	sets := make(plan.SetsInUse, len(a.wanted))
	for name := range a.wanted {
		sets[name] = true
	}
	return sets
}

// CountWantedSets returns how many there are, at no cost.
func (a *Applier) CountWantedSets() int { return len(a.wanted) }

// countMember keeps count of the wanted members of each set.
func (a *Applier) countMember(m plan.Member, by int) {
	if a.wanted[m.Set] += by; a.wanted[m.Set] == 0 {
		delete(a.wanted, m.Set)
	}
}

// nodeDifferences counts what of the node's part is not there, or not wanted.
func (a *Applier) nodeDifferences() int {
	n := len(sysctl.Diff(a.have.sysctls, a.node.Sysctls)) + len(loopback.Diff(a.have.loopback, a.node.Loopback))
	if !a.have.link {
		n++
	}
	for _, s := range a.node.Sets {
		if _, there := a.have.sets[s.Name]; !there && !a.lost[s.Name] {
			n++
		}
	}
	rules := len(a.have.rules)
	for _, r := range a.node.Rules {
		if _, there := a.have.rules[r]; there {
			rules--
		} else {
			n++
		}
	}
	for family := range a.kernel.NAT {
		n += len(nat.Diff(a.have.nat[family], ofFamily(a.node.NAT, family)))
	}
	if a.swept {
		n += a.have.leftovers.count()
	}
	return n + rules + len(a.strays)
}

// Seen is what the last observation found of others' doing, with the
// parameters as they were set since.
func (a *Applier) Seen() plan.Seen {
	return plan.Seen{Marks: a.marks, Sysctls: a.have.sysctls, Rules: a.seen, Unseen: a.unseen()}
}

// ours reports whether a virtual server is ours: whether one of our sets lists its
// address and port, or its mark. Members are written before the virtual server and
// deleted after it, so that a crash leaves no doubt. All others (keepalived's, say)
// are never touched.
func (a *Applier) ours(key ipvs.Key) bool {
	address, known := a.serves(key)
	if key.FWMark != 0 {
		return known && !excluded(a.cfg, address.Addr)
	}
	return !excluded(a.cfg, key.Addr) && listed(key, a.have.sets)
}

// owning are the sets whose members say that a virtual server is ours.
var owning = []plan.SetName{plan.ClusterIP, plan.LoadBalancer, plan.ExternalIP, plan.ExternalIPLocal, plan.NodePorts}

// listed looks for an address and port. kube-proxy, whose node we may be
// taking over, lists node ports by the port alone.
func listed(key ipvs.Key, sets ipset.State) bool {
	family := key.Family()
	has := func(name plan.SetName, e ipset.Entry) bool {
		_, ok := sets[name.In(family)].Entries[e]
		return ok
	}
	full := entryOf(key)
	for _, name := range owning {
		if has(name, full) {
			return true
		}
	}
	if _, own := sets[plan.NodePorts.In(family)]; own {
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

// rebind has addresses bound anew that kube-proxy has bound, with another scope,
// once it is known that they are wanted. What is not wanted of them goes.
func (a *Applier) rebind() {
	for addr := range a.misbound {
		vip := plan.VIP{Addr: addr, Claim: plan.ClaimAddress}
		if _, wanted := a.vips.want(vip); wanted {
			delete(a.have.vips, vip)
		}
	}
}

// Sweep says that every Service is known from now on: what nobody wants is
// to go. So are flows of which a process before this one ended before it had
// them forgotten. What is wanted has been compared as it came.
func (a *Applier) Sweep() {
	a.swept = true
	for key := range a.have.servers {
		a.mayBeStale(key)
	}
	a.rebind()
	a.markVIPs()
	a.markUnwanted()
}

func (a *Applier) markVIPs() {
	for vip := range a.vips.claims {
		_, there := a.have.vips[vip]
		a.vips.compared(vip, !there)
	}
}

// markUnwanted marks what is there and not wanted.
func (a *Applier) markUnwanted() {
	for key := range a.have.servers {
		if _, wanted := a.servers.want(key); !wanted {
			a.servers.compared(key, true)
		}
	}
	for name, set := range a.have.sets {
		if _, known := a.node.sets[name]; !known {
			continue // it goes as a whole
		}
		for e := range set.Entries {
			m := plan.Member{Set: name, Entry: e}
			if _, wanted := a.wantMember(m); !wanted {
				a.members.compared(m, true)
			}
		}
	}
	for vip := range a.have.vips {
		if _, wanted := a.vips.want(vip); !wanted {
			a.vips.compared(vip, true)
		}
	}
}
