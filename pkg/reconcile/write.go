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

// write applies changes of one part of the kernel, logs and measures them. In a dry run it
// writes nothing.
func write[C fmt.Stringer](k *Kernel, part string, operation func(C) string, apply func([]C) []kernel.Failure[C], changes []C) []kernel.Failure[C] {
	if v := klog.V(4); v.Enabled() && k.dryRun == nil {
		for _, c := range changes {
			v.InfoS("Changing the kernel", "part", part, "change", c.String())
		}
	}
	began := time.Now()
	var failures []kernel.Failure[C]
	if k.dryRun == nil {
		failures = apply(changes)
	} else {
		for _, c := range changes {
			k.dryRun(part, operation(c), c.String())
		}
	}
	if k.meter != nil {
		k.meter.Wrote(part, time.Since(began), len(failures))
		for _, f := range failures {
			k.meter.Refused(part, operation(f.Change))
		}
	}
	return failures
}

// deleteFlows deletes conntrack entries if the kernel has a way to.
func (k *Kernel) deleteFlows(matches []conntrack.Match) error {
	if k.dryRun != nil || k.Conntrack == nil {
		return nil
	}
	began := time.Now()
	flows, err := k.Conntrack.Delete(matches)
	klog.V(4).InfoS("Changing the kernel", "part", "conntrack", "change", "delete entries", "matches", len(matches), "deleted", flows)
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

func (k *Kernel) writeIPVS(c []ipvs.Change) []ipvs.Failure {
	return write(k, "ipvs", func(c ipvs.Change) string { return c.Op.String() }, k.IPVS.Apply, c)
}

func (k *Kernel) writeSets(c []ipset.Change) []ipset.Failure {
	return write(k, "ipset", func(c ipset.Change) string { return c.Op.String() }, k.IPSet.Apply, c)
}

func (k *Kernel) writeRouting(c []routing.Change) []routing.Failure {
	return write(k, "routing", func(c routing.Change) string { return c.Op.String() }, k.Routing.Apply, c)
}

func (k *Kernel) writeSysctls(c []sysctl.Change) []sysctl.Failure {
	return write(k, "sysctl", func(sysctl.Change) string { return "set" }, k.Sysctl.Apply, c)
}

func (k *Kernel) writeNAT(to NAT, c []nat.Change) []nat.Failure {
	return write(k, "iptables", func(c nat.Change) string { return c.Op.String() }, to.Apply, c)
}

func (k *Kernel) writeLoopback(c []nft.LoopbackChange) []nft.LoopbackFailure {
	return write(k, "nftables", func(nft.LoopbackChange) string { return "write" }, k.Loopback.Apply, c)
}

func (k *Kernel) writeKubeProxy(c []nft.KubeProxyChange) []nft.KubeProxyFailure {
	return write(k, "nftables", func(nft.KubeProxyChange) string { return "delete table" }, k.KubeProxy.Apply, c)
}
