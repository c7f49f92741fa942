package reconcile

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// flows are the conntrack entries to delete:
//   - stale: UDP flows to these addresses and ports that lead to no current real server
//   - sources: flows translated to SNAT sources that are no longer used
//   - clients: UDP flows from these sources whose route changed
type flows struct {
	stale   map[ipvs.Key]struct{}
	sources map[translated]struct{}
	clients map[netip.Prefix]struct{}
	failed  bool // deleting them failed; the node's retry tries again
}

// translated are the flows of a protocol, or of all protocols if it is 0, whose client address
// is translated to the source.
type translated struct {
	protocol ip.Protocol
	source   netip.Addr
}

func newFlows() flows {
	return flows{stale: map[ipvs.Key]struct{}{}, sources: map[translated]struct{}{}, clients: map[netip.Prefix]struct{}{}}
}

func (fl *flows) empty() bool { return len(fl.stale)+len(fl.sources)+len(fl.clients) == 0 }

// addStale adds the UDP flows to an address and port.
func (fl *flows) addStale(address ipvs.Key) {
	if _, added := fl.stale[address]; !added {
		fl.stale[address] = struct{}{}
		fl.failed = false // these have not been tried
	}
}

// addReplaced adds the flows whose SNAT source was replaced when rules were rewritten. Conntrack
// keeps the source that a flow began with, so a UDP socket that keeps sending would use an address
// that the network no longer routes to this node. For MASQUERADE the kernel deletes such flows
// itself (net/netfilter/nf_nat_masquerade.c). A source whose interface was renamed stays. Of a
// source that the interface still has, only the UDP flows are added: TCP connections still work
// and end by themselves.
func (fl *flows) addReplaced(before, after nat.State, links []routing.Link) {
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
			replaced := translated{source: s.source}
			if s.isOn(links) {
				replaced.protocol = ip.UDP
			}
			fl.sources[replaced] = struct{}{}
		}
	}
}

// addRerouted adds the flows from sources that are bound to the primary interface from now on,
// after the node's members changed. A UDP flow that began earlier is not bound. It would leave by
// the ENI for as long as it is in use, with an address of another interface if the ENI had none
// when the flow was masqueraded.
func (fl *flows) addRerouted(before, after []plan.Member) {
	for _, m := range after {
		if m.Entry.Net.IsValid() && m.Set == plan.ReplyRoutedSources.In(ip.Of(m.Entry.Net.Addr())) && !slices.Contains(before, m) {
			fl.clients[m.Entry.Net] = struct{}{}
		}
	}
}

// sourceMatches returns matches for the flows of unused SNAT sources and of rerouted
// clients.
func (fl *flows) sourceMatches() []conntrack.Match {
	var matches []conntrack.Match
	for t := range fl.sources {
		matches = append(matches, conntrack.Match{Protocol: t.protocol, Source: t.source})
	}
	for p := range fl.clients {
		matches = append(matches, conntrack.Match{Client: p})
	}
	return matches
}

// addStaleFlows adds the flows of a UDP virtual server to those to delete.
func (t *serviceTables) addStaleFlows(key ipvs.Key) {
	if address, known := t.marks.addressOf(key); known && address.Protocol == ip.UDP {
		t.flows.addStale(address)
	}
}

// deleteStaleFlows deletes the flows to delete, except those to a current real server of either
// virtual server of the address. In a flush it runs last: before its VIP is local, a datagram is
// forwarded untranslated, and IPVS does not translate later datagrams of that flow. Before Prune it
// does nothing, because each batch would read the whole conntrack table; Prune adds all flows. After
// an error it waits for the node's retry or for new flows.
func (f *flush) deleteStaleFlows() {
	fl := &f.t.flows
	if fl.empty() || !f.t.pruning || fl.failed {
		return
	}
	matches := fl.sourceMatches()
	for key := range fl.stale {
		keep := map[netip.AddrPort]struct{}{}
		for _, k := range []ipvs.Key{key, fwmKey(key.Family(), f.t.marks.markOf(key))} {
			if s := f.t.servers.cachedServer(k); s != nil {
				for _, rs := range s.reals {
					keep[rs.Dest()] = struct{}{}
				}
			}
		}
		matches = append(matches, conntrack.Match{
			Protocol: key.Protocol, OriginalDst: netip.AddrPortFrom(key.Addr, key.Port), Keep: keep,
		})
	}
	err := f.ns.kernel.deleteFlows(matches)
	if fl.failed = err != nil; fl.failed {
		f.problems.add(nil, err)
		return
	}
	*fl = newFlows()
}
