package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apply"
	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/kubeproxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// machine is the real kernel.
type machine struct {
	apply.Kernel
	sysctl  *sysctl.Proc
	record  *sysctl.Recorded // nil where nothing can be recorded
	ipvs    *ipvs.Netlink
	routing *routing.Netlink
	unread  []error // families that are not served though the kernel has them
}

// openKernel opens every kernel interface. What is missing is an error that
// names the cure, except IPv6, which is then not served.
func openKernel(ctx context.Context, cfg *config.Config) (*machine, error) {
	var m machine
	var errs [4]error
	m.ipvs, errs[0] = ipvs.New()
	sets, err := ipset.New()
	errs[1] = err
	m.routing, errs[2] = routing.New()
	flows, err := conntrack.New()
	errs[3] = err
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	m.sysctl = sysctl.New()
	m.Kernel = apply.Kernel{
		IPVS: m.ipvs, IPSet: sets, Routing: m.routing, Conntrack: flows,
		Sysctl: m.sysctl, NAT: map[ip.Family]apply.NAT{},
	}
	if err := m.openNAT(ctx, &cfg.Plan); err != nil {
		return nil, err
	}
	m.openLoopback(ctx, &cfg.Plan)
	if tables, err := kubeproxy.New(); err == nil {
		m.KubeProxy = tables
	}
	return &m, nil
}

// openLoopback finds nft. Where there is none, node ports are not served on the
// loopback address, and everything else is.
func (m *machine) openLoopback(ctx context.Context, cfg *plan.Config) {
	rules, err := loopback.New()
	if err == nil {
		m.Loopback = rules
		return
	}
	if cfg.LocalhostNodePorts {
		klog.FromContext(ctx).Info("Not serving node ports on the loopback address", "reason", err.Error())
	}
	cfg.LocalhostNodePorts = false
}

// openNAT finds the programs of iptables for each family, of the back end that
// the node uses and of the other one, and reads the rules once. Only IPv6 can be
// left out, where the kernel has no IPv6 or its programs are not there. Any other
// error ends the process with everything left as it is: a family that is not
// served while its Services are there would be worse than the rules that stand.
func (m *machine) openNAT(ctx context.Context, cfg *plan.Config) error {
	choice, err := nat.Choose()
	if err != nil {
		return err
	}
	return m.openFamilies(ctx, cfg, choice, natOpener{
		open:    func(f ip.Family, v nat.Variant) (apply.NAT, error) { return nat.Open(f, v) },
		hasIPv6: hasIPv6,
	})
}

// natOpener is what openFamilies asks of the machine.
type natOpener struct {
	open    func(ip.Family, nat.Variant) (apply.NAT, error)
	hasIPv6 func() bool
}

func (m *machine) openFamilies(ctx context.Context, cfg *plan.Config, choice nat.Choice, o natOpener) error {
	logger := klog.FromContext(ctx)
	tables, errs := make([]apply.NAT, len(cfg.Families)), make([]error, len(cfg.Families))
	var all sync.WaitGroup
	for i, family := range cfg.Families {
		if family == ip.IPv6 && !o.hasIPv6() {
			errs[i] = unix.EAFNOSUPPORT
			continue
		}
		all.Go(func() {
			if tables[i], errs[i] = o.open(family, choice.Use); errs[i] == nil {
				errs[i] = kernel.Retry(func() error { _, err := tables[i].Observe(nat.Own{}); return err })
			}
		})
	}
	all.Wait()
	var usable []ip.Family
	for i, family := range cfg.Families {
		switch {
		case errs[i] == nil:
			m.NAT[family] = tables[i]
			usable = append(usable, family)
		case family == ip.IPv6 && nat.NoIPv6(errs[i]):
			logger.Info("Not serving IPv6", "reason", errs[i].Error())
			if o.hasIPv6() {
				m.unread = append(m.unread, fmt.Errorf("%s is left as it is: %w", family, errs[i]))
			}
		default:
			return fmt.Errorf("cannot read the %s rules of %s, leaving everything as it is: %w", family, choice.Use, errs[i])
		}
	}
	if len(usable) == 0 {
		return errors.Join(errs...)
	}
	cfg.Families = usable
	logger.Info("Using the back end of iptables that the node uses", "programs", choice.Use.String(), "reason", choice.Why)
	m.openOther(ctx, choice, usable, o)
	return nil
}

