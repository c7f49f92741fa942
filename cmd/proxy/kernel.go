package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// machine is the real kernel.
type machine struct {
	reconcile.Kernel
	sysctl  *sysctl.Proc
	record  *sysctl.Recorded // nil if values cannot be recorded
	ipvs    *ipvs.Netlink    // nil if it is not to be loaded
	routing *routing.Netlink
	unread  []error // families that are not served although the kernel has them
}

// openKernel opens every kernel interface. If one is missing it returns an error that
// names the fix. A missing family is not served instead, unless it is the node's primary one.
// Opening loads ip_vs, ip_set and nf_conntrack_netlink, except those that are among unloaded: of
// these the kernel has no state, and it can only be read.
func openKernel(ctx context.Context, cfg *config.Config, unloaded ...string) (*machine, error) {
	var m machine
	var errs [4]error
	m.IPVS, m.IPSet = noIPVS{}, noSets{}
	if !slices.Contains(unloaded, "ip_vs") {
		m.ipvs, errs[0] = ipvs.New()
		m.IPVS = m.ipvs
	}
	if !slices.Contains(unloaded, "ip_set") {
		m.IPSet, errs[1] = ipset.New()
	}
	m.routing, errs[2] = routing.New()
	flows, err := openConntrack(unloaded)
	if !errors.Is(err, conntrack.ErrMissing) {
		errs[3] = err
	}
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	m.routing.VIPTable = cfg.Plan.VIPs.Table
	m.sysctl = sysctl.New()
	m.Routing, m.Sysctl, m.NAT = m.routing, m.sysctl, map[ip.Family]reconcile.NAT{}
	if flows != nil {
		m.Conntrack = flows
	} else {
		klog.FromContext(ctx).Error(err, "Not deleting conntrack entries of removed UDP endpoints")
	}
	if err := m.openNAT(ctx, cfg); err != nil {
		return nil, err
	}
	m.openLoopback(ctx, &cfg.Plan)
	if tables, err := nft.NewKubeProxyTables(); err == nil {
		m.KubeProxy, m.Native = tables, nft.MarkReader{}
	}
	return &m, nil
}

func openConntrack(unloaded []string) (*conntrack.Netlink, error) {
	if slices.Contains(unloaded, "nf_conntrack_netlink") {
		return nil, conntrack.ErrMissing
	}
	return conntrack.New()
}

// noIPVS is IPVS of a kernel that has not loaded it. It is only read.
type noIPVS struct{}

func (noIPVS) Observe() (ipvs.State, error)       { return ipvs.State{}, nil }
func (noIPVS) Count() (int, error)                { return 0, nil }
func (noIPVS) Apply([]ipvs.Change) []ipvs.Failure { panic("IPVS is not loaded") }

func (noIPVS) Connections(ipvs.Key) (map[netip.AddrPort]ipvs.Connections, error) { return nil, nil }
func (noIPVS) RealServers(ipvs.Key) (map[netip.AddrPort]ipvs.RealServer, error)  { return nil, nil }

// noSets are the sets of a kernel that has not loaded ip_set. They are only read.
type noSets struct{}

func (noSets) Observe(func(string) bool) (ipset.State, error) { return ipset.State{}, nil }
func (noSets) Sizes([]string) (map[string]int, error)         { return nil, nil }
func (noSets) Has(ipset.Set, ipset.Entry) (bool, error)       { return false, nil }
func (noSets) Apply([]ipset.Change) []ipset.Failure           { panic("ip_set is not loaded") }

// openLoopback finds nft. Without it node ports are not served on the loopback address;
// everything else works.
func (m *machine) openLoopback(ctx context.Context, cfg *plan.Config) {
	rules, err := nft.NewLoopbackRules()
	if err == nil {
		m.Loopback = rules
		return
	}
	if cfg.LocalhostNodePorts {
		klog.FromContext(ctx).Info("Not serving node ports on the loopback address", "reason", err.Error())
	}
	cfg.LocalhostNodePorts = false
}

