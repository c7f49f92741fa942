//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// Update changes a scenario. Apply gets a deep enough copy.
type Update struct {
	Name    string
	Apply   func(*Scenario) bool // false: the update does not apply to the scenario
	Restart bool                 // of the configuration, which the next process has
	Reverse bool                 // the scenario is what the change leads to, and Apply makes what it starts from

	leave func(*Product) error // what the kernel has before a restart; nil: the state of this version
}

// clone copies what updates change.
func (s *Scenario) clone() *Scenario {
	out := *s
	out.Services = slices.Clone(s.Services)
	for i := range out.Services {
		svc := &out.Services[i]
		svc.Ports = slices.Clone(svc.Ports)
		for j := range svc.Ports {
			svc.Ports[j].Endpoints = slices.Clone(svc.Ports[j].Endpoints)
		}
		svc.ExternalIPs, svc.LoadBalancers, svc.SourceRanges = slices.Clone(svc.ExternalIPs), slices.Clone(svc.LoadBalancers), slices.Clone(svc.SourceRanges)
	}
	out.Node.Addresses = slices.Clone(out.Node.Addresses)
	inv := &out.Node.Inventory
	inv.Links, inv.Rules = slices.Clone(inv.Links), slices.Clone(inv.Rules)
	inv.Defaults, inv.Direct = slices.Clone(inv.Defaults), slices.Clone(inv.Direct)
	for i := range inv.Links {
		inv.Links[i].Addresses = slices.Clone(inv.Links[i].Addresses)
	}
	out.Routes = slices.Clone(s.Routes)
	return &out
}

// eachService returns an Update of the first Service to which change applies.
func eachService(name string, change func(*service.Service) bool) Update {
	return Update{Name: name, Apply: func(s *Scenario) bool {
		for i := range s.Services {
			if change(&s.Services[i]) {
				return true
			}
		}
		return false
	}}
}

// eachEndpoint returns an Update of the first endpoint to which change applies.
func eachEndpoint(name string, change func(*service.Port, int) bool) Update {
	return eachService(name, func(s *service.Service) bool {
		for i := range s.Ports {
			for j := range s.Ports[i].Endpoints {
				if change(&s.Ports[i], j) {
					return true
				}
			}
		}
		return false
	})
}

// eachENI returns an Update of the first secondary uplink to which change applies. change gets the
// families for which it is an uplink.
func eachENI(name string, change func(*routing.Link, []ip.Family) bool) Update {
	return Update{Name: name, Apply: func(s *Scenario) bool {
		for i := range s.Node.Inventory.Links {
			l := &s.Node.Inventory.Links[i]
			var families []ip.Family
			for _, f := range s.Config.Families {
				if s.isUplink(f, l.Name) && NewOracle(s, f).mainUplink() != l.Name {
					families = append(families, f)
				}
			}
			if len(families) > 0 && change(l, families) {
				return true
			}
		}
		return false
	}}
}

// renumber changes the global addresses of an interface. It returns the new ones by the old ones.
func renumber(l *routing.Link) map[netip.Addr]netip.Addr {
	changed := map[netip.Addr]netip.Addr{}
	for k, a := range l.Addresses {
		if from := a.Prefix.Addr(); a.Global {
			changed[from] = from.Next().Next()
			l.Addresses[k].Prefix = netip.PrefixFrom(changed[from], a.Prefix.Bits())
		}
	}
	return changed
}

// sides returns the scenario before the update and the one after it, or false if the update does
// not apply.
func (u Update) sides(s *Scenario) (from, to *Scenario, ok bool) {
	from, to = s, s.clone()
	if !u.Apply(to) {
		return nil, nil, false
	}
	if u.Reverse {
		from, to = to, from
	}
	return from, to, true
}

// reverse returns the update in the other direction.
func reverse(name string, u Update) Update {
	u.Name, u.Reverse = name, true
	return u
}

