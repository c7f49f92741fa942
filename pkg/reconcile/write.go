package reconcile

import (
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
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

// Metered returns the same kernel with a meter on every write.
func (k Kernel) Metered(m Meter) Kernel {
	k.meter = m
	return k
}

// DryRun returns a kernel that reads from k and never writes. Each change is passed to note,
// with the part of the kernel (as for a Meter) and its operation, and counts as applied. No
// conntrack entries are noted: which ones a write would delete is known only when the table
// is searched. note is called from one goroutine.
func (k Kernel) DryRun(note func(part, operation, change string)) Kernel {
	k.dryRun = note
	return k
}

// section is a part of the kernel that takes changes of one type.
type section[C fmt.Stringer] struct {
	part      string
	operation func(C) string
}

var (
	ipvsSection      = section[ipvs.Change]{"ipvs", func(c ipvs.Change) string { return c.Op.String() }}
	ipsetSection     = section[ipset.Change]{"ipset", func(c ipset.Change) string { return c.Op.String() }}
	natSection       = section[nat.Change]{"iptables", func(c nat.Change) string { return c.Op.String() }}
	routingSection   = section[routing.Change]{"routing", func(c routing.Change) string { return c.Op.String() }}
	sysctlSection    = section[sysctl.Change]{"sysctl", func(sysctl.Change) string { return "set" }}
	loopbackSection  = section[nft.LoopbackChange]{"nftables", func(nft.LoopbackChange) string { return "write" }}
	kubeProxySection = section[nft.KubeProxyChange]{"nftables", func(nft.KubeProxyChange) string { return "delete table" }}
)

// to returns the function that applies changes of a section: it logs and measures them, and
// writes nothing in a dry run.
func (s section[C]) to(k *Kernel, apply func([]C) []kernel.Failure[C]) func([]C) []kernel.Failure[C] {
	if k.dryRun != nil {
		apply = func(changes []C) []kernel.Failure[C] {
			for _, c := range changes {
				k.dryRun(s.part, s.operation(c), c.String())
			}
			return nil
		}
	}
	if k.meter == nil {
		return apply
	}
	return func(changes []C) []kernel.Failure[C] {
		if v := klog.V(4); v.Enabled() {
			for _, c := range changes {
				v.InfoS("Changing the kernel", "part", s.part, "change", c.String())
			}
		}
		began := time.Now()
		failures := apply(changes)
		k.meter.Wrote(s.part, time.Since(began), len(failures))
		for _, f := range failures {
			k.meter.Refused(s.part, s.operation(f.Change))
		}
		return failures
	}
}

// deleteFlows deletes conntrack entries.
func (k *Kernel) deleteFlows(matches []conntrack.Match) error {
	if k.dryRun != nil {
		return nil
	}
	began := time.Now()
	flows, err := k.Conntrack.Delete(matches)
	if k.meter == nil {
		return err
	}
	refused := 0
	if err != nil {
		refused = 1
		k.meter.Refused("conntrack", "delete entries")
	}
	k.meter.Wrote("conntrack", time.Since(began), refused)
	k.meter.Forgot(flows)
	return err
}

func (k *Kernel) writeIPVS(c []ipvs.Change) []ipvs.Failure { return ipvsSection.to(k, k.IPVS.Apply)(c) }

func (k *Kernel) writeSets(c []ipset.Change) []ipset.Failure {
	return ipsetSection.to(k, k.IPSet.Apply)(c)
}

func (k *Kernel) writeRouting(c []routing.Change) []routing.Failure {
	return routingSection.to(k, k.Routing.Apply)(c)
}

func (k *Kernel) writeSysctls(c []sysctl.Change) []sysctl.Failure {
	return sysctlSection.to(k, k.Sysctl.Apply)(c)
}

func (k *Kernel) writeNAT(to NAT, c []nat.Change) []nat.Failure { return natSection.to(k, to.Apply)(c) }

func (k *Kernel) writeLoopback(c []nft.LoopbackChange) []kernel.Failure[nft.LoopbackChange] {
	return loopbackSection.to(k, k.Loopback.Apply)(c)
}

func (k *Kernel) writeKubeProxy(c []nft.KubeProxyChange) []kernel.Failure[nft.KubeProxyChange] {
	return kubeProxySection.to(k, k.KubeProxy.Apply)(c)
}