// openNAT finds the iptables programs of each family, of the back end that the node
// uses and of the other one, and reads the rules once. As in kube-proxy, the family that is not the
// node's primary one may be missing, if the kernel does not support it or its programs are not
// installed. Any other error ends
// the process and leaves the kernel unchanged: the existing rules are better than a
// family that is not served although it has Services.
func (m *machine) openNAT(ctx context.Context, cfg *config.Config) error {
	choice, err := nat.Choose()
	if err != nil {
		return err
	}
	return m.openFamilies(ctx, &cfg.Plan, choice, natOpener{
		open:    func(f ip.Family, v nat.Variant) (reconcile.NAT, error) { return nat.Open(f, v) },
		hasIPv6: hasIPv6,
		primary: func() ip.Family { return findPrimaryFamily(ctx, cfg) },
	})
}

// natOpener is the part of the machine that openFamilies needs.
type natOpener struct {
	open    func(ip.Family, nat.Variant) (reconcile.NAT, error)
	hasIPv6 func() bool
	primary func() ip.Family // the family that must not be missing; may wait for the API server
}

func (m *machine) openFamilies(ctx context.Context, cfg *plan.Config, choice nat.Choice, o natOpener) error {
	tables, errs := make([]reconcile.NAT, len(cfg.Families)), make([]error, len(cfg.Families))
	var all sync.WaitGroup
	for i, family := range cfg.Families {
		if family == ip.IPv6 && !o.hasIPv6() {
			errs[i] = unix.EAFNOSUPPORT
			continue
		}
		all.Go(func() {
			if tables[i], errs[i] = o.open(family, choice.Use); errs[i] == nil {
				errs[i] = kernel.Retry(func() error { _, err := tables[i].Observe(nat.Owned{}); return err })
			}
			if t, ok := tables[i].(*nat.IPTables); ok && errs[i] == nil && choice.Use == nat.Legacy {
				if err := t.CheckNAT(); nat.NoFamily(err) {
					errs[i] = err
				}
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
		case !nat.NoFamily(errs[i]):
			return fmt.Errorf("cannot read the %s rules of %s, leaving everything unchanged: %w", family, choice.Use, errs[i])
		}
	}
	if len(usable) == 0 {
		return errors.Join(errs...)
	}
	for i, family := range cfg.Families {
		if errs[i] != nil {
			if err := m.omit(ctx, family, errs[i], o); err != nil {
				return err
			}
		}
	}
	cfg.Families = usable
	klog.FromContext(ctx).Info("Using the iptables back end of the node", "programs", choice.Use.String(), "reason", choice.Why)
	m.openOther(ctx, choice, usable, o)
	return nil
}

// omit notes that a family is not served, for the reason why. It returns an error if the family is
// the primary one. A kernel without IPv6 has no node whose primary family it is.
func (m *machine) omit(ctx context.Context, family ip.Family, why error, o natOpener) error {
	exists := family == ip.IPv4 || o.hasIPv6()
	if exists && family == o.primary() {
		return fmt.Errorf("cannot serve %s, the node's primary family (--bind-address, else the Node's first address), leaving everything unchanged: %w", family, why)
	}
	klog.FromContext(ctx).Info("Not serving "+family.String(), "reason", why.Error())
	if exists {
		m.unread = append(m.unread, fmt.Errorf("leaving %s unchanged: %w", family, why))
	}
	return nil
}

// openOther opens the back end that the node does not use. kube-proxy or an earlier
// version of ours may have left rules in it.
func (m *machine) openOther(ctx context.Context, choice nat.Choice, families []ip.Family, o natOpener) {
	m.Leftovers.Programs = choice.Other.String()
	m.Leftovers.Unseen = choice.Unseen
	if choice.Unseen {
		klog.FromContext(ctx).Info("Cannot read the other iptables back end because its programs are not installed", "used", choice.Use.String())
	}
	if !choice.HasOther {
		return
	}
	for _, family := range families {
		tables, err := o.open(family, choice.Other)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot look for leftovers in the other iptables back end", "family", family.String(), "programs", choice.Other.String())
			m.Leftovers.Unseen = true
			continue
		}
		if m.Leftovers.NAT == nil {
			m.Leftovers.NAT = map[ip.Family]reconcile.NAT{}
		}
		m.Leftovers.NAT[family] = tables
	}
}

// hasIPv6 reports whether the node has IPv6: not with the kernel's parameter ipv6.disable=1, and not
// with the sysctl, with which the kernel refuses IPv6 addresses.
func hasIPv6() bool {
	s, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		unix.Close(s)
	}
	return !errors.Is(err, unix.EAFNOSUPPORT) && !isOne("/proc/sys/net/ipv6/conf/all/disable_ipv6")
}

