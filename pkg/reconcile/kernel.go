package reconcile

import (
	"net/netip"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// IPVS is what this package uses of package ipvs.
type IPVS interface {
	Observe() (ipvs.State, error)
	Apply([]ipvs.Change) []ipvs.Failure
	Connections(ipvs.Key) (map[netip.AddrPort]ipvs.Connections, error)
	Count() (int, error) // of IPv4
	RealServers(ipvs.Key) (map[netip.AddrPort]ipvs.RealServer, error)
}

// IPSet is what this package uses of package ipset. Observe reads the sets whose names the
// function accepts.
type IPSet interface {
	Observe(name func(string) bool) (ipset.State, error)
	Sizes(names []string) (map[string]int, error)
	Has(ipset.Set, ipset.Entry) (bool, error)
	Apply([]ipset.Change) []ipset.Failure
}

// NAT is what this package uses of package nat, for one family.
type NAT interface {
	Observe(nat.Owned) (nat.State, error)
	Apply([]nat.Change) []nat.Failure
	Omits() bool
}

// Routing is what this package uses of package routing.
type Routing interface {
	Observe() (routing.State, error)
	Apply([]routing.Change) []routing.Failure
	Guard([]routing.Rule)
	Sources() (map[netip.Addr]int, error)
	DefaultSource(ip.Family) (netip.Addr, error)
}

// Sysctl is what this package uses of package sysctl.
type Sysctl interface {
	Observe(keys []string) (sysctl.State, error)
	Apply([]sysctl.Change) []sysctl.Failure
}

// Loopback is what this package uses of package nft for node ports on the loopback address.
type Loopback interface {
	Observe() (nft.Loopback, error)
	Apply([]nft.LoopbackChange) []nft.LoopbackFailure
}

// KubeProxy is what this package uses of package nft for tables of kube-proxy.
type KubeProxy interface {
	Observe() (nft.KubeProxy, error)
	Apply([]nft.KubeProxyChange) []nft.KubeProxyFailure
}

// NativeMarks is what this package uses of package nft for marks in nftables rules of other
// programs.
type NativeMarks interface {
	Observe() ([]nft.MarkUse, error)
}

// Conntrack is what this package uses of package conntrack.
type Conntrack interface {
	Delete([]conntrack.Match) (int, error)
	Longest(conntrack.Match) (time.Duration, error)
}

// Kernel is every part of the kernel that is programmed.
type Kernel struct {
	IPVS      IPVS
	IPSet     IPSet
	NAT       map[ip.Family]NAT
	Routing   Routing
	Sysctl    Sysctl
	Conntrack Conntrack   // nil without nf_conntrack_netlink: entries of removed endpoints expire
	Loopback  Loopback    // nil without nft
	KubeProxy KubeProxy   // likewise
	Native    NativeMarks // likewise
	Leftovers Leftovers

	meter  Meter                                // nil: see Metered
	dryRun func(part, operation, change string) // nil: see DryRun
}

// omitsRules reports whether iptables or the kernel refuses some rules.
func (k *Kernel) omitsRules() bool {
	for _, n := range k.NAT {
		if n.Omits() {
			return true
		}
	}
	return false
}

// Leftovers is the iptables back end that is not in use, where kube-proxy or an earlier
// process of ours may have left rules.
type Leftovers struct {
	NAT      map[ip.Family]NAT // nil if its programs are not installed
	Programs string            // names of its programs
	// Unseen reports that the back end may hold rules, and that no programs are installed
	// to read them.
	Unseen bool
}
