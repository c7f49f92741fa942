package apply

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/kubeproxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// DryRun returns a kernel that reads from k and never writes. Each change is passed to note,
// with the part of the kernel (as for a Meter) and its operation, and counts as applied.
// note is called from one goroutine.
func (k Kernel) DryRun(note func(part, operation, change string)) Kernel {
	k.IPVS = dryIPVS{k.IPVS, note}
	k.IPSet = dryIPSet{k.IPSet, note}
	k.Routing = dryRouting{k.Routing, note}
	k.Sysctl = drySysctl{k.Sysctl, note}
	k.Conntrack = dryConntrack{note}
	tables := make(map[ip.Family]NAT, len(k.NAT))
	for family, t := range k.NAT {
		tables[family] = dryNAT{t, note}
	}
	k.NAT = tables
	if k.Loopback != nil {
		k.Loopback = dryLoopback{k.Loopback, note}
	}
	if k.KubeProxy != nil {
		k.KubeProxy = dryKubeProxy{k.KubeProxy, note}
	}
	return k
}

type noteFunc = func(part, operation, change string)

// pretend notes changes instead of applying them.
func pretend[C fmt.Stringer](note noteFunc, part string, changes []C, operation func(C) string) []kernel.Failure[C] {
	for _, c := range changes {
		note(part, operation(c), c.String())
	}
	return nil
}

type dryIPVS struct {
	IPVS
	note noteFunc
}

func (k dryIPVS) Apply(changes []ipvs.Change) []ipvs.Failure {
	return pretend(k.note, "ipvs", changes, func(c ipvs.Change) string { return c.Op.String() })
}

type dryIPSet struct {
	IPSet
	note noteFunc
}

func (k dryIPSet) Apply(changes []ipset.Change) []ipset.Failure {
	return pretend(k.note, "ipset", changes, func(c ipset.Change) string { return c.Op.String() })
}

type dryNAT struct {
	NAT
	note noteFunc
}

func (k dryNAT) Apply(changes []nat.Change) []nat.Failure {
	return pretend(k.note, "iptables", changes, func(c nat.Change) string { return c.Op.String() })
}

type dryRouting struct {
	Routing
	note noteFunc
}

func (k dryRouting) Apply(changes []routing.Change) []routing.Failure {
	return pretend(k.note, "routing", changes, func(c routing.Change) string { return c.Op.String() })
}

type drySysctl struct {
	Sysctl
	note noteFunc
}

func (k drySysctl) Apply(changes []sysctl.Change) []sysctl.Failure {
	return pretend(k.note, "sysctl", changes, func(sysctl.Change) string { return "set" })
}

type dryLoopback struct {
	Loopback
	note noteFunc
}

func (k dryLoopback) Apply(changes []loopback.Change) []loopback.Failure {
	return pretend(k.note, "nftables", changes, func(loopback.Change) string { return "write" })
}

type dryKubeProxy struct {
	KubeProxy
	note noteFunc
}

func (k dryKubeProxy) Apply(changes []kubeproxy.Change) []kubeproxy.Failure {
	return pretend(k.note, "nftables", changes, func(kubeproxy.Change) string { return "delete table" })
}

// dryConntrack deletes nothing and notes nothing: which flows a write would delete is known
// only when the table is searched.
type dryConntrack struct{ note noteFunc }

func (k dryConntrack) Delete([]conntrack.Match) (int, error) { return 0, nil }
