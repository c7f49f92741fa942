package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-base/configz"
	componentmetrics "k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // rest_client_*, which kube-proxy has too
	_ "k8s.io/component-base/metrics/prometheus/version"    // kubernetes_build_info, likewise
	zpages "k8s.io/component-base/zpages/features"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/apply"
	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/metrics"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/proxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/apiserver"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/manifest"
)

// drainPeriod is how often draining real servers are looked at. kube-proxy
// takes a minute, for which a pod that is gone stays in the kernel.
const drainPeriod = 5 * time.Second

// run does what the configuration says.
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
		return cleanup(&cfg, kernel)
	}
	setOOMScore(ctx, cfg.OOMScoreAdj)
	if err := kernel.prepare(&cfg); err != nil {
		return err
	}
	if !kernel.bridgeNetfilter() {
		loadBridgeNetfilter(ctx)
	}
	setConntrack(ctx, &cfg.Conntrack, kernel.Sysctl)
	if cfg.Action == config.InitOnly {
		return kernel.setSysctls(&cfg.Plan)
	}
	return serve(ctx, &cfg, kernel)
}

// cleanup takes away all that is ours, and puts kernel parameters back last:
// what they were changed for is gone by then.
func cleanup(cfg *config.Config, kernel *machine) error {
	applier := apply.New(&cfg.Plan, kernel.Kernel)
	applier.SetNode(plan.NodeWide(&cfg.Plan, &plan.Node{}))
	err := applier.Cleanup()
	return errors.Join(append(kernel.unread, err, kernel.restoreSysctls(applier.GivenBack()))...)
}

