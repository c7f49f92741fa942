//go:build prove

package prove

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// Update changes a scenario. Apply gets a deep enough copy.
type Update struct {
	Name  string
	Apply func(*Scenario) bool // false: the scenario has nothing to change so
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
	inv := &out.Node.Inventory
	inv.Links, inv.Rules, inv.Defaults = slices.Clone(inv.Links), slices.Clone(inv.Rules), slices.Clone(inv.Defaults)
	for i := range inv.Links {
		inv.Links[i].Addresses = slices.Clone(inv.Links[i].Addresses)
	}
	out.Routes = slices.Clone(s.Routes)
	return &out
}

// eachService makes an update of the first Service that it changes.
func eachService(name string, change func(*service.Service) bool) Update {
	return Update{name, func(s *Scenario) bool {
		for i := range s.Services {
			if change(&s.Services[i]) {
				return true
			}
		}
		return false
	}}
}

// eachEndpoint is the same of the first endpoint of a Service.
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

// Updates are the changes that a scenario is put through.
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
			for _, e := range s.Ports[i].Endpoints {
				e.Addr = netip.AddrPortFrom(e.Addr.Addr().Next().Next(), e.Addr.Port())
				e.Ready, e.Serving, e.Terminating = true, true, false
				if e.Node != "" {
					e.Node = "node-9"
				}
				s.Ports[i].Endpoints = append(s.Ports[i].Endpoints, e)
				return true
			}
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
		a := netip.MustParseAddr("203.0.113.77")
		if !s.Has(ip.IPv4) {
			return false
		}
		s.LoadBalancers = append(s.LoadBalancers, a)
		return true
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
	{"a Service is removed", func(s *Scenario) bool {
		if len(s.Services) == 0 {
			return false
		}
		s.Services = s.Services[1:]
		return true
	}},
	{"an ENI's address is added", func(s *Scenario) bool {
		for i := range s.Node.Inventory.Links {
			l := &s.Node.Inventory.Links[i]
			if s.isUplink(ip.IPv4, l.Name) && len(l.Addresses) == 0 {
				l.Addresses = scenario.NewLink(0, l.Name, "10.12.192.10/24").Addresses
				return true
			}
		}
		return false
	}},
	{"an ENI's address is removed", func(s *Scenario) bool {
		main := NewOracle(s, ip.IPv4).mainUplink()
		for i := range s.Node.Inventory.Links {
			l := &s.Node.Inventory.Links[i]
			if s.isUplink(ip.IPv4, l.Name) && l.Name != main && len(l.Addresses) > 0 {
				l.Addresses = nil
				return true
			}
		}
		return false
	}},
	{"an ENI is removed", func(s *Scenario) bool {
		main := NewOracle(s, ip.IPv4).mainUplink()
		inv := &s.Node.Inventory
		for _, d := range inv.Defaults {
			if d.Link != main && d.Family == ip.IPv4 {
				gone := d
				inv.Defaults = slices.DeleteFunc(inv.Defaults, func(r routing.Route) bool { return r.Link == gone.Link })
				inv.Rules = slices.DeleteFunc(inv.Rules, func(r routing.Rule) bool { return r.Table == gone.Table })
				inv.Links = slices.DeleteFunc(inv.Links, func(l routing.Link) bool { return l.Name == gone.Link })
				return true
			}
		}
		return false
	}},
}

// CheckUpdate programs a scenario, then the updated one, and judges every class
// after each single write: it must fare as before or as after.
func CheckUpdate(s *Scenario, u Update, family ip.Family) (failures []Failure, states int, err error) {
	to := s.clone()
	if !u.Apply(to) {
		return nil, 0, nil
	}
	p, err := NewProduct(s)
	if err != nil {
		return nil, 0, err
	}
	before, err := p.Node(family)
	if err != nil {
		return nil, 0, err
	}
	// The network changes first, by another program's hand; then what was before is
	// the old rules on the new network.
	inventory := !slices.EqualFunc(s.Node.Inventory.Links, to.Node.Inventory.Links, func(a, b routing.Link) bool {
		return a.Name == b.Name && slices.Equal(a.Addresses, b.Addresses)
	})
	if inventory {
		p.Kernel.setNetwork(to)
		if before, err = p.Node(family); err != nil {
			return nil, 0, err
		}
	}
	var between []*trace.Node
	var writes []int
	p.written = func() {
		n, e := p.Node(family)
		if e != nil {
			err = e
			return
		}
		between = append(between, n)
		writes = append(writes, len(p.writes))
	}
	if e := p.Change(to); e != nil {
		return nil, 0, e
	}
	p.written = nil
	if err != nil {
		return nil, 0, err
	}
	after, err := p.Node(family)
	if err != nil {
		return nil, 0, err
	}
	return compareStates(s, to, u, family, before, after, between, p.writes, writes), len(between), nil
}

// compareStates evaluates the classes of both scenarios in every state.
func compareStates(s, to *Scenario, u Update, family ip.Family, before, after *trace.Node, between []*trace.Node, log []string, at []int) []Failure {
	var classes []*Class
	seen := map[string]bool{}
	for _, x := range []struct {
		n *trace.Node
		s *Scenario
	}{{before, s}, {after, to}} {
		list, _ := Classes(x.n, NewOracle(x.s, family))
		for _, c := range list {
			if key := c.String(); !seen[key] && c.State == "" && c.target.kind != Elsewhere && c.target.kind != NodeItself {
				seen[key] = true
				classes = append(classes, c)
			}
		}
	}
	e := trace.Evaluator{Quiet: true}
	var out []Failure
	for _, c := range classes {
		a, b := e.Explain(before, c.Question), e.Explain(after, c.Question)
		for i, n := range between {
			x := e.Explain(n, c.Question)
			if asEither(&x, &a, &b) {
				continue
			}
			out = append(out, Failure{
				Subject: s.Name + " " + family.String(), Class: c, Got: Summary(&x),
				Want: Want{Sentence: fmt.Sprintf("every state is as before (%s) or as after (%s)", Summary(&a), Summary(&b))},
				When: fmt.Sprintf("%s; before write %d of %d: %s", u.Name, i+1, len(between), next(log, at[i])),
			})
			break
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

// asEither reports whether a state is the one before or the one after, or between
// them. What is answered before and after is answered by endpoints of either, each
// over a way that it has in one of them. What is served in one of them only may be
// turned away, but reaches no program of the node's; and what is served in none is
// not served.
func asEither(x, before, after *trace.Explanation) bool {
	now, was, will := fateOf(x), fateOf(before), fateOf(after)
	switch {
	case now == was && now != MustAnswer, now == will && now != MustAnswer:
		return true
	case now != MustAnswer:
		return (was == MustAnswer) != (will == MustAnswer) && now != MustReach || was != MustAnswer && will != MustAnswer && now != MustReach
	case was != MustAnswer && will != MustAnswer:
		return false
	}
	known := map[string]bool{}
	for _, y := range []*trace.Explanation{before, after} {
		for _, r := range y.RealServers {
			known[way(r)] = true
		}
	}
	for _, r := range x.RealServers {
		if r.Weight > 0 && !known[way(r)] {
			return false
		}
	}
	return true
}

func way(r trace.Branch) string {
	return strings.Join([]string{r.RealServer, r.LeavesBy, r.SeenSource, string(r.Verdict.Outcome)}, " ")
}
