// Package fakenode is a node's kernel in memory. It composes the fakes of the kernel packages,
// which keep state and refuse what the kernel refuses.
package fakenode

import (
	"fmt"
	"maps"
	"sync"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Node is the kernel of a node. Its hooks may be replaced between calls.
type Node struct {
	// OnChange, if set, is called before each change of any part, with the text of the change.
	// Its error refuses the change.
	OnChange func(change string) error
	// OnRead, if set, is called before each read of a part, by one goroutine at a time. Its
	// error is what the read returns.
	OnRead func(part string) error

	IPVS      *ipvs.Fake
	IPSet     *ipset.Fake
	NAT       map[ip.Family]*nat.Fake
	Routing   *routing.Fake
	Sysctl    *sysctl.Fake
	Conntrack *conntrack.Fake
	Loopback  *nft.FakeLoopback
	KubeProxy *nft.FakeKubeProxy

	reading sync.Mutex
}

// New returns a kernel without any state except parameters. Other parameters do not exist.
func New(parameters sysctl.State) *Node {
	n := &Node{
		IPVS: ipvs.NewFake(), IPSet: ipset.NewFake(), Routing: routing.NewFake(), Sysctl: sysctl.NewFake(parameters),
		NAT:       map[ip.Family]*nat.Fake{ip.IPv4: nat.NewFake(ip.IPv4), ip.IPv6: nat.NewFake(ip.IPv6)},
		Conntrack: conntrack.NewFake(), Loopback: nft.NewFakeLoopback(), KubeProxy: nft.NewFakeKubeProxy(),
	}
	n.hook()
	return n
}

// Clone returns a kernel with the same state, without OnChange and OnRead. The part that a process
// remembers is not copied: the clone is for a process that starts on that state.
func (n *Node) Clone() *Node {
	out := &Node{
		IPVS: n.IPVS.Clone(), IPSet: n.IPSet.Clone(), Routing: n.Routing.Clone(), Sysctl: sysctl.NewFake(n.Sysctl.Values()),
		NAT:       map[ip.Family]*nat.Fake{},
		Conntrack: n.Conntrack.Clone(), Loopback: n.Loopback.Clone(), KubeProxy: n.KubeProxy.Clone(),
	}
	for family, f := range n.NAT {
		out.NAT[family] = f.Clone()
	}
	out.hook()
	return out
}

// hook makes the fakes ask OnChange and OnRead.
func (n *Node) hook() {
	hook(n, &n.IPVS.Faults, "virtual servers")
	hook(n, &n.IPSet.Faults, "sets")
	hook(n, &n.Routing.Faults, "routing")
	hook(n, &n.Sysctl.Faults, "parameters")
	hook(n, &n.Loopback.Faults, "loopback rules")
	hook(n, &n.KubeProxy.Faults, "kube-proxy's tables")
	for family, f := range n.NAT {
		hook(n, &f.Faults, family.String()+" rules")
	}
	n.Conntrack.Refuse = func(e conntrack.Entry) error { return n.changes(forget(e)) }
	n.Conntrack.FailDump = n.reads("connections")
}

// Parameters returns the kernel parameters that the plan sets, with the value 0, and more.
func Parameters(cfg *plan.Config, more sysctl.State) sysctl.State {
	values := sysctl.State{}
	for key := range plan.ForNode(cfg, &plan.Node{}).Sysctls {
		values[key] = "0"
	}
	maps.Copy(values, more)
	return values
}

// hook makes the fake of a part ask OnChange and OnRead.
func hook[C fmt.Stringer, O comparable](n *Node, f *kernel.Faults[C, O], part string) {
	f.Refuse = func(c C) error { return n.changes(c) }
	f.FailObserve = n.reads(part)
}

// forget is the deletion of a flow.
type forget conntrack.Entry

func (f forget) String() string { return "forget " + conntrack.Entry(f).String() }

func (n *Node) changes(c fmt.Stringer) error {
	if n.OnChange == nil {
		return nil
	}
	return n.OnChange(c.String())
}

func (n *Node) reads(part string) func() error {
	return func() error {
		n.reading.Lock()
		defer n.reading.Unlock()
		if n.OnRead == nil {
			return nil
		}
		return n.OnRead(part)
	}
}