// serve programs the kernel, once or until the context ends. What is in the
// kernel goes on serving afterwards.
func serve(ctx context.Context, cfg *config.Config, kernel *machine) error {
	if cfg.ShowHiddenMetricsForVersion != "" {
		componentmetrics.SetShowHidden()
	}
	recorder, err := metrics.New(legacyregistry.Register)
	if err != nil {
		return err
	}
	state := health.NewServer(cfg.SyncPeriod, recorder)
	checks := health.NewHealthChecks(ctx, nil, state.Healthy)
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
	p := proxy.New(proxy.Options{
		Config:          cfg.Plan,
		Kernel:          kernel.Metered(recorder),
		KernelVersion:   kernelVersion(),
		ProbeScheduler:  kernel.ipvs.Probe,
		BridgeNetfilter: kernel.bridgeNetfilter,
		ReadOnly:        !kernel.sysctl.Writable(plan.SrcValidMark),
		APIServer:       apiServers(&cfg.Source),
		Network:         kernel.routing,
		Rules:           nat.Watcher{},
		RulesWatched:    kernel.rulesWatched(),
		HealthChecks:    checks,
		Observer:        metrics.Observers{recorder, state},
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
	answer(ctx, cancel, cfg, state)
	err = p.Run(ctx, src)
	klog.FromContext(ctx).Info("Stopping, and leaving the kernel as it is programmed")
	if cause := context.Cause(ctx); err == nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// answer serves those who ask for the proxy's state. Where an address must be
// had and cannot, the program ends.
func answer(ctx context.Context, cancel context.CancelCauseFunc, cfg *config.Config, state *health.Server) {
	serve := func(run func(context.Context, netip.AddrPort, bool) error, address netip.AddrPort) {
		if err := run(ctx, address, cfg.BindAddressHardFail); err != nil {
			cancel(err)
		}
	}
	go serve(state.Run, cfg.Healthz)
	state.SetNode(cfg.Plan.NodeName)
	go func() { _ = state.RunProbes(ctx, cfg.Probes) }() // it fails only if it must not
	go func() {
		if at := awaitMetricsAddress(ctx, cfg); ctx.Err() == nil {
			serve(health.NewMetricsServer(pages(cfg)).Run, at)
		}
	}()
}

// awaitMetricsAddress returns where metrics are served. Of a CIDR it is the node's address
// in it, which a node that has just started may not have yet.
func awaitMetricsAddress(ctx context.Context, cfg *config.Config) netip.AddrPort {
	for told := false; ; told = true {
		at, err := metricsAddress(cfg)
		if err == nil {
			return at
		}
		if !told {
			klog.FromContext(ctx).Error(err, "Cannot serve metrics, trying again")
		}
		select {
		case <-ctx.Done():
			return at
		case <-time.After(metricsRetry):
		}
	}
}

// metricsRetry is how often the node's addresses are looked at until one is found.
const metricsRetry = 5 * time.Second

// metricsAddress finds the address now: the lowest one in the CIDR, if there is a CIDR.
func metricsAddress(cfg *config.Config) (netip.AddrPort, error) {
	if !cfg.MetricsIn.IsValid() {
		return cfg.Metrics, nil
	}
	have, err := net.InterfaceAddrs()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var found []netip.Addr
	for _, a := range have {
		if p, err := netip.ParsePrefix(a.String()); err == nil && cfg.MetricsIn.Contains(p.Addr()) {
			found = append(found, p.Addr())
		}
	}
	if len(found) == 0 {
		return netip.AddrPort{}, fmt.Errorf("--metrics-bind-address: the node has no address in %s", cfg.MetricsIn)
	}
	return netip.AddrPortFrom(slices.MinFunc(found, netip.Addr.Compare), cfg.Metrics.Port()), nil
}

// pages are those that the configuration turns on.
func pages(cfg *config.Config) health.Pages {
	p := health.Pages{Profiling: cfg.Profiling, Status: cfg.Features.Enabled(zpages.ComponentStatusz)}
	if cfg.Features.Enabled(zpages.ComponentFlagz) {
		p.Flags = cfg.Flags
	}
	return p
}

// newSource makes the source that the configuration names, and what writes
// Events there. A folder of manifests takes none.
func newSource(ctx context.Context, cfg *config.Config) (source.Source, proxy.Events, error) {
	if dir := cfg.Source.Manifests; dir != "" {
		return manifest.New(dir, cfg.Plan.NodeName), event.Discard{}, nil
	}
	client, err := newClient(&cfg.Source)
	if err != nil {
		return nil, nil, err
	}
	events := event.NewWriter(client, cfg.Plan.NodeName)
	go events.Run(ctx)
	options := apiserver.Options{Node: cfg.Plan.NodeName, Resync: cfg.Source.ConfigSyncPeriod, LostNodes: cfg.ResetLostNodeConnections}
	return apiserver.New(client, options), events, nil
}

// clientConfig says how the API server is reached: by a kubeconfig, or with the
// Pod's service account.
func clientConfig(s *config.Source) (*rest.Config, error) {
	if s.Kubeconfig == "" && s.Master == "" {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags(s.Master, s.Kubeconfig)
}

// apiServers are the addresses by which the API server is reached. There is none
// where it has a name, or where there is no API server.
func apiServers(s *config.Source) []netip.AddrPort {
	if s.Manifests != "" {
		return nil
	}
	c, err := clientConfig(s)
	if err != nil {
		return nil // newClient says so
	}
	u, err := url.Parse(c.Host)
	if err != nil {
		return nil
	}
	a, err := netip.ParseAddrPort(net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")))
	if err != nil {
		return nil
	}
	return []netip.AddrPort{a}
}

// newClient connects to the API server.
func newClient(s *config.Source) (*apiclient.Client, error) {
	c, err := clientConfig(s)
	if err != nil {
		return nil, fmt.Errorf("configuring the API server's client (--kubeconfig, --master): %w", err)
	}
	c.ContentType, c.AcceptContentTypes = s.ContentType, s.AcceptContentType
	c.QPS, c.Burst = s.QPS, s.Burst
	return apiclient.New(c)
}
