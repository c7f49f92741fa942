package plan_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// text returns a plan in readable form: the node's facts, with node also its plan, then
// each Service's.
func text(cfg *plan.Config, n *plan.Node, services []service.Service, node bool) string {
	facts := plan.NewFacts(cfg, n)
	parts := partsOf(cfg, n, services)
	var w writer
	w.facts(&facts)
	if node {
		w.node(nodeSections(cfg, plan.ForNode(cfg, n)))
	}
	for i := range services {
		w.line("")
		w.line("Service %s", services[i].Name)
		w.part(parts[i])
	}
	return w.String()
}

// partsOf plans the Services and marks the sets that they fill as in use.
func partsOf(cfg *plan.Config, n *plan.Node, services []service.Service) []plan.ServicePlan {
	facts := plan.NewFacts(cfg, n)
	numbers := map[ipvs.Key]uint32{}
	n.Uses = plan.SetsInUse{}
	var parts []plan.ServicePlan
	for i := range services {
		part := numbered(cfg, plan.ForService(cfg, &facts, &services[i]), numbers)
		for _, m := range part.Members {
			n.Uses[m.Set] = true
		}
		parts = append(parts, part)
	}
	return parts
}

// numbered assigns the next number to each address and port without one.
func numbered(cfg *plan.Config, p plan.ServicePlan, numbers map[ipvs.Key]uint32) plan.ServicePlan {
	for _, o := range p.Internal {
		if _, ok := numbers[o.Key]; !ok {
			numbers[o.Key] = uint32(len(numbers) + 1)
		}
	}
	return plan.AssignMarks(cfg, p, numbers)
}

type writer struct{ strings.Builder }

func (w *writer) line(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }

func (w *writer) facts(f *plan.Facts) {
	w.line("Facts of %s", f.NodeName)
	w.line("  zone %q", f.Zone)
	for _, family := range ip.Families {
		if a, ok := f.Primary[family]; ok {
			w.line("  primary %s", a)
		}
	}
	for _, a := range f.NodePorts {
		w.line("  node ports on %s", a)
	}
}

// section is a piece of the node's plan, for example a chain. Nodes with different Services
// and settings have many sections in common.
type section struct {
	title, chain string
	lines        string
}

// node writes the node's plan; each chain follows the jumps of its table.
func (w *writer) node(part []section) {
	for _, s := range part {
		if s.chain == "" {
			w.line("\n%s", s.title)
		} else {
			w.line(":%s", s.chain)
		}
		w.WriteString(s.lines)
	}
}

// nodeSections returns the node's plan: its sysctls, sets, members and policy rules, then
// per family and table the jumps from base chains and the chains by name.
func nodeSections(cfg *plan.Config, part plan.NodePlan) []section {
	var sysctls, sets, rules writer
	for _, key := range slices.Sorted(maps.Keys(part.Sysctls)) {
		sysctls.line("  sysctl %s = %s", key, part.Sysctls[key])
	}
	for _, s := range part.Sets {
		sets.line("  set %s %s %s", s.Name, s.Type, s.Family)
	}
	rules.members(part.Members)
	for _, r := range part.Rules {
		rules.line("  %s", r)
	}
	if n := len(part.NAT.Misplaced); n > 0 {
		rules.line("%d stray jumps, where a wanted state has none", n)
	}
	out := []section{
		{title: "Node sysctls", lines: sysctls.String()},
		{title: "Node sets", lines: sets.String()},
		{title: "Node members and policy rules", lines: rules.String()},
	}
	for _, family := range cfg.Families {
		for _, table := range []nat.Table{nat.Mangle, nat.NAT, nat.Filter} {
			out = append(out, tableSections(&part.NAT, family, table)...)
		}
	}
	return out
}

func tableSections(state *nat.State, family ip.Family, table nat.Table) []section {
	title := fmt.Sprintf("%s *%s", family, table)
	var jumps writer
	for _, j := range state.Jumps {
		if j.Chain.Family == family && j.Chain.Table == table {
			jumps.line("-A %s %s", j.Chain.Name, j.Rule)
		}
	}
	out := []section{{title: title, lines: jumps.String()}}
	byName := func(a, b nat.Chain) int { return cmp.Compare(a.Name, b.Name) }
	for _, c := range slices.SortedFunc(maps.Keys(state.Chains), byName) {
		if c.Family != family || c.Table != table {
			continue
		}
		var rules writer
		for _, r := range state.Chains[c] {
			rules.line("-A %s %s", c.Name, r)
		}
		out = append(out, section{title, c.Name, rules.String()})
	}
	return out
}

func (w *writer) members(list []plan.Member) {
	for _, m := range list {
		mark := ""
		if m.Mark != 0 {
			mark = fmt.Sprintf(" mark %#x", m.Mark)
		}
		w.line("  %s %s%s", m.Set, m.Entry, mark)
	}
}

func (w *writer) part(p plan.ServicePlan) {
	for _, vs := range p.VirtualServers {
		w.line("  %s %s%s", vs.Key, vs.Scheduler, options(vs))
		for _, rs := range realServers(vs.Endpoints) {
			weight := ""
			if rs.Weight != 1 {
				weight = fmt.Sprintf(" weight %d", rs.Weight)
			}
			w.line("    → %s%s", rs.Dest(), weight)
		}
	}
	for _, v := range p.VIPs {
		w.line("  claim %s", v)
	}
	w.members(p.Members)
	if p.HealthCheck.Port != 0 {
		w.line("  health check on %d: %d local", p.HealthCheck.Port, p.HealthCheck.ReadyHere)
	}
	w.line("  depends on %s", dependsText(p.Deps))
}

func options(vs plan.VirtualServer) string {
	s := ""
	if vs.Flags != 0 {
		s += fmt.Sprintf(" flags %#x", uint32(vs.Flags))
	}
	if vs.Timeout != 0 {
		s += fmt.Sprintf(" timeout %d", vs.Timeout)
	}
	return s
}

func dependsText(d plan.Deps) string {
	var out []string
	for _, bit := range []struct {
		d    plan.Deps
		name string
	}{
		{plan.OnZone, "zone"}, {plan.OnNodePorts, "node ports"}, {plan.OnNodeIPs, "links"}, {plan.OnPrimary, "primary"}, {plan.OnServiceCount, "many"},
		{plan.OnListeners, "listeners"}, {plan.OnAPIServer, "API server"}, {plan.OnUnreachableNodes, "lost nodes"}, {plan.OnPeers, "peers"},
	} {
		if d&bit.d != 0 {
			out = append(out, bit.name)
			d &^= bit.d
		}
	}
	if d != 0 {
		out = append(out, fmt.Sprintf("unknown bits %#x", uint16(d)))
	}
	return strings.Join(append(out, "itself"), ", ")
}