// Changes that updates make in both directions.
var (
	removeService = Update{Name: "a Service is removed", Apply: func(s *Scenario) bool {
		if len(s.Services) == 0 {
			return false
		}
		s.Services = s.Services[1:]
		return true
	}}
	becomeClusterIP = eachService("the type becomes ClusterIP", func(s *service.Service) bool {
		changed := len(s.LoadBalancers) > 0
		for i := range s.Ports {
			changed = changed || s.Ports[i].NodePort != 0
			s.Ports[i].NodePort = 0
		}
		s.LoadBalancers, s.SourceRanges, s.HealthCheckNodePort = nil, nil, 0
		if len(s.ExternalIPs) == 0 {
			s.ExternalLocal = false
		}
		return changed
	})
	becomeNodePort = eachService("the type becomes NodePort", func(s *service.Service) bool {
		changed := len(s.LoadBalancers) > 0 && s.External()
		s.LoadBalancers, s.SourceRanges, s.HealthCheckNodePort = nil, nil, 0
		return changed
	})
	removeNodePorts = eachService("node ports are removed", func(s *service.Service) bool {
		changed := false
		for i := range s.Ports {
			changed = changed || s.Ports[i].NodePort != 0
			s.Ports[i].NodePort = 0
		}
		return changed && len(s.LoadBalancers) > 0 // allocateLoadBalancerNodePorts
	})
	becomeSingleStack = eachService("the second family is removed", func(s *service.Service) bool {
		if len(s.ClusterIPs) < 2 {
			return false
		}
		second := ip.Of(s.ClusterIPs[1])
		drop := func(a netip.Addr) bool { return ip.Of(a) == second }
		s.ClusterIPs = s.ClusterIPs[:1]
		s.LoadBalancers, s.ExternalIPs = slices.DeleteFunc(s.LoadBalancers, drop), slices.DeleteFunc(s.ExternalIPs, drop)
		for i := range s.Ports {
			s.Ports[i].Endpoints = slices.DeleteFunc(s.Ports[i].Endpoints, func(e service.Endpoint) bool { return drop(e.Addr.Addr()) })
		}
		return true
	})
	removeENI = Update{Name: "an ENI is removed", Apply: func(s *Scenario) bool {
		inv := &s.Node.Inventory
		for _, d := range inv.Defaults {
			if d.Link != NewOracle(s, d.Family).mainUplink() {
				gone := d
				inv.Defaults = slices.DeleteFunc(inv.Defaults, func(r routing.Route) bool { return r.Link == gone.Link })
				inv.Rules = slices.DeleteFunc(inv.Rules, func(r routing.Rule) bool { return r.Table == gone.Table })
				inv.Links = slices.DeleteFunc(inv.Links, func(l routing.Link) bool { return l.Name == gone.Link })
				over := func(r routing.Route) bool { return r.Link == gone.Link }
				inv.Direct, s.Routes = slices.DeleteFunc(inv.Direct, over), slices.DeleteFunc(s.Routes, over)
				return true
			}
		}
		return false
	}}
)