// isOne reports whether a file contains 1.
func isOne(file string) bool {
	text, err := os.ReadFile(file)
	return err == nil && strings.TrimSpace(string(text)) == "1"
}

// recordSysctls records the previous values of kernel parameters in a folder. If that
// fails, it only logs the failure: serving matters more.
func (m *machine) recordSysctls(ctx context.Context, folder string) {
	identity, err := sysctl.Identity()
	if err == nil {
		m.record, err = sysctl.Record(m.sysctl, folder, identity)
	}
	unrecorded := func(err error) {
		klog.FromContext(ctx).Error(err, "Cannot record kernel parameters in --state-dir, --cleanup will not restore them")
	}
	if err != nil {
		unrecorded(err)
		return
	}
	m.record.Unrecorded = unrecorded
	m.Sysctl = m.record
}

// setSysctls sets the parameters that this node needs. It writes only those that
// differ, so an unprivileged process succeeds if they are set already.
func (m *machine) setSysctls(ctx context.Context, cfg *plan.Config) error {
	inventory, err := m.routing.Inventory()
	if err != nil {
		return err
	}
	node := plan.Node{Inventory: inventory, Kernel: kernelVersion()}
	// The process that serves may not be allowed to load the module once pods have
	// a bridge.
	node.BridgeNetfilter = m.bridgeNetfilterFor(ctx)(plan.MayEnableBridgeNetfilter(cfg, &node))
	node.Refuses = m.refuses(ctx, plan.ForNode(cfg, &node).Chains)
	return setSysctls(ctx, m.Sysctl, plan.ForNode(cfg, &node).Sysctls)
}

// refuses returns the families whose forwarded packets another program may drop; see plan.Refuses. If
// some rules cannot be read, it returns all families.
func (m *machine) refuses(ctx context.Context, chains []nat.Chain) map[ip.Family]bool {
	own := nat.Owned{Prefixes: plan.ReplacedPrefixes, Chains: chains}
	rules, native, unread := map[ip.Family]nat.State{}, []nft.MarkUse(nil), error(nil)
	for family, tables := range m.NAT {
		state, err := tables.Observe(own)
		rules[family], unread = state, errors.Join(unread, err)
	}
	if m.Native != nil {
		uses, err := m.Native.Observe()
		native, unread = uses, errors.Join(unread, err)
	}
	if unread == nil {
		return plan.Refuses(rules, native)
	}
	klog.FromContext(ctx).Info("Not enabling br_netfilter because the rules of other programs cannot be read", "reason", unread.Error())
	out := map[ip.Family]bool{}
	for family := range m.NAT {
		out[family] = true
	}
	return out
}

func setSysctls(ctx context.Context, k sysctlKernel, want sysctl.State) error {
	// A parameter that cannot be read is written; the error of the write is reported.
	have := sysctl.ObserveReadable(k.Observe, maps.Keys(want))
	return kernel.Join(applySysctls(ctx, k, sysctl.Diff(have, want)))
}

// applySysctls writes parameters, and logs each as the reconciler does.
func applySysctls(ctx context.Context, k sysctlKernel, changes []sysctl.Change) []sysctl.Failure {
	for _, c := range changes {
		klog.FromContext(ctx).V(4).Info("Changing the kernel", "part", "sysctl", "change", c.String())
	}
	return k.Apply(changes)
}

// restoreSysctls restores changed parameters, except forwarding, on which other programs have come
// to rely. If kube-proxy serves the node now, it keeps those that kube-proxy needs: all except those
// of reply routing.
func (m *machine) restoreSysctls(kubeProxy bool) error {
	if m.record == nil {
		return nil
	}
	return m.record.Restore(func(key string) bool {
		return key == plan.IPForward || kubeProxy && key != plan.SrcValidMark && key != plan.SNATReroute
	})
}

// rerouteReplies enables the second route lookup of replies when the process ends: nothing
// would enable it if another program added a policy rule later.
func rerouteReplies(ctx context.Context, k sysctlKernel) error {
	have, err := k.Observe([]string{plan.SNATReroute})
	if err != nil || have[plan.SNATReroute] != "0" {
		return err
	}
	return setSysctls(ctx, k, sysctl.State{plan.SNATReroute: "1"})
}

