package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-base/configz"
	componentmetrics "k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // rest_client_* metrics, as in kube-proxy
	_ "k8s.io/component-base/metrics/prometheus/version"    // kubernetes_build_info, as in kube-proxy
	zpages "k8s.io/component-base/zpages/features"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/metrics"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/proxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/apiserver"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/manifest"
)

// drainPeriod is how often draining real servers are polled. kube-proxy polls every
// minute, and keeps removed pods in the kernel until then.
const drainPeriod = 5 * time.Second

// run performs the configured action.
func run(ctx context.Context, cfg config.Config) error {
	if cfg.Action == config.DryRun {
		return printDryRun(ctx, cfg, os.Stdout, os.Stderr)
	}
	kernel, err := openKernel(ctx, &cfg)
	if err != nil {
		return err
	}
	kernel.recordSysctls(ctx, cfg.StateDir)
	if cfg.Action == config.Cleanup {
		if err := awaitKubeProxy(ctx, doctor.KubeProxyMode, func() ([]ip.Family, error) {
			return reconcile.NotTakenOver(&cfg.Plan, kernel.Kernel)
		}); err != nil {
			return err
		}
		return cleanup(&cfg, kernel)
	}
	setOOMScore(ctx, cfg.OOMScoreAdj)
	if err := prepare(ctx, &cfg, kernel.ipvs); err != nil {
		return err
	}
	setConntrack(ctx, &cfg.Conntrack, kernel.Sysctl)
	if cfg.Action == config.InitOnly {
		return kernel.setSysctls(ctx, &cfg.Plan)
	}
	return serve(ctx, &cfg, kernel)
}

// kubeProxyLimit is enough for the first sync of a kube-proxy on a slow node. kubeProxyPeriod
// is the time between two checks.
const (
	kubeProxyLimit  = 2 * time.Minute
	kubeProxyPeriod = time.Second
)

// awaitKubeProxy waits until a kube-proxy that runs on the node has written its rules of all
// families. kube-proxy reports that it is ready long before its first sync ends, which writes
// IPv4 and IPv6 minutes apart on a busy node. Until then only our rules and virtual servers
// serve. If they were removed, new connections would be refused. awaitKubeProxy returns at
// once if no kube-proxy runs, or if its mode is nftables, which deletes our rules at its start.
func awaitKubeProxy(ctx context.Context, kubeProxy func(context.Context) string, pending func() ([]ip.Family, error)) error {
	deadline := time.Now().Add(kubeProxyLimit)
	for logged := false; ; logged = true {
		mode := kubeProxy(ctx)
		if mode == "" || mode == "nftables" {
			return nil
		}
		families, err := pending()
		if err != nil || len(families) == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("a kube-proxy (mode: %s) runs, but has not written its rules for %v yet: clean up again when it has, or stop it", mode, families)
		}
		if !logged {
			klog.FromContext(ctx).Info("Waiting for kube-proxy to write its rules", "mode", mode, "families", families)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(kubeProxyPeriod):
		}
	}
}

// cleanup removes everything that is ours. It restores kernel parameters last, when
// nothing needs them any more.
func cleanup(cfg *config.Config, kernel *machine) error {
	kubeProxyActive, err := reconcile.Cleanup(&cfg.Plan, kernel.Kernel)
	return errors.Join(append(kernel.unread, err, kernel.restoreSysctls(kubeProxyActive), manifest.Forget(cfg.StateDir))...)
}

