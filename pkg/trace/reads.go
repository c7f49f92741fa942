package trace

import (
	"hash/maphash"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Reads is a set of parts of a node: chains, members of sets, virtual servers, and routes to an
// address in a table. It may contain parts that were not added (a Bloom filter).
type Reads struct{ bits [64]uint64 }

func (r *Reads) add(part uint64)      { r.bits[part>>6%64] |= 1 << (part % 64) }
func (r *Reads) has(part uint64) bool { return r.bits[part>>6%64]&(1<<(part%64)) != 0 }

var seed = maphash.MakeSeed()

// part returns a hash of a key. Keys of different kinds of parts have different types.
func part[K comparable](key K) uint64 { return maphash.Comparable(seed, key) }

// The keys of parts, besides chainKey and ipvs.Key.
type (
	setKey    string // the type of a set, and whether it exists
	memberKey struct {
		set   string
		front ipset.Entry // without Net
	}
	routeKey struct {
		table int
		dst   netip.Addr
	}
	homeKey netip.Addr // the routes to a pod in all tables
)

// read records a part.
func read[K comparable](n *Node, key K) {
	if n.index != nil && n.index.reads != nil {
		n.index.reads.add(part(key))
	}
}

// Changes are the differences between two nodes.
type Changes struct {
	Servers []ipvs.Key // virtual servers that differ
	parts   []uint64   // others
	all     bool       // all evaluations read what differs
}

// OnlyServers reports whether nothing else differs.
func (c *Changes) OnlyServers() bool { return !c.all && len(c.parts) == 0 }

// Affect reports whether evaluations that read some parts of one of the nodes may have another
// result on the other. Otherwise they have the same one: an evaluation is a function of what it
// reads, so as long as it has read nothing that differs, it reads the same parts on both nodes.
func (c *Changes) Affect(r *Reads) bool {
	return c.all || slices.ContainsFunc(c.parts, r.has) || slices.ContainsFunc(c.Servers, func(k ipvs.Key) bool { return r.has(part(k)) })
}

// Compare returns the differences between two nodes. It does not compare Delivers.
func Compare(a, b *Node) Changes {
	c := Changes{Servers: ChangedServers(a.IPVS, b.IPVS)}
	c.all = a.Family != b.Family || !slices.Equal(a.Rules, b.Rules) || !maps.Equal(a.Sysctls, b.Sysctls) || !sameLinks(a.Links, b.Links) ||
		a.rare() || b.rare()
	c.compareRules(a.Ruleset, b.Ruleset)
	c.compareSets(a.Sets, b.Sets)
	c.compareRoutes(a.Routes, b.Routes)
	return c
}

// rare reports whether the node has state that Compare does not compare.
func (n *Node) rare() bool {
	return n.Other != nil || n.Native != nil || n.Unread != nil || n.Connections != nil || n.Hairpin != nil
}

func sameLinks(a, b []routing.Link) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || reflect.DeepEqual(a, b))
}

// ChangedServers returns the keys of the virtual servers that differ.
func ChangedServers(a, b ipvs.State) []ipvs.Key {
	var out []ipvs.Key
	for key, s := range a {
		other, has := b[key]
		if !has || s.VirtualServer != other.VirtualServer || !maps.Equal(s.RealServers, other.RealServers) {
			out = append(out, key)
		}
	}
	for key := range b {
		if _, has := a[key]; !has {
			out = append(out, key)
		}
	}
	return out
}

func (c *Changes) compareRules(a, b nat.Ruleset) {
	for _, side := range [][2]nat.Ruleset{{a, b}, {b, a}} {
		for table, contents := range side[0] {
			other, has := side[1][table]
			c.all = c.all || !has
			for name, rules := range contents.Chains {
				others, has := other.Chains[name]
				if !has || contents.Policies[name] != other.Policies[name] || !slices.Equal(rules, others) {
					c.parts = append(c.parts, part(chainKey{false, table, name}))
				}
			}
		}
	}
}

func (c *Changes) compareSets(a, b ipset.State) {
	for _, side := range [][2]ipset.State{{a, b}, {b, a}} {
		for name, set := range side[0] {
			other, has := side[1][name]
			if !has || set.Set != other.Set || set.Partial != other.Partial {
				c.parts = append(c.parts, part(setKey(name)))
				continue
			}
			for e, mark := range set.Entries {
				if m, has := other.Entries[e]; !has || m != mark {
					e.Net = netip.Prefix{}
					c.parts = append(c.parts, part(memberKey{name, e}))
				}
			}
		}
	}
}

// compareRoutes ignores the order of routes, by which the kernel does not choose.
func (c *Changes) compareRoutes(a, b []routing.Route) {
	if len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) {
		return
	}
	have := make(map[routing.Route]int, len(a))
	for _, r := range a {
		have[r]++
	}
	for _, r := range b {
		if have[r]--; have[r] < 0 {
			c.changedRoute(r)
		}
	}
	for r, n := range have {
		if n > 0 {
			c.changedRoute(r)
		}
	}
}

func (c *Changes) changedRoute(r routing.Route) {
	if !r.Dst.IsSingleIP() {
		c.all = true // the route to an address may be another one, and an interface may become an uplink
		return
	}
	c.parts = append(c.parts, part(routeKey{r.Table, r.Dst.Addr()}), part(homeKey(r.Dst.Addr())))
}
