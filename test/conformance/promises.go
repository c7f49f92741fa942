package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// promised is the kind of a Diff from what the API promises. kube-proxy may break the promise
// too, so no comparison with it would show that.
const promised = "promised packet"

// Broken returns the packets whose result violates externalTrafficPolicy Local as the API
// defines it: internal clients get the endpoints that they get at the cluster IP, and external
// clients no endpoint of another node. A Diff has the promise in place of kube-proxy's result.
func (w *World) Broken(ours Facts) []Diff {
	var out []Diff
	for f, answer := range ours {
		claims := w.Claims(f.Protocol, f.At)
		if f.Kind != "packet" || len(claims) != 1 || !externalLocal(claims[0]) {
			continue
		}
		promise := ""
		if Inside(f.Name) {
			promise = w.brokenInside(ours, f, claims[0])
		} else if slices.ContainsFunc(endpointsOf(answer), onOtherNode) {
			promise = "endpoints of this node only"
		}
		if promise != "" {
			f.Kind = promised
			out = append(out, Diff{f, promise, answer})
		}
	}
	out = append(out, w.missingSources(ours)...)
	slices.SortFunc(out, compareDiffs)
	return out
}

// missingSources returns the sources of the node that source ranges admit and no member allows.
// kube-proxy lists only the VIP, so no comparison with it would show that.
func (w *World) missingSources(ours Facts) []Diff {
	var out []Diff
	for f := range ours {
		set, restricted := strings.CutSuffix(f.Name, "LOAD-BALANCER-FW")
		claims := w.Claims(f.Protocol, f.At)
		if f.Kind != "member" || !restricted || len(claims) != 1 || !admitsNode(f.At.Addr())(claims[0]) {
			continue
		}
		for _, source := range nodeSources(f.At.Addr()) {
			f := Fact{Kind: "member", Name: set + "LOAD-BALANCER-SOURCE-IP", Protocol: f.Protocol, At: f.At, Member: f.Member + "," + source}
			if ours[f] == "" {
				f.Kind = promised
				out = append(out, Diff{f, "listed", ""})
			}
		}
	}
	return out
}

// brokenInside returns what an internal client is promised, or "" if it gets that. Policies
// that concern one of the two addresses alone leave it open.
func (w *World) brokenInside(ours Facts, f Fact, c Claim) string {
	if len(c.Service.SourceRanges) > 0 || c.Service.InternalLocal {
		return ""
	}
	for _, a := range c.Service.ClusterIPs() {
		at := netip.AddrPortFrom(netip.MustParseAddr(a), uint16(c.Port.Number))
		cluster, asked := ours[Fact{Kind: "packet", Name: f.Name, Protocol: f.Protocol, At: at}]
		if at.Addr().Is4() != f.At.Addr().Is4() || !asked || len(w.Claims(f.Protocol, at)) != 1 {
			continue
		}
		if want := endpointsOf(cluster); !slices.Equal(endpointsOf(ours[f]), want) {
			return fmt.Sprint(want, " as at the cluster IP")
		}
	}
	return ""
}

// onOtherNode reports whether an endpoint is not on this node.
func onOtherNode(to netip.AddrPort) bool {
	return !slices.ContainsFunc(Hosts, func(h Host) bool {
		return h.Node == NodeName && (h.IPv4 == to.Addr().String() || h.IPv6 == to.Addr().String())
	})
}