// Updates are the changes that every scenario goes through.
var Updates = []Update{
	eachEndpoint("an endpoint is removed", func(p *service.Port, i int) bool {
		p.Endpoints = slices.Delete(p.Endpoints, i, i+1)
		return true
	}),
	eachEndpoint("an endpoint terminates and serves", func(p *service.Port, i int) bool {
		e := &p.Endpoints[i]
		changed := e.Ready
		e.Ready, e.Serving, e.Terminating = false, true, true
		return changed
	}),
	eachService("an endpoint is added", func(s *service.Service) bool {
		for i := range s.Ports {
			list := s.Ports[i].Endpoints
			if len(list) == 0 {
				continue
			}
			e := list[0]
			e.Addr = netip.AddrPortFrom(e.Addr.Addr().Next().Next(), e.Addr.Port())
			e.Ready, e.Serving, e.Terminating = true, true, false
			if slices.ContainsFunc(list, func(o service.Endpoint) bool { return o.Addr == e.Addr }) {
				continue // added before: package service merges copies
			}
			if e.Node != "" {
				e.Node = "node-9"
			}
			s.Ports[i].Endpoints = append(list, e)
			return true
		}
		return false
	}),
	eachService("the last local endpoint leaves", func(s *service.Service) bool {
		changed := false
		for i := range s.Ports {
			before := len(s.Ports[i].Endpoints)
			s.Ports[i].Endpoints = slices.DeleteFunc(s.Ports[i].Endpoints, func(e service.Endpoint) bool { return e.Node == "node-1" })
			changed = changed || len(s.Ports[i].Endpoints) < before
		}
		return changed && s.ExternalLocal
	}),
	eachService("all endpoints leave", func(s *service.Service) bool {
		changed := false
		for i := range s.Ports {
			changed = changed || len(s.Ports[i].Endpoints) > 0
			s.Ports[i].Endpoints = nil
		}
		return changed
	}),
	eachService("externalTrafficPolicy becomes Local", func(s *service.Service) bool {
		changed := !s.ExternalLocal && s.External()
		s.ExternalLocal = s.ExternalLocal || changed
		return changed
	}),
	eachService("externalTrafficPolicy becomes Cluster", func(s *service.Service) bool {
		changed := s.ExternalLocal
		s.ExternalLocal = false
		return changed
	}),
	eachService("internalTrafficPolicy changes", func(s *service.Service) bool {
		s.InternalLocal = !s.InternalLocal
		return true
	}),
	eachService("a load balancer's IP is added", func(s *service.Service) bool {
		for f, a := range map[ip.Family]string{ip.IPv4: "203.0.113.77", ip.IPv6: "2001:db8:113::77"} {
			if s.Has(f) {
				s.LoadBalancers = append(s.LoadBalancers, netip.MustParseAddr(a))
			}
		}
		slices.SortFunc(s.LoadBalancers, netip.Addr.Compare)
		return len(s.LoadBalancers) > 0
	}),
	eachService("the load balancer's IPs are removed", func(s *service.Service) bool {
		changed := len(s.LoadBalancers) > 0
		s.LoadBalancers = nil
		return changed
	}),
	eachService("external IPs are removed", func(s *service.Service) bool {
		changed := len(s.ExternalIPs) > 0
		s.ExternalIPs = nil
		return changed
	}),
	eachService("source ranges are added", func(s *service.Service) bool {
		if len(s.LoadBalancers) == 0 || len(s.SourceRanges) > 0 {
			return false
		}
		s.SourceRanges = scenario.Prefixes([]string{"198.18.0.0/15", "2001:db8:ffff::/48"})
		return true
	}),
	eachService("source ranges change", func(s *service.Service) bool {
		if len(s.SourceRanges) == 0 {
			return false
		}
		s.SourceRanges = scenario.Prefixes([]string{"198.18.0.0/15", "2001:db8:ffff::/48"})
		return true
	}),
	eachService("a port changes", func(s *service.Service) bool {
		if len(s.Ports) == 0 {
			return false
		}
		s.Ports[0].Port += 1000
		return true
	}),
	eachService("a node port changes", func(s *service.Service) bool {
		for i := range s.Ports {
			if s.Ports[i].NodePort != 0 {
				s.Ports[i].NodePort += 1000
				return true
			}
		}
		return false
	}),
	removeService,
	reverse("a Service is added", removeService),
	becomeClusterIP,
	reverse("the type becomes LoadBalancer or NodePort", becomeClusterIP),
	becomeNodePort,
	reverse("the type becomes LoadBalancer", becomeNodePort),
	removeNodePorts,
	reverse("node ports are added", removeNodePorts),
	becomeSingleStack,
	reverse("the second family is added", becomeSingleStack),
	eachService("the cluster IP changes", func(s *service.Service) bool {
		if len(s.ClusterIPs) == 0 {
			return false
		}
		s.ClusterIPs = slices.Clone(s.ClusterIPs)
		s.ClusterIPs[0] = netip.MustParseAddr(map[ip.Family]string{ip.IPv4: "10.96.77.77", ip.IPv6: "fd00:96::7777"}[ip.Of(s.ClusterIPs[0])])
		return true
	}),
	eachService("a load balancer's IP changes", func(s *service.Service) bool {
		for i, a := range s.LoadBalancers {
			s.LoadBalancers[i] = netip.MustParseAddr(map[ip.Family]string{ip.IPv4: "203.0.113.78", ip.IPv6: "2001:db8:113::78"}[ip.Of(a)])
		}
		return len(s.LoadBalancers) > 0
	}),
	eachENI("an ENI's address is added", func(l *routing.Link, families []ip.Family) bool {
		if len(l.Addresses) > 0 {
			return false
		}
		for _, f := range families {
			address := map[ip.Family]string{ip.IPv4: "10.12.192.10/24", ip.IPv6: "fd00:192::10/64"}[f]
			l.Addresses = append(l.Addresses, scenario.NewLink(0, l.Name, address).Addresses...)
		}
		return true
	}),
	eachENI("an ENI's address is removed", func(l *routing.Link, _ []ip.Family) bool {
		changed := len(l.Addresses) > 0
		l.Addresses = nil
		return changed
	}),
	eachENI("an ENI's address changes", func(l *routing.Link, _ []ip.Family) bool { return len(renumber(l)) > 0 }),
	{Name: "the node's primary address changes", Apply: func(s *Scenario) bool {
		changed := map[netip.Addr]netip.Addr{}
		for i := range s.Node.Inventory.Links {
			l := &s.Node.Inventory.Links[i]
			for _, f := range s.Config.Families {
				if NewOracle(s, f).mainUplink() == l.Name && len(changed) == 0 {
					changed = renumber(l)
				}
			}
		}
		for i, a := range s.Node.Addresses {
			if to, ok := changed[a]; ok {
				s.Node.Addresses[i] = to
			}
		}
		for i, r := range s.Node.Inventory.Defaults {
			if to, ok := changed[r.Src]; ok {
				s.Node.Inventory.Defaults[i].Src = to
			}
		}
		return len(changed) > 0
	}},
	removeENI,
	reverse("an ENI is added", removeENI),
}

