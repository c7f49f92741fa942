package trace

import (
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// index holds the rules and routes of a node in the form in which evaluations look them up.
type index struct {
	reads  *Reads // nil: they are not recorded
	chains map[chainKey]*chain
	routes *routes
}

// chainKey names a chain. other is that of Node.Other.
type chainKey struct {
	other bool
	table nat.Table
	name  string
}

// chain is a compiled chain.
type chain struct {
	chainKey
	rules  []*rule
	to     []*chain // by rule: the chain of its target, or nil
	lines  []string // by rule; see line
	policy string
	text   string // of a base chain
	part   uint64
}

// line returns a rule as iptables-save prints it.
func (c *chain) line(index int) string {
	if c.lines == nil {
		c.lines = make([]string, len(c.rules))
	}
	if c.lines[index] == "" {
		c.lines[index] = "-A " + c.name + " " + string(c.rules[index].text)
	}
	return c.lines[index]
}

// chainOf returns a chain. Its rules are compiled on first use.
func (w *walk) chainOf(key chainKey) *chain {
	c := w.index.chains[key]
	if c == nil {
		contents := w.Ruleset[key.table]
		if key.other {
			contents = w.Other[key.table]
		}
		rules := contents.Chains[key.name]
		c = &chain{
			chainKey: key, rules: make([]*rule, len(rules)), to: make([]*chain, len(rules)),
			policy: contents.Policies[key.name], text: key.text(), part: part(key),
		}
		w.index.chains[key] = c
		for i, text := range rules {
			c.rules[i] = w.eval.rule(text)
			if _, ok := contents.Chains[c.rules[i].target]; ok {
				c.to[i] = w.chainOf(chainKey{key.other, key.table, c.rules[i].target})
			}
		}
	}
	return c
}

// routes are a node's routes.
type routes struct {
	list     []routing.Route
	tables   map[int]*routeTable
	defaults map[string]bool // the interfaces of default routes
}

// routeTable holds the routes of a table in the order of the list: those to one address, which are
// longer than all others, and the others.
type routeTable struct {
	hosts  map[netip.Addr][]*routing.Route
	others []*routing.Route
}

// of returns the routes of a node: these, if it has the same list.
func (r *routes) of(n *Node) *routes {
	if len(r.list) == len(n.Routes) && len(r.list) > 0 && &r.list[0] == &n.Routes[0] {
		return r
	}
	return newRoutes(n)
}

func newRoutes(n *Node) *routes {
	out := &routes{list: n.Routes, tables: map[int]*routeTable{}, defaults: map[string]bool{}}
	for i := range n.Routes {
		r := &n.Routes[i]
		t := out.tables[r.Table]
		if t == nil {
			t = &routeTable{hosts: map[netip.Addr][]*routing.Route{}}
			out.tables[r.Table] = t
		}
		if r.Dst.IsSingleIP() {
			t.hosts[r.Dst.Addr()] = append(t.hosts[r.Dst.Addr()], r)
		} else {
			t.others = append(t.others, r)
		}
		if r.Dst.Bits() == 0 && !r.Local {
			out.defaults[r.Link] = true
		}
	}
	return out
}

// in returns the routes of a table among which the longest match for a destination is.
func (r *routes) in(table int, dst netip.Addr) []*routing.Route {
	t := r.tables[table]
	if t == nil {
		return nil
	}
	if hosts := t.hosts[dst]; hosts != nil {
		return hosts
	}
	return t.others
}
