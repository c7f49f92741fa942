package apply

import (
	"fmt"
	"time"

	"k8s.io/klog/v2"

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

// Meter receives the outcome of every write, by the part of the kernel: ipvs, ipset,
// iptables, nftables, routing, sysctl or conntrack. Its methods must not block. Package
// metrics implements it.
type Meter interface {
	Wrote(part string, took time.Duration, refused int) // one call, with any number of changes
	Refused(part, operation string)                     // one change
	Forgot(flows int)                                   // deleted from conntrack
}

// Metered returns the same kernel with a meter on each of its parts.
func (k Kernel) Metered(m Meter) Kernel {
	k.IPVS = meteredIPVS{k.IPVS, m}
	k.IPSet = meteredIPSet{k.IPSet, m}
	k.Routing = meteredRouting{k.Routing, m}
	k.Sysctl = meteredSysctl{k.Sysctl, m}
	k.Conntrack = meteredConntrack{k.Conntrack, m}
	tables := make(map[ip.Family]NAT, len(k.NAT))
	for family, t := range k.NAT {
		tables[family] = meteredNAT{t, m}
	}
	k.NAT = tables
	if k.Loopback != nil {
		k.Loopback = meteredLoopback{k.Loopback, m}
	}
	if k.KubeProxy != nil {
		k.KubeProxy = meteredKubeProxy{k.KubeProxy, m}
	}
	return k
}

// measure applies changes and reports the outcome to the meter.
func measure[C fmt.Stringer](m Meter, part string, changes []C, apply func([]C) []kernel.Failure[C], operation func(C) string) []kernel.Failure[C] {
	if v := klog.V(4); v.Enabled() {
		for _, c := range changes {
			v.InfoS("Changing the kernel", "part", part, "change", c.String())
		}
	}
	began := time.Now()
	failures := apply(changes)
	m.Wrote(part, time.Since(began), len(failures))
	for _, f := range failures {
		m.Refused(part, operation(f.Change))
	}
	return failures
}

type meteredIPVS struct {
	IPVS
	meter Meter
}

func (k meteredIPVS) Apply(changes []ipvs.Change) []ipvs.Failure {
	return measure(k.meter, "ipvs", changes, k.IPVS.Apply, func(c ipvs.Change) string { return c.Op.String() })
}

type meteredIPSet struct {
	IPSet
	meter Meter
}

func (k meteredIPSet) Apply(changes []ipset.Change) []ipset.Failure {
	return measure(k.meter, "ipset", changes, k.IPSet.Apply, func(c ipset.Change) string { return c.Op.String() })
}

type meteredNAT struct {
	NAT
	meter Meter
}

func (k meteredNAT) Apply(changes []nat.Change) []nat.Failure {
	return measure(k.meter, "iptables", changes, k.NAT.Apply, func(c nat.Change) string { return c.Op.String() })
}

type meteredRouting struct {
	Routing
	meter Meter
}

func (k meteredRouting) Apply(changes []routing.Change) []routing.Failure {
	return measure(k.meter, "routing", changes, k.Routing.Apply, func(c routing.Change) string { return c.Op.String() })
}

type meteredSysctl struct {
	Sysctl
	meter Meter
}

func (k meteredSysctl) Apply(changes []sysctl.Change) []sysctl.Failure {
	return measure(k.meter, "sysctl", changes, k.Sysctl.Apply, func(sysctl.Change) string { return "set" })
}

type meteredLoopback struct {
	Loopback
	meter Meter
}

func (k meteredLoopback) Apply(changes []loopback.Change) []loopback.Failure {
	return measure(k.meter, "nftables", changes, k.Loopback.Apply, func(loopback.Change) string { return "write" })
}

type meteredKubeProxy struct {
	KubeProxy
	meter Meter
}

func (k meteredKubeProxy) Apply(changes []kubeproxy.Change) []kubeproxy.Failure {
	return measure(k.meter, "nftables", changes, k.KubeProxy.Apply, func(kubeproxy.Change) string { return "delete table" })
}

type meteredConntrack struct {
	Conntrack
	meter Meter
}

func (k meteredConntrack) Delete(matches []conntrack.Match) (int, error) {
	began := time.Now()
	flows, err := k.Conntrack.Delete(matches)
	refused := 0
	if err != nil {
		refused = 1
		k.meter.Refused("conntrack", "delete entries")
	}
	k.meter.Wrote("conntrack", time.Since(began), refused)
	k.meter.Forgot(flows)
	return flows, err
}