// UpdateResult is the result of a change.
type UpdateResult struct {
	Failures []Failure // of new and established connections
	States   int       // between two writes, including those of one restart
	Opened   int       // connections that are open on both sides of the change
	Crashes  int       // restarts, one after each write
}

// running is a process that receives a change.
type running struct {
	*Product
	from, to *Scenario
	network  bool // the change is another program's change of the network
	restart  bool // the program is started again
	crashes  bool // whether watch also keeps kernels
	kernels  []*Kernel
}

// change makes the change.
func (r *running) change() error {
	if !r.restart {
		return r.Change(r.to)
	}
	r.scenario = r.to
	return r.Start()
}

// begin programs a scenario. If the update changes the network, another program has made that
// change before: the update starts from the old rules on the new network.
func begin(from, to *Scenario, u Update) (*running, error) {
	p, err := NewProduct(from)
	if err != nil {
		return nil, err
	}
	if u.leave != nil {
		if err := u.leave(p); err != nil {
			return nil, err
		}
	}
	return enter(p, from, to, u.Restart), nil
}

// enter prepares a process that has programmed a scenario for an update to another one.
func enter(p *Product, from, to *Scenario, restart bool) *running {
	r := &running{Product: p, from: from, to: to, restart: restart}
	r.network = !slices.EqualFunc(from.Node.Inventory.Links, to.Node.Inventory.Links, func(a, b routing.Link) bool {
		return a.Name == b.Name && slices.Equal(a.Addresses, b.Addresses)
	})
	if r.network {
		p.Kernel.setNetwork(to)
	}
	return r
}

// watch returns all states between the writes of do, and ends in the state after do. If crashes is
// set, kernels are then the kernels in these states.
func (r *running) watch(family ip.Family, do func() error) (between []*trace.Node, at []int, err error) {
	var failed error
	r.written = func() {
		n, e := r.Observed(family)
		failed = cmp.Or(failed, e)
		between, at = append(between, n), append(at, len(r.writes))
		if r.crashes {
			r.kernels = append(r.kernels, r.Kernel.Clone())
		}
	}
	err = cmp.Or(do(), failed)
	r.written = nil
	return between, at, err
}

// crashed is the panic value of a write that is not made.
type crashed struct{}

