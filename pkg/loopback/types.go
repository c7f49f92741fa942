// Package loopback gives the node's requests to its own loopback address a source
// that is answered from other hosts.
//
// IPVS does not send to another host what has a loopback address as its source
// (crosses_local_route_boundary), and it decides so before the source can be
// masqueraded. So the source is exchanged before conntrack sees the request, and
// the destination of the answer behind IPVS, by two stateless rules of nftables:
// iptables has none that change an address without conntrack. The sysctl
// route_localnet stays 0, and with it the kernel goes on dropping whatever comes
// for a loopback address from another host (CVE-2020-8558).
package loopback

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Exchange is what the rules of one family do: what the node sends to its loopback
// address with the mark gets the source.
type Exchange struct {
	Mark   uint32     // bits that must all be set
	Source netip.Addr // an address of the node, not a loopback one
}

// Address is the family's loopback address.
func Address(f ip.Family) netip.Addr {
	if f == ip.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// State is the rules by family. A family's Exchange is the zero one if some of its
// rules stand, but not as they were written.
type State map[ip.Family]Exchange

// Change sets the rules of a family, or takes them away with the zero Exchange.
type Change struct {
	Family   ip.Family
	Exchange Exchange
}

func (c Change) String() string {
	if c.Exchange == (Exchange{}) {
		return fmt.Sprintf("delete the rules of %s for its loopback address", c.Family)
	}
	return fmt.Sprintf("have the node's requests to its loopback address come from %s", c.Exchange.Source)
}

// Failure is a change that the kernel, or nft, refused.
type Failure = kernel.Failure[Change]

// Diff lists the changes that make want of have, by family.
func Diff(have, want State) []Change {
	var changes []Change
	for _, f := range ip.Families {
		w, wanted := want[f]
		if h, there := have[f]; there != wanted || h != w {
			changes = append(changes, Change{f, w})
		}
	}
	return changes
}

// check refuses what no rule can be made of.
func check(c Change) error {
	e := c.Exchange
	switch {
	case !slices.Contains(ip.Families, c.Family):
		return fmt.Errorf("%s: %w", c.Family, unix.EAFNOSUPPORT)
	case e == Exchange{}:
		return nil
	case !e.Source.IsValid() || ip.Of(e.Source) != c.Family || e.Source.IsLoopback() || e.Source.Zone() != "" || e.Mark == 0:
		return fmt.Errorf("source %s, mark %#x: %w", e.Source, e.Mark, unix.EINVAL)
	}
	return nil
}

func (s State) apply(c Change) {
	if c.Exchange == (Exchange{}) {
		delete(s, c.Family)
	} else {
		s[c.Family] = c.Exchange
	}
}

func (s State) clone() State {
	if s == nil {
		return State{}
	}
	return maps.Clone(s)
}