// prepare checks that the scheduler exists and sets the timeouts. As under kube-proxy, Services
// are served with the previous timeouts if the kernel refuses these.
func prepare(ctx context.Context, cfg *config.Config, k preparable) error {
	if err := chooseScheduler(&cfg.Plan, k.Probe); err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	if t := cfg.IPVSTimeouts; t != (ipvs.Timeouts{}) {
		logger.V(4).Info("Changing the kernel", "part", "ipvs", "change", fmt.Sprintf("set timeouts to %+v", t))
	}
	if err := k.SetTimeouts(cfg.IPVSTimeouts); err != nil {
		logger.Error(err, "Cannot set the IPVS timeouts, keeping those of the kernel")
	}
	return nil
}

// preparable is the part of IPVS that the start needs.
type preparable interface {
	Probe(scheduler string) error
	SetTimeouts(ipvs.Timeouts) error
}

// chooseScheduler replaces a scheduler that the kernel lacks by the first one that it has:
// serving with another scheduler is better than not serving.
func chooseScheduler(cfg *plan.Config, probe func(string) error) error {
	err := probe(cfg.Scheduler)
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOENT) && slices.Contains(ipvs.Schedulers, cfg.Scheduler) {
		for _, other := range ipvs.Schedulers {
			if probe(other) == nil {
				cfg.MissingScheduler, cfg.Scheduler = cfg.Scheduler, other
				return nil
			}
		}
	}
	return fmt.Errorf("--ipvs-scheduler %s: %w", cfg.Scheduler, err)
}

// kernelVersion reads uname(2). It returns the zero version if that fails.
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

// bridgeNetfilter reports whether br_netfilter passes bridged packets to the rules of every
// served family, and whether this can be enabled.
func (m *machine) bridgeNetfilter() plan.BridgeNetfilter {
	out := plan.BridgeEnabled
	for family := range m.NAT {
		key := plan.BridgeSysctls[family]
		have, err := m.sysctl.Observe([]string{key})
		switch {
		case err != nil || have[key] != "1" && !m.sysctl.Writable(key):
			return plan.BridgeUnavailable
		case have[key] != "1":
			out = plan.BridgeAvailable
		}
	}
	return out
}

// bridgeNetfilterFor returns a function like bridgeNetfilter. With load, it first tries to load
// br_netfilter if that is missing and kernel parameters can be set. It tries only once.
func (m *machine) bridgeNetfilterFor(ctx context.Context) func(load bool) plan.BridgeNetfilter {
	var tried sync.Once
	return func(load bool) plan.BridgeNetfilter {
		if load && m.bridgeNetfilter() == plan.BridgeUnavailable && m.sysctl.Writable(plan.IPForward) {
			tried.Do(func() { m.loadBridgeNetfilter(ctx) })
		}
		return m.bridgeNetfilter()
	}
}

// loadBridgeNetfilter loads br_netfilter if possible, without passing bridged packets to the rules:
// that is for the plan to decide. Without the module, flows between pods on one bridge are
// masqueraded.
func (m *machine) loadBridgeNetfilter(ctx context.Context) {
	missing := slices.DeleteFunc(slices.Collect(maps.Values(plan.BridgeSysctls)), func(key string) bool {
		known, err := m.sysctl.Exists(key)
		return known || err != nil
	})
	if output, err := exec.CommandContext(ctx, "modprobe", "br_netfilter").CombinedOutput(); err != nil {
		klog.FromContext(ctx).Info("Cannot load br_netfilter, masquerading Service traffic between pods on one bridge",
			"reason", err.Error(), "output", strings.TrimSpace(string(output)))
		return
	}
	for _, key := range missing {
		_ = m.sysctl.Apply([]sysctl.Change{{Key: key, Value: "0"}}) // not all kernels have both
	}
}

// rulesWatched reports whether nat.Watcher is notified of every change of iptables
// rules. It is not for iptables-legacy.
func (m *machine) rulesWatched() bool {
	for _, tables := range m.NAT {
		if t, ok := tables.(*nat.IPTables); !ok || t.Variant() != nat.NFT {
			return false
		}
	}
	return true
}