// crash makes the change, and stops before a write. It returns false if the change has fewer
// writes.
func (r *running) crash(write int) (is bool, err error) {
	made := 0
	r.written = func() {
		if made == write {
			panic(crashed{})
		}
		made++
	}
	defer func() {
		r.written = nil
		if p := recover(); p == (crashed{}) {
			is = true
		} else if p != nil {
			panic(p)
		}
	}()
	return false, r.change()
}

// CheckUpdate programs a scenario, then the updated one, and evaluates every class after
// each single write. A class must have its result from before or from after the update,
// and connections that are open before and after must continue. Then it repeats the
// update with a crash before each write. The next start must end in the state of a node that
// has only had the updated scenario, or in that of a process that has not crashed.
func CheckUpdate(s *Scenario, u Update, family ip.Family) (out UpdateResult, err error) {
	from, to, ok := u.sides(s)
	if !ok {
		return out, nil
	}
	r, err := begin(from, to, u)
	if err != nil {
		return out, err
	}
	before, err := r.Observed(family)
	if err != nil {
		return out, err
	}
	r.crashes = family == s.Config.Families[0] // the kernel has both families
	between, at, err := r.watch(family, r.change)
	if err != nil {
		return out, err
	}
	after, err := r.Observed(family)
	if err != nil {
		return out, err
	}
	c := newComparison(from, to, family, before, after)
	out.Failures, out.States, out.Opened = c.judge(u.Name, between, r.writes, at), len(between), len(c.opened)
	if !r.crashes {
		return out, nil
	}
	fresh, err := NewProduct(to)
	if err != nil {
		return out, err
	}
	want, err := fresh.Observed(family)
	if err != nil {
		return out, err
	}
	if what := differs(after, want); what != "" && !changesLinks(from, to) {
		out.Failures = append(out.Failures, c.unlikeNew(u.Name, what))
	}
	return out, out.crashes(c, u, family, r.kernels, want, after)
}

// crashes starts a process on each kernel between the writes of a change, as after a crash. For a
// start in the middle of the change, it evaluates the classes in all states.
func (out *UpdateResult) crashes(c *comparison, u Update, family ip.Family, kernels []*Kernel, want, orWant *trace.Node) error {
	for write, k := range kernels {
		k.scenario = c.to
		r := &running{Product: &Product{Kernel: k}}
		name := fmt.Sprintf("%s; crash before write %d, restart", u.Name, write+1)
		if write == out.States/2 {
			between, at, err := r.watch(family, r.Start)
			if err != nil {
				return err
			}
			out.Failures = append(out.Failures, c.judge(name, between, r.writes, at)...)
			out.States += len(between)
		} else if err := r.Start(); err != nil {
			return err
		}
		out.Crashes++
		got, err := r.Observed(family)
		if err != nil {
			return err
		}
		// A process that knew an interface before remembers it.
		if what := differs(got, want); what != "" && differs(got, orWant) != "" {
			out.Failures = append(out.Failures, c.unlikeNew(name, what))
		}
	}
	return nil
}

// changesLinks reports whether an interface is added or removed. A process remembers those that
// it has known, and a new process numbers them differently.
func changesLinks(from, to *Scenario) bool {
	return !slices.EqualFunc(from.Node.Inventory.Links, to.Node.Inventory.Links, func(a, b routing.Link) bool { return a.Name == b.Name })
}

// unlikeNew returns the failure of a change that leaves another state than that of a new node.
func (c *comparison) unlikeNew(when, what string) Failure {
	return Failure{
		Subject: c.String(), Class: &Class{}, When: when, Got: what,
		Want: Want{Sentence: "a change and a restart end in the state of a node that has only had the new configuration"},
	}
}