// openOther opens the back end that is not used. kube-proxy, or an earlier version
// of ours, may have left rules there.
func (m *machine) openOther(ctx context.Context, choice nat.Choice, families []ip.Family, o natOpener) {
	m.Leftovers.Programs = choice.Other.String()
	m.Leftovers.Unseen = choice.Unseen
	if choice.Unseen {
		klog.FromContext(ctx).Info("The other back end of iptables cannot be looked into, its programs are not there", "used", choice.Use.String())
	}
	if !choice.HasOther {
		return
	}
	for _, family := range families {
		tables, err := o.open(family, choice.Other)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot look for leftovers in the other back end of iptables", "family", family.String(), "programs", choice.Other.String())
			m.Leftovers.Unseen = true
			continue
		}
		if m.Leftovers.NAT == nil {
			m.Leftovers.NAT = map[ip.Family]apply.NAT{}
		}
		m.Leftovers.NAT[family] = tables
	}
}

// hasIPv6 reports whether the kernel has sockets of IPv6, which it has not with
// ipv6.disable=1.
func hasIPv6() bool {
	s, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		unix.Close(s)
	}
	return !errors.Is(err, unix.EAFNOSUPPORT)
}

// recordSysctls has the values that kernel parameters had before kept in a
// folder. Where that cannot be, Services matter more, and it is said.
func (m *machine) recordSysctls(ctx context.Context, folder string) {
	identity, err := sysctl.Identity()
	if err == nil {
		m.record, err = sysctl.Record(m.sysctl, folder, identity)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot record kernel parameters in --state-dir, --cleanup will leave them as they are")
		return
	}
	m.Sysctl = m.record
}

// setSysctls sets the parameters that this node needs. A process that is not
// privileged, and finds them so, has nothing to set.
func (m *machine) setSysctls(cfg *plan.Config) error {
	inventory, err := m.routing.Inventory()
	if err != nil {
		return err
	}
	node := plan.Node{Inventory: inventory, Kernel: kernelVersion(), BridgeNetfilter: m.bridgeNetfilter()}
	return setSysctls(m.Sysctl, plan.NodeWide(cfg, &node).Sysctls)
}

func setSysctls(k sysctlKernel, want sysctl.State) error {
	have := sysctl.State{}
	for key := range want {
		// One that cannot be read is written, and that tells what is wrong.
		if s, err := k.Observe([]string{key}); err == nil {
			have[key] = s[key]
		}
	}
	return kernel.Join(k.Apply(sysctl.Diff(have, want)))
}

// restoreSysctls puts back what was changed. Where kube-proxy serves in our place it
// needs what we needed, but for what replies are routed with.
func (m *machine) restoreSysctls(givenBack bool) error {
	if m.record == nil {
		return nil
	}
	return m.record.Restore(func(key string) bool {
		return givenBack && key != plan.SrcValidMark && key != plan.SNATReroute
	})
}

// prepare checks that the scheduler exists, and sets the time-outs.
func (m *machine) prepare(cfg *config.Config) error {
	if err := m.ipvs.Probe(cfg.Plan.Scheduler); err != nil {
		return fmt.Errorf("--ipvs-scheduler %s: %w", cfg.Plan.Scheduler, err)
	}
	return m.ipvs.SetTimeouts(cfg.IPVSTimeouts)
}

// kernelVersion reads uname(2); the zero version is one that cannot be read.
func kernelVersion() plan.Version {
	var u unix.Utsname
	var v plan.Version
	if unix.Uname(&u) != nil {
		return v
	}
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &v.Major, &v.Minor); err != nil {
		return plan.Version{}
	}
	return v
}

// bridgeNetfilter tells whether br_netfilter shows bridged packets to the
// rules of every family that is served, or can be made to.
func (m *machine) bridgeNetfilter() bool {
	for family := range m.NAT {
		key := plan.BridgeSysctls[family]
		if have, err := m.sysctl.Observe([]string{key}); err != nil || have[key] != "1" && !m.sysctl.Writable(key) {
			return false
		}
	}
	return true
}

// loadBridgeNetfilter loads br_netfilter where that is possible. Without it
// flows between pods on one bridge are masqueraded.
func loadBridgeNetfilter(ctx context.Context) {
	if output, err := exec.CommandContext(ctx, "modprobe", "br_netfilter").CombinedOutput(); err != nil {
		klog.FromContext(ctx).Info("Cannot load br_netfilter; pods that reach each other through a Service on one bridge are masqueraded",
			"reason", err.Error(), "output", strings.TrimSpace(string(output)))
	}
}

// rulesWatched reports whether nat.Watcher tells of every change of iptables' rules:
// not of those of iptables-legacy.
func (m *machine) rulesWatched() bool {
	for _, tables := range m.NAT {
		if t, ok := tables.(*nat.IPTables); !ok || t.Variant() != nat.NFT {
			return false
		}
	}
	return true
}
