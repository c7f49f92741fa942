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

// extent says what an observation reads. Sysctls are always read.
type extent struct {
	servers bool // virtual servers
	sets    bool // only together with virtual servers: members prove which of these are ours
	routing bool // the link, VIPs, routes and policy rules, whose deletion package routing reports
	rules   bool // iptables and nftables, which need a program to read them
}

// state are the parts whose size depends on the number of Services.
var state = extent{servers: true, sets: true}

var everything = extent{servers: true, sets: true, routing: true, rules: true}

// with returns the parts of both.
func (e extent) with(f extent) extent {
	return extent{e.servers || f.servers, e.sets || f.sets, e.routing || f.routing, e.rules || f.rules}
}

// observation is the observed state of the kernel.
type observation struct {
	extent  extent
	writes  int // nodeSections.sectionWrites when it began
	servers ipvs.State
	sets    ipset.State
	routing routing.State
	sysctls sysctl.State
	nat     map[ip.Family]nat.State

	loopback     nft.Loopback
	kubeProxy    nft.KubeProxy
	kubeProxyErr error // why kubeProxy is unknown
	native       []nft.MarkUse
	nativeErr    error // why native is unknown
	leftovers    leftovers

	ownedRoutes // from routing
}

// beginObserve returns a function that observes parts of the kernel. The function may run in
// another goroutine while Set and Flush are called; pass its result to beginResync. Parts that
// are not read keep their cached state. The first observation must read everything.
func (r *Reconciler) beginObserve(what extent) func() (*observation, error) {
	r.servers.beginObserve()
	r.members.beginObserve()
	r.vips.beginObserve()
	read := reader{
		extent:  what,
		writes:  r.sectionWrites,
		cfg:     r.cfg,
		kernel:  r.kernel,
		sets:    setNames(r.cfg),
		sysctls: slices.Concat(slices.Sorted(maps.Keys(r.node.Sysctls)), r.node.Watched),
		nat:     ownedRules(&r.node.NodePlan, r.possibleJumps),
	}
	return read.observe
}

// reader is what an observation needs to know, copied from the nodeSections.
type reader struct {
	extent  extent
	writes  int
	cfg     *plan.Config
	kernel  Kernel
	sets    map[string]bool
	sysctls []string
	nat     nat.Owned
}

// observe reads all parts of the kernel concurrently, because some wait for a program. If
// any part cannot be read it fails: a failed read must never be taken for empty state. There are
// three exceptions. An unreadable sysctl is written, and the write reports the error. Unreadable
// leftovers of kube-proxy are recorded (leftovers.unread, kubeProxyErr) and left unchanged. If
// nftables rules of other programs cannot be read (nativeErr), those of the last read count.
func (r reader) observe() (*observation, error) {
	o := observation{extent: r.extent, writes: r.writes, nat: map[ip.Family]nat.State{}}
	reads := []func() error{func() error { o.sysctls = r.readSysctls(); return nil }}
	if r.extent.servers {
		reads = append(reads, func() (err error) { o.servers, err = r.kernel.IPVS.Observe(); return err })
	}
	if r.extent.sets {
		reads = append(reads, func() (err error) {
			o.sets, err = r.kernel.IPSet.Observe(func(name string) bool { return r.sets[name] })
			return err
		})
	}
	if r.extent.routing {
		reads = append(reads, func() (err error) { o.routing, err = r.kernel.Routing.Observe(); return err })
	}
	if r.extent.rules {
		reads = append(reads, r.rulesReads(&o)...)
	}
	if err := parallel(reads); err != nil {
		return nil, fmt.Errorf("reading the kernel's state: %w", err)
	}
	o.ownedRoutes = routesIn(r.cfg, &o.routing)
	return &o, nil
}

func (r reader) rulesReads(o *observation) []func() error {
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
		reads = append(reads, func() error { o.kubeProxy, o.kubeProxyErr = k.Observe(); return nil })
	}
	if k := r.kernel.Native; k != nil {
		reads = append(reads, func() error { o.native, o.nativeErr = k.Observe(); return nil })
	}
	return reads
}

// ownedRoutes holds our addresses and routes of the served families, by purpose.
type ownedRoutes struct {
	vips        map[plan.VIP]struct{}
	staleRoutes map[routing.Route]struct{} // local routes that claim no VIP as configured now, for example in another table
	gateways    map[routing.Route]struct{} // the other routes
}

func routesIn(cfg *plan.Config, s *routing.State) ownedRoutes {
	o := ownedRoutes{
		vips:        make(map[plan.VIP]struct{}, len(s.Routes)+len(s.Addresses)),
		staleRoutes: map[routing.Route]struct{}{},
		gateways:    map[routing.Route]struct{}{},
	}
	for _, addresses := range []map[netip.Addr]struct{}{s.Addresses, s.WrongScope} {
		for addr := range addresses {
			if servesFamily(cfg, ip.Of(addr)) {
				o.vips[plan.VIP{Addr: addr, Claim: plan.ClaimAddress}] = struct{}{}
			}
		}
	}
	for r := range s.Routes {
		if !servesFamily(cfg, r.Family) {
			continue
		}
		if vip, ok := vipOf(cfg, r); ok {
			o.vips[vip] = struct{}{}
		} else if r.Local {
			o.staleRoutes[r] = struct{}{}
		} else {
			o.gateways[r] = struct{}{}
		}
	}
	return o
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

// parallel runs functions concurrently, and joins their errors in order. It does not use
// errgroup, which returns only the first error.
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
	return sysctl.ObserveReadable(r.kernel.Sysctl.Observe, slices.Values(r.sysctls))
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

// ours reports whether a virtual server is ours: one of our sets lists its address and port,
// or its fwmark. Members are written before the virtual server and deleted after it, so this
// holds after a crash too. All other virtual servers (keepalived's, for example) are foreign, and
// not changed unless a Service wants the same key (adoptForeign).
func (t *serviceTables) ours(key ipvs.Key) bool {
	if key.FWMark != 0 {
		_, known := t.marks.addressOf(key)
		return known
	}
	return t.listed(key)
}

// listed reports whether a set lists an address and port. On a node taken over from
// kube-proxy, node ports are listed by port alone, which proves nothing in an excluded range.
func (t *serviceTables) listed(key ipvs.Key) bool {
	family := key.Family()
	has := func(name plan.SetName, e ipset.Entry) bool {
		return t.members.exists(t.sets.key(plan.Member{Set: name.In(family), Entry: e}))
	}
	full := plan.EntryOf(key)
	for _, name := range plan.Owning {
		if has(name, full) {
			return true
		}
	}
	if t.sets.get(plan.NodePorts.In(family)).exists || excluded(t.cfg, key.Addr) {
		return false
	}
	nodePorts, _ := plan.NodePortSets(key.Protocol)
	return has(nodePorts, plan.NodePortEntry(key))
}

// provesOwnership reports whether a member proves that an existing, no longer desired
// virtual server is ours.
func (t *serviceTables) provesOwnership(m *member) bool {
	full := t.sets.member(m.key)
	key := plan.KeyOf(full.Entry)
	fwm := fwmKey(ip.Of(m.key.addr), m.cached)
	if t.servers.exists(fwm) && t.marks.inLocal[fwm] == key {
		return true
	}
	if !t.servers.exists(key) || t.servers.wanted(key) {
		return false
	}
	return slices.ContainsFunc(plan.Owning, func(name plan.SetName) bool { return name.In(key.Family()) == full.Set })
}
