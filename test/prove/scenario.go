//go:build prove

// Package prove checks the programmed kernel state for every packet that rules can
// distinguish. Rules compare: set membership, equality, interface, state, mark bits. So
// for one configuration there are finitely many classes of packets. The evaluator of
// package trace follows each class, and an oracle that knows the Service API and none of
// our rules judges the result. docs/proof.md says what that proves.
package prove

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// Scenario is a scenario with all interfaces and routes that packets need.
type Scenario struct {
	Name string
	scenario.Scenario
}

// LoadDir reads the scenarios of a directory, one for each SNAT mode and claim mode that
// a file lists.
func LoadDir(dir string) ([]*Scenario, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no scenarios in %s: %w", dir, err)
	}
	var out []*Scenario
	for _, file := range files {
		list, err := load(file)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		out = append(out, list...)
	}
	return out, nil
}

// load returns a file's scenario for each combination of SNAT mode and claim mode.
func load(file string) ([]*Scenario, error) {
	read, err := scenario.Load(file)
	if err != nil {
		return nil, err
	}
	s := &Scenario{strings.TrimSuffix(filepath.Base(file), ".yaml"), *read}
	s.complete()
	var out []*Scenario
	for _, mode := range s.Modes {
		variant := *s
		if len(s.Modes) > 1 {
			variant.Name += " " + string(mode)
		}
		variant.Config.SNAT.Mode = mode
		out = append(out, &variant)
	}
	for _, one := range slices.Clone(out) {
		for _, claim := range s.Claims {
			variant := *one
			variant.Name += " claim " + string(claim)
			variant.Config.VIPs.LoadBalancers, variant.Config.VIPs.ExternalIPs = claim, claim
			out = append(out, &variant)
		}
	}
	return out, nil
}

// complete adds what only packets need: interfaces and routes.
func (s *Scenario) complete() {
	s.Node.BridgeNetfilter = plan.BridgeEnabled
	s.Routes = append(s.Routes, s.Node.Inventory.Attached...)
	s.addPodRoutes()
	s.completeNetwork()
}

// addPodRoutes adds routes to endpoints of this node for which the file has none.
func (s *Scenario) addPodRoutes() {
	for _, svc := range s.Services {
		for _, p := range svc.Ports {
			for _, e := range p.Endpoints {
				a := e.Addr.Addr()
				has := func(r routing.Route) bool { return r.Table == routing.TableMain && r.Dst.Contains(a) }
				if e.Node != s.Config.NodeName || slices.ContainsFunc(s.Routes, has) || s.carries(a) {
					continue
				}
				s.Routes = append(s.Routes, routing.Route{
					Family: ip.Of(a), Table: routing.TableMain, Dst: netip.PrefixFrom(a, a.BitLen()), Link: fmt.Sprintf("veth%d", len(s.Routes)),
				})
			}
		}
	}
}

// carries reports whether an address belongs to an interface, or to the subnet of a
// bridge.
func (s *Scenario) carries(a netip.Addr) bool {
	return slices.ContainsFunc(s.Node.Inventory.Links, func(l routing.Link) bool {
		return slices.ContainsFunc(l.Addresses, func(b routing.Address) bool {
			return b.Prefix.Addr() == a || l.Type == "bridge" && b.Prefix.Contains(a)
		})
	})
}

// completeNetwork adds the interfaces that only routes name: those of pods.
func (s *Scenario) completeNetwork() {
	inv := &s.Node.Inventory
	for _, r := range slices.Concat(s.Routes, inv.Defaults) {
		if !slices.ContainsFunc(inv.Links, func(l routing.Link) bool { return l.Name == r.Link }) {
			inv.Links = append(inv.Links, scenario.NewLink(len(inv.Links)+1, r.Link))
		}
	}
}