// differs lists differences between two nodes. It ignores draining real servers, and
// parameters, which the process does not reset.
func differs(got, want *trace.Node) string {
	var out []string
	for _, x := range []struct {
		what      string
		got, want any
	}{
		{"rules", got.Ruleset, want.Ruleset}, {"sets", unmarked(got.Sets), unmarked(want.Sets)}, {"virtual servers", serving(got, want), serving(want, want)},
		{"policy rules", got.Rules, want.Rules},
	} {
		if reflect.DeepEqual(x.got, x.want) {
			continue
		}
		if d := gocmp.Diff(x.want, x.got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}, netip.AddrPort{}), cmpopts.EquateEmpty()); d != "" {
			out = append(out, x.what+" differ:\n"+d)
		}
	}
	if !sameRoutes(got.Routes, want.Routes) {
		out = append(out, fmt.Sprintf("routes differ: %v, want %v", got.Routes, want.Routes))
	}
	return strings.Join(out, "; ")
}

// serving returns the virtual servers with the real servers that accept connections.
// It numbers fwmark virtual servers in the order of their contents: a process that has run
// longer may use other marks, and has some that drain.
func serving(n, want *trace.Node) ipvs.State {
	out := ipvs.State{}
	var marked []ipvs.Service
	for key, s := range n.IPVS {
		drains := len(s.RealServers)
		s.RealServers = maps.Clone(s.RealServers)
		maps.DeleteFunc(s.RealServers, func(_ netip.AddrPort, r ipvs.RealServer) bool { return r.Weight == 0 })
		_, wanted := want.IPVS[key]
		switch {
		case key.FWMark != 0 && len(s.RealServers) > 0:
			marked = append(marked, s)
		case key.FWMark == 0 && (wanted || drains == 0 || len(s.RealServers) > 0):
			out[key] = s
		}
	}
	slices.SortFunc(marked, func(a, b ipvs.Service) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	for i, s := range marked {
		out[ipvs.Key{Port: uint16(i)}] = s
	}
	return out
}

// unmarked returns the members, and which of them have marks. It omits the set of
// draining members.
func unmarked(sets ipset.State) ipset.State {
	out := ipset.State{}
	for name, s := range sets {
		if strings.HasSuffix(name, "IPVS-DRAIN") {
			continue // drains by its mark
		}
		s.Entries = maps.Clone(s.Entries)
		for e, mark := range s.Entries {
			s.Entries[e] = min(mark, 1)
		}
		out[name] = s
	}
	return out
}

func sameRoutes(a, b []routing.Route) bool {
	set := func(list []routing.Route) map[routing.Route]bool {
		out := map[routing.Route]bool{}
		for _, r := range list {
			out[r] = true
		}
		return out
	}
	return maps.Equal(set(a), set(b))
}

// comparison compares states with those before and after a change.
type comparison struct {
	from, to      *Scenario
	family        ip.Family
	classes       []*Class
	before, after *moment
	opened        []opened
	moments       []*moment
	evaluator     trace.Evaluator
}

// opened is a connection that is open before a change and continues after it.
type opened struct {
	*Class
	*trace.Connection
}

func (c *comparison) String() string { return c.from.Name + " " + c.family.String() }

// newComparison evaluates the classes of both scenarios.
func newComparison(s, to *Scenario, family ip.Family, before, after *trace.Node) *comparison {
	c := &comparison{from: s, to: to, family: family, evaluator: trace.Evaluator{Quiet: true}}
	seen := map[string]int{}
	for _, x := range []struct {
		n *trace.Node
		s *Scenario
	}{{before, s}, {after, to}} {
		o := NewOracle(x.s, family)
		list, _ := Classes(x.n, o)
		for _, class := range list {
			served := class.State == "" && class.target.kind != Elsewhere && class.target.kind != NodeItself && !o.isVIP(class.From)
			key := strings.TrimSuffix(strings.TrimSuffix(class.String(), ")"), ", Local")
			at, known := seen[key]
			switch {
			case !served:
			case !known:
				seen[key] = len(c.classes)
				c.classes = append(c.classes, class)
			case class.target.svc != nil && class.target.svc.ExternalLocal:
				c.classes[at] = class // Local in one of the states
			}
		}
	}
	c.before = c.add(before)
	if !sameFabric(s, to) {
		c.moments = nil // its results are not those of other moments
	}
	c.after = c.add(after)
	var all []opened
	for k, class := range c.classes {
		c.evaluator.Opened = func(conn *trace.Connection) { all = append(all, opened{class, conn}) }
		c.result(c.before, k)
	}
	c.evaluator.Opened = nil
	for k := range c.classes {
		c.result(c.after, k)
	}
	for _, o := range all {
		// judge reports a connection whose verdict is Undecided.
		if r := c.evaluateNext(c.after, o); r.Verdict.Outcome == trace.Answered || r.Verdict.Outcome == trace.Undecided {
			c.opened = append(c.opened, o)
			c.after.opened = append(c.after.opened, r)
		}
	}
	return c
}

// sameFabric reports whether the network beyond the node is the same before and after a change.
func sameFabric(a, b *Scenario) bool {
	return reflect.DeepEqual(a.Config.SNAT.Sources, b.Config.SNAT.Sources) && reflect.DeepEqual(a.Node.SNATSources, b.Node.SNATSources) &&
		reflect.DeepEqual(a.Node.Inventory, b.Node.Inventory) && reflect.DeepEqual(a.Routes, b.Routes)
}

// judge evaluates new connections of every class, and the next packets of established
// ones, in every state. It does not report again what it has reported for another state; see
// moment.mayDiffer.
func (c *comparison) judge(name string, between []*trace.Node, log []string, at []int) []Failure {
	var moments []*moment
	for _, n := range between {
		moments = append(moments, c.add(n))
	}
	var out []Failure
	fails := func(i int, class *Class, got string, want string) {
		out = append(out, Failure{
			Subject: c.String(), Class: class, Got: got, Want: Want{Sentence: want},
			When: fmt.Sprintf("%s; before write %d of %d: %s", name, i+1, len(between), next(log, at[i])),
		})
	}
	failed, ended := make([]bool, len(c.classes)), make([]bool, len(c.opened))
	for k, class := range c.classes {
		if doubt := cmp.Or(cannotJudge(&c.before.classes[k].Explanation), cannotJudge(&c.after.classes[k].Explanation)); doubt != "" && len(between) > 0 {
			fails(0, class, doubt, "no result is in doubt")
			failed[k] = true
		}
	}
	for i, m := range moments {
		for k, class := range c.classes {
			if failed[k] || !m.mayDiffer(class) {
				continue
			}
			x := c.result(m, k)
			if doubt := cannotJudge(&x.Explanation); doubt != "" {
				fails(i, class, doubt, "no result is in doubt")
				failed[k] = true
			} else if !c.isEither(k, x) {
				before, after := c.before.classes[k], c.after.classes[k]
				fails(i, class, Summary(&x.Explanation), fmt.Sprintf("every state is as before (%s) or as after (%s)", Summary(&before.Explanation), Summary(&after.Explanation)))
				failed[k] = true
			}
		}
		for k, o := range c.opened {
			if ended[k] || !m.mayDiffer(o.Class) {
				continue
			}
			if x := c.continued(m, k); x.Verdict.Outcome != trace.Answered {
				fails(i, o.Class, fmt.Sprintf("the open connection to %s: %s", o.RealServer(), x.Verdict), "a connection that exists on both sides continues")
				ended[k] = true
			}
		}
	}
	return out
}

func next(log []string, at int) string {
	if at < len(log) {
		return log[at]
	}
	return "the last"
}

// way describes the path to a real server. It does not distinguish the sources of a connection
// of the node to an endpoint on the node: any address of the node, even the VIP, gets replies.
func (c *comparison) way(class *Class, r trace.ServerPath) string {
	source := r.SeenSource
	if class.In == "" && (c.isOwn(source) || source == class.To.Addr().String()) && !c.from.isUplink(c.family, r.LeavesBy) {
		source = "the node"
	}
	return strings.Join([]string{r.RealServer, r.LeavesBy, source, string(r.Verdict.Outcome)}, " ")
}

// isOwn reports whether an interface of the node has an address.
func (c *comparison) isOwn(address string) bool {
	return slices.ContainsFunc(c.to.Node.Inventory.Links, func(l routing.Link) bool {
		return slices.ContainsFunc(l.Addresses, func(a routing.Address) bool { return a.Prefix.Addr().String() == address })
	})
}
