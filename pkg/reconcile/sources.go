package reconcile

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// snatSource is a rule that sets the source address of packets leaving an interface.
type snatSource struct {
	link   string
	source netip.Addr
}

// snatSources returns the SNAT rules of a ruleset.
func snatSources(s nat.State) map[snatSource]struct{} {
	out := map[snatSource]struct{}{}
	for c, rules := range s.Chains {
		if c.Table != nat.NAT {
			continue
		}
		for _, r := range rules {
			var found snatSource
			words := strings.Fields(string(r))
			for i := range len(words) - 1 {
				switch words[i] {
				case "-o":
					found.link = words[i+1]
				case "--to-source":
					found.source, _ = netip.ParseAddr(words[i+1])
				}
			}
			if found.source.IsValid() {
				out[found] = struct{}{}
			}
		}
	}
	return out
}

// sourcesReplaced schedules the deletion of flows whose SNAT source was replaced when rules were
// rewritten. Conntrack keeps the source that a flow began with, so a UDP socket that keeps
// sending would use an address that the network no longer routes to this node. For
// MASQUERADE the kernel deletes such flows itself (net/netfilter/nf_nat_masquerade.c). A
// source whose interface was renamed stays. Of a source that the interface still has, only the
// UDP flows are deleted: TCP connections still work and end by themselves.
func (ns *nodeSections) sourcesReplaced(before, after nat.State) {
	was, is := snatSources(before), snatSources(after)
	used, ofLink := map[netip.Addr]bool{}, map[snatSource]bool{}
	for s := range is {
		used[s.source] = true
		ofLink[snatSource{s.link, familyOnly(s.source)}] = true
	}
	for s := range was {
		if _, same := is[s]; same {
			continue
		}
		if !used[s.source] || ofLink[snatSource{s.link, familyOnly(s.source)}] {
			flows := translated{source: s.source}
			if ns.hasAddress(s) {
				flows.protocol = ip.UDP
			}
			ns.flows.sources[flows] = struct{}{}
		}
	}
}

// hasAddress reports whether the interface of a source still has its address.
func (ns *nodeSections) hasAddress(s snatSource) bool {
	return slices.ContainsFunc(ns.input.Inventory.Links, func(l routing.Link) bool { return l.Name == s.link && l.HasAddress(s.source) })
}

// clientsRerouted schedules the deletion of flows from sources that are bound to the primary
// interface from now on. A UDP flow that began earlier is not bound. It would leave by the ENI
// for as long as it is in use, with an address of another interface if the ENI had none when
// the flow was masqueraded.
func (t *tables) clientsRerouted(before, after []plan.Member) {
	if !t.pruning {
		return // flows survive a restart
	}
	for _, m := range after {
		if m.Entry.Net.IsValid() && m.Set == plan.ReplyRoutedSources.In(ip.Of(m.Entry.Net.Addr())) && !slices.Contains(before, m) {
			t.flows.clients[m.Entry.Net] = struct{}{}
		}
	}
}

// familyOnly returns the unspecified address of the family.
func familyOnly(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// sourceMatches returns matches for the flows of unused SNAT sources and of rerouted
// clients.
func (f *flush) sourceMatches() []conntrack.Match {
	var matches []conntrack.Match
	for t := range f.flows.sources {
		matches = append(matches, conntrack.Match{Protocol: t.protocol, Source: t.source})
	}
	for p := range f.flows.clients {
		matches = append(matches, conntrack.Match{Client: p})
	}
	return matches
}
