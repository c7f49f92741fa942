package reconcile

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
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

// isOn reports whether the interface of a source has its address.
func (s snatSource) isOn(links []routing.Link) bool {
	return slices.ContainsFunc(links, func(l routing.Link) bool { return l.Name == s.link && l.HasAddress(s.source) })
}

// familyOnly returns the unspecified address of the family.
func familyOnly(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
