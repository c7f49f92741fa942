//go:build prove

package prove

import (
	"hash/maphash"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// moment is a state of the node in which classes and open connections are evaluated.
type moment struct {
	node    *trace.Node
	hash    uint64        // of all but the virtual servers
	base    *moment       // an earlier moment, or nil
	changes trace.Changes // since base
	classes []*result     // by class; nil until they are evaluated
	opened  []*result     // by connection; only with a Verdict
}

// result is the result of a class or of an open connection in a moment, and maybe in others.
type result struct {
	trace.Explanation
	reads  trace.Reads
	either fits
}

// fits is whether a result fits those before and after the change.
type fits int

const (
	unknown fits = iota
	fit
	unfit
)

// add adds the moment of a state. Its base is the moment that differs least from it, among those
// that differ only in virtual servers, or else the last one.
func (c *comparison) add(n *trace.Node) *moment {
	n = ofFamily(n)
	m := &moment{node: n, hash: restHash(n), classes: make([]*result, len(c.classes))}
	for _, known := range c.moments {
		if known.hash != m.hash || m.base != nil && len(m.changes.Servers) == 0 {
			continue
		}
		if servers := trace.ChangedServers(known.node.IPVS, n.IPVS); m.base == nil || len(servers) < len(m.changes.Servers) {
			m.base, m.changes.Servers = known, servers
		}
	}
	if m.base != nil {
		m.changes = trace.Compare(m.base.node, n) // equal hashes prove nothing
	} else if len(c.moments) > 0 {
		m.base = c.moments[len(c.moments)-1]
		m.changes = trace.Compare(m.base.node, n)
	}
	c.moments = append(c.moments, m)
	return m
}

// ofFamily returns a node with the sets and virtual servers that packets of its family match.
func ofFamily(n *trace.Node) *trace.Node {
	out := *n
	out.Sets, out.IPVS = ipset.State{}, ipvs.State{}
	for name, set := range n.Sets {
		other := strings.HasPrefix(name, "KUBE-6-") != (n.Family == ip.IPv6) && strings.HasPrefix(name, "KUBE-")
		if !other || set.Type == ipset.BitmapPort {
			out.Sets[name] = set
		}
	}
	for key, s := range n.IPVS {
		if ip.Of(key.Addr) == n.Family {
			out.IPVS[key] = s
		}
	}
	return &out
}

var hashSeed = maphash.MakeSeed()

// restHash returns a hash of a state without its virtual servers and interfaces.
func restHash(n *trace.Node) (sum uint64) {
	type place struct {
		table nat.Table
		chain string
		index int
		rule  nat.Rule
	}
	for table, contents := range n.Ruleset {
		for chain, rules := range contents.Chains {
			sum += maphash.Comparable(hashSeed, place{table, chain, -1, nat.Rule(contents.Policies[chain])})
			for i, r := range rules {
				sum += maphash.Comparable(hashSeed, place{table, chain, i, r})
			}
		}
	}
	type member struct {
		set   string
		entry ipset.Entry
		mark  uint32
	}
	for name, set := range n.Sets {
		sum += maphash.Comparable(hashSeed, set.Set)
		for e, mark := range set.Entries {
			sum += maphash.Comparable(hashSeed, member{name, e, mark})
		}
	}
	for _, r := range n.Routes {
		sum += maphash.Comparable(hashSeed, r)
	}
	for i, r := range n.Rules {
		sum += maphash.Comparable(hashSeed, r) * uint64(i+1)
	}
	for key, value := range n.Sysctls {
		sum += maphash.Comparable(hashSeed, [2]string{key, value})
	}
	return sum
}

// mayDiffer reports whether a class may have another result than in the moments before. If a
// moment differs from one of them only in virtual servers with an address, only packets to that
// address and port may: nothing else looks for such a virtual server, since no rule of these nodes
// changes a destination.
func (m *moment) mayDiffer(class *Class) bool {
	if m.base == nil || !m.changes.OnlyServers() || slices.ContainsFunc(m.changes.Servers, func(k ipvs.Key) bool { return k.FWMark != 0 }) {
		return true
	}
	return slices.Contains(m.changes.Servers, ipvs.Key{Protocol: class.Protocol, Addr: class.To.Addr(), Port: class.To.Port()})
}

// result returns the result of a class. It is that of the moment's base if that result has not
// depended on what differs.
func (c *comparison) result(m *moment, class int) *result {
	if m.classes[class] == nil && m.base != nil {
		if r := c.result(m.base, class); !m.changes.Affect(&r.reads) {
			m.classes[class] = r
		}
	}
	if m.classes[class] == nil {
		r := &result{}
		c.evaluator.Reads = &r.reads
		r.Explanation = c.evaluator.Explain(m.node, c.classes[class].Question)
		m.classes[class] = r
	}
	return m.classes[class]
}

// continued is like result, for the next packet of an open connection and the reply to it.
func (c *comparison) continued(m *moment, connection int) *result {
	if m.opened == nil {
		m.opened = make([]*result, len(c.opened))
	}
	if m.opened[connection] == nil && m.base != nil {
		if r := c.continued(m.base, connection); !m.changes.Affect(&r.reads) {
			m.opened[connection] = r
		}
	}
	if m.opened[connection] == nil {
		m.opened[connection] = c.evaluateNext(m, c.opened[connection])
	}
	return m.opened[connection]
}

func (c *comparison) evaluateNext(m *moment, o opened) *result {
	r := &result{}
	c.evaluator.Reads = &r.reads
	r.Verdict = c.evaluator.Continue(m.node, o.Connection)
	return r
}

// isEither reports whether the result of a class is that from before or after the update, or lies
// between them.
func (c *comparison) isEither(class int, x *result) bool {
	if x.either == unknown {
		x.either = unfit
		if c.asEither(c.classes[class], &x.Explanation, &c.before.classes[class].Explanation, &c.after.classes[class].Explanation) {
			x.either = fit
		}
	}
	return x.either == fit
}

// asEither reports whether a result is that from before or after the update, or lies
// between them. A class that is answered before and after must be answered by endpoints
// of either, each on a path that it has in one of them. A class that is served in only
// one of them may be refused or dropped, but must not reach a process of the node. A
// class that is served in neither, because not all endpoints can answer, may be served on
// the paths of those that can.
func (c *comparison) asEither(class *Class, x, before, after *trace.Explanation) bool {
	now, was, will := fateOf(x), fateOf(before), fateOf(after)
	switch {
	case now == was && now != MustAnswer, now == will && now != MustAnswer:
		return true
	case now != MustAnswer:
		return (was == MustAnswer) != (will == MustAnswer) && now != MustReach || was != MustAnswer && will != MustAnswer && now != MustReach
	}
	known := map[string]bool{}
	for _, y := range []*trace.Explanation{before, after} {
		for _, r := range y.RealServers {
			known[c.way(class, r)] = true
		}
	}
	for _, r := range x.RealServers {
		if r.Weight > 0 && !known[c.way(class, r)] {
			return false
		}
	}
	return true
}
