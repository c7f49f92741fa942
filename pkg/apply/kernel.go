// Package apply brings the kernel to what the plan wants. It remembers what
// it has programmed, so that a change of one Service is compared and written
// by itself; it reads the kernel at the start, now and then, and after an
// error, and repairs what differs.
package apply

import (
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kubeproxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// IPVS is what is used of package ipvs.
type IPVS interface {
	Observe() (ipvs.State, error)
	Apply([]ipvs.Change) []ipvs.Failure
	Connections(ipvs.Key) (map[netip.AddrPort]ipvs.Connections, error)
	Count() (int, error) // of IPv4
	RealServers(ipvs.Key) (map[netip.AddrPort]ipvs.RealServer, error)
}

// IPSet is what is used of package ipset. Observe reads the sets whose name
// is accepted.
type IPSet interface {
	Observe(name func(string) bool) (ipset.State, error)
	Count(name string) (n int, known bool, err error)
	Apply([]ipset.Change) []ipset.Failure
}

// NAT is what is used of package nat; one of these is for one family.
type NAT interface {
	Observe(nat.Own) (nat.State, error)
	Apply([]nat.Change) []nat.Failure
}

// Routing is what is used of package routing.
type Routing interface {
	Observe() (routing.State, error)
	Apply([]routing.Change) []routing.Failure
	Guard([]routing.Rule)
}

// Sysctl is what is used of package sysctl.
type Sysctl interface {
	Observe(keys []string) (sysctl.State, error)
	Apply([]sysctl.Change) []sysctl.Failure
}

// Loopback is what is used of package loopback.
type Loopback interface {
	Observe() (loopback.State, error)
	Apply([]loopback.Change) []loopback.Failure
}

// KubeProxy is what is used of package kubeproxy.
type KubeProxy interface {
	Observe() (kubeproxy.State, error)
	Apply([]kubeproxy.Change) []kubeproxy.Failure
}

// Conntrack is what is used of package conntrack.
type Conntrack interface {
	Delete([]conntrack.Match) (int, error)
}

// Kernel is all that is programmed.
type Kernel struct {
	IPVS      IPVS
	IPSet     IPSet
	NAT       map[ip.Family]NAT
	Routing   Routing
	Sysctl    Sysctl
	Conntrack Conntrack
	Loopback  Loopback  // nil where there is no nft
	KubeProxy KubeProxy // likewise
	Leftovers Leftovers
}

// Leftovers is the back end of iptables that is not used, in which kube-proxy or
// an earlier process of ours may have left rules.
type Leftovers struct {
	NAT      map[ip.Family]NAT // nil where its programs are not there
	Programs string            // what they are called
	// Unseen reports that it may hold rules, and that there are no programs to
	// read them.
	Unseen bool
}
