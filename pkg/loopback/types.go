// Package loopback makes node ports on 127.0.0.1 and ::1 reach remote endpoints, by
// replacing the loopback source address of the node's own requests.
//
// IPVS does not send packets with a loopback source to another host
// (crosses_local_route_boundary), and decides so before masquerading. So the source is
// replaced before conntrack sees the request, and the destination of the reply after
// IPVS, by two stateless rules of nftables; iptables cannot change addresses without
// conntrack. The sysctl route_localnet stays 0, so that the kernel still drops packets
// of other hosts to loopback addresses (CVE-2020-8558).
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

// Exchange describes the rules of one family: packets of the node to its loopback
// address that carry the mark get the source.
type Exchange struct {
	Mark   uint32     // bits that must all be set
	Source netip.Addr // an address of the node, not a loopback address
}

// Address is the family's loopback address.
func Address(f ip.Family) netip.Addr {
	if f == ip.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// State holds the rules by family. The Exchange of a family is zero if its rules are
// incomplete or differ from ours.
type State map[ip.Family]Exchange

// Change sets the rules of a family, or removes them if the Exchange is zero.
type Change struct {
	Family   ip.Family
	Exchange Exchange
}

func (c Change) String() string {
	if c.Exchange == (Exchange{}) {
		return fmt.Sprintf("delete the %s rules for the loopback address", c.Family)
	}
	return fmt.Sprintf("set the source of the node's requests to its loopback address to %s", c.Exchange.Source)
}

// Failure is a change that the kernel or nft refused.
type Failure = kernel.Failure[Change]

// Diff returns the changes from have to want, by family.
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

// check rejects an Exchange that cannot be written as rules.
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