// serve programs the kernel, once or until the context ends. The kernel continues to
// serve afterwards.
func serve(ctx context.Context, cfg *config.Config, kernel *machine) error {
	if cfg.ShowHiddenMetricsForVersion != "" {
		componentmetrics.SetShowHidden()
	}
	recorder, err := metrics.New(legacyregistry.Register)
	if err != nil {
		return err
	}
	state := health.NewServer(cfg.SyncPeriod, recorder, cfg.Plan.Families...)
	var p *proxy.Proxy // set before it uses checks
	checks := health.NewHealthChecks(ctx, state.Healthy, func(name types.NamespacedName, address string, err error) {
		p.HealthCheckRefused(name, address, err)
	})
	defer checks.Close()
	src, events, err := newSource(ctx, cfg)
	if err != nil {
		return err
	}
	if cfg.ServiceMetrics > 0 && cfg.Action == config.Serve {
		names := newServiceNames(src)
		legacyregistry.CustomMustRegister(metrics.NewTraffic(cfg.ServiceMetrics, ipvs.ReadStats, names.find))
		src = names
	}
	p = proxy.New(proxy.Options{
		Config:          cfg.Plan,
		Kernel:          kernel.Metered(recorder),
		KernelVersion:   kernelVersion(),
		ProbeScheduler:  kernel.ipvs.Probe,
		BridgeNetfilter: kernel.bridgeNetfilterFor(ctx),
		ReadOnly:        !kernel.sysctl.Writable(plan.SrcValidMark),
		APIServer:       apiServers(&cfg.Source),
		Network:         kernel.routing,
		Rules:           nat.Watcher{},
		RulesWatched:    kernel.rulesWatched(),
		HealthChecks:    checks,
		Observer:        proxy.Observers{recorder, state},
		Meter:           recorder,
		Events:          events,
		MinSyncPeriod:   cfg.MinSyncPeriod,
		SyncPeriod:      cfg.SyncPeriod,
		DrainPeriod:     drainPeriod,
		DrainDeadline:   cfg.DrainDeadline,
	})
	if cfg.Action == config.Once {
		return p.Once(ctx, src)
	}
	if z, err := configz.New("kubeproxy.config.k8s.io"); err == nil {
		z.Set(&cfg.Proxy)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	serveHTTP(ctx, cancel, cfg, state)
	err = p.Run(ctx, src)
	if problem := rerouteReplies(ctx, kernel.sysctl); problem != nil && kernel.sysctl.Writable(plan.SNATReroute) {
		klog.FromContext(ctx).Error(problem, "Cannot enable the second route lookup of replies (snat_reroute)")
	}
	klog.FromContext(ctx).Info("Stopping, the kernel continues to serve")
	if cause := context.Cause(ctx); err == nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// serveHTTP serves health checks, metrics and probes. It ends the program if a required
// address cannot be bound.
func serveHTTP(ctx context.Context, cancel context.CancelCauseFunc, cfg *config.Config, state *health.Server) {
	serve := func(run func(context.Context, netip.AddrPort, bool) error, address netip.AddrPort) {
		if err := run(ctx, address, cfg.BindAddressHardFail); err != nil {
			cancel(err)
		}
	}
	go serve(state.Run, cfg.Healthz)
	state.SetNode(cfg.Plan.NodeName)
	go func() { _ = state.RunProbes(ctx, cfg.Probes) }() // returns an error only if a failure is fatal
	go func() {
		if at := awaitMetricsAddress(ctx, cfg); ctx.Err() == nil {
			serve(health.NewMetricsServer(pages(cfg)).Run, at)
		}
	}()
}

// awaitMetricsAddress returns the address that serves metrics. For a CIDR it waits for
// a node address in it, which a node that has just started may not have yet.
func awaitMetricsAddress(ctx context.Context, cfg *config.Config) netip.AddrPort {
	for told := false; ; told = true {
		at, err := metricsAddress(cfg)
		if err == nil {
			return at
		}
		if !told {
			klog.FromContext(ctx).Error(err, "Cannot serve metrics, retrying")
		}
		select {
		case <-ctx.Done():
			return at
		case <-time.After(metricsRetry):
		}
	}
}

// metricsRetry is how often the node's addresses are read until one matches.
const metricsRetry = 5 * time.Second

// metricsAddress returns the address now: for a CIDR, the lowest node address in it.
func metricsAddress(cfg *config.Config) (netip.AddrPort, error) {
	if !cfg.MetricsIn.IsValid() {
		return cfg.Metrics, nil
	}
	have, err := net.InterfaceAddrs()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var vips []net.Addr
	if dummy, err := net.InterfaceByName(routing.DummyLink); err == nil {
		if vips, err = dummy.Addrs(); err != nil {
			return netip.AddrPort{}, err
		}
	}
	a, ok := lowestAddress(cfg.MetricsIn, have, vips)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("--metrics-bind-address: the node has no address in %s", cfg.MetricsIn)
	}
	return netip.AddrPortFrom(a, cfg.Metrics.Port()), nil
}

// lowestAddress returns the lowest address in a CIDR that is not a VIP. The node has VIPs of an
// earlier process when this one starts; other hosts do not reach the node there.
func lowestAddress(in netip.Prefix, have, vips []net.Addr) (netip.Addr, bool) {
	isVIP := map[string]bool{}
	for _, vip := range vips {
		isVIP[vip.String()] = true
	}
	var found []netip.Addr
	for _, a := range have {
		if p, err := netip.ParsePrefix(a.String()); err == nil && in.Contains(p.Addr()) && !isVIP[a.String()] {
			found = append(found, p.Addr())
		}
	}
	if len(found) == 0 {
		return netip.Addr{}, false
	}
	return slices.MinFunc(found, netip.Addr.Compare), true
}

// pages returns the pages that the configuration enables.
func pages(cfg *config.Config) health.Pages {
	p := health.Pages{Profiling: cfg.Profiling, Status: cfg.Features.Enabled(zpages.ComponentStatusz)}
	if cfg.Features.Enabled(zpages.ComponentFlagz) {
		p.Flags = cfg.Flags
	}
	return p
}

// newSource creates the configured source and its writer of Events. A folder of
// manifests accepts no Events.
func newSource(ctx context.Context, cfg *config.Config) (source.Source, proxy.Events, error) {
	if dir := cfg.Source.Manifests; dir != "" {
		return manifest.New(dir, cfg.Plan.NodeName, cfg.StateDir), event.Discard{}, nil
	}
	client, err := newTrimmingClient(&cfg.Source)
	if err != nil {
		return nil, nil, err
	}
	events := event.NewWriter(client, cfg.Plan.NodeName)
	go events.Run(ctx)
	options := apiserver.Options{Node: cfg.Plan.NodeName, Resync: cfg.Source.ConfigSyncPeriod, UnreachableNodes: cfg.ResetLostNodeConnections}
	return apiserver.New(client, options), events, nil
}

// clientConfig returns the configuration of the API server's client: a kubeconfig, or
// the Pod's service account.
func clientConfig(s *config.Source) (*rest.Config, error) {
	if s.Kubeconfig == "" && s.Master == "" {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags(s.Master, s.Kubeconfig)
}

// apiServers returns the addresses of the API server. There are none if it is
// configured by name, or if there is no API server.
func apiServers(s *config.Source) []netip.AddrPort {
	if s.Manifests != "" {
		return nil
	}
	c, err := clientConfig(s)
	if err != nil {
		return nil // newClient reports the error
	}
	u, _, err := rest.DefaultServerUrlFor(c)
	if err != nil {
		return nil
	}
	defaultPort := "443"
	if u.Scheme == "http" {
		defaultPort = "80"
	}
	a, err := netip.ParseAddrPort(net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), defaultPort)))
	if err != nil {
		return nil
	}
	return []netip.AddrPort{a}
}

// newClient creates a client of the API server.
func newClient(s *config.Source) (*apiclient.Client, error) {
	c, err := restConfig(s)
	if err != nil {
		return nil, err
	}
	return apiclient.New(c)
}

// newTrimmingClient creates a client that does not decode what source.Trim removes.
func newTrimmingClient(s *config.Source) (*apiclient.Client, error) {
	c, err := restConfig(s)
	if err != nil {
		return nil, err
	}
	return apiclient.NewTrimming(c, apiclient.Trim{Label: service.HasLabel, Annotation: source.HasAnnotation})
}

func restConfig(s *config.Source) (*rest.Config, error) {
	c, err := clientConfig(s)
	if err != nil {
		return nil, fmt.Errorf("configuring the API server's client (--kubeconfig, --master): %w", err)
	}
	c.ContentType, c.AcceptContentTypes = s.ContentType, s.AcceptContentType
	c.QPS, c.Burst = s.QPS, s.Burst
	return c, nil
}
