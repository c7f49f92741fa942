package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/proxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

func newDiffCommand() *cobra.Command {
	var o settingsFlags
	var output string
	cmd := &cobra.Command{
		Use:   "diff",
		Short: "Compare this node's kernel with the desired state",
		Long:  "diff computes the desired state of this node as the proxy does, with its configuration,\nand lists the changes that the kernel would need. Nothing is changed. While the proxy\nruns there are no differences, except for changes that it is about to program.\n\nThe exit code is 0 if there are no differences, 1 if there are some, and 2 if the\ncomparison failed.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFormat(output); err != nil {
				return err
			}
			s, err := o.found(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			result, err := dryRun(cmd.Context(), s.Config)
			if err != nil {
				return err
			}
			result.note(cmd.ErrOrStderr())
			if err := printChanges(cmd.OutOrStdout(), output, result.changes); err != nil {
				return err
			}
			if len(result.changes) > 0 {
				return errFound
			}
			return nil
		},
	}
	o.addFlags(cmd.Flags())
	addOutput(cmd, cmd.Flags(), &output, "table", "json", "yaml")
	return cmd
}

func checkFormat(output string) error {
	if !slices.Contains([]string{"table", "json", "yaml"}, output) {
		return fmt.Errorf("--output %q: must be table, json or yaml", output)
	}
	return nil
}

func printChanges(w io.Writer, output string, changes []inspect.Change) error {
	if output == "table" && len(changes) == 0 {
		_, err := fmt.Fprintln(w, "no difference")
		return err
	}
	return inspect.Print(w, output, inspect.ChangeColumns, len(inspect.ChangeColumns), changes)
}

// printDryRun implements --once --dry-run.
func printDryRun(ctx context.Context, cfg config.Config, stdout, stderr io.Writer) error {
	result, err := dryRun(ctx, cfg)
	if err != nil {
		return err
	}
	result.note(stderr)
	return printChanges(stdout, "table", result.changes)
}

// dryRunResult is what a sync would change, and what it would report.
type dryRunResult struct {
	changes   []inspect.Change
	unused    error           // unusable fields of Services
	complaint []event.Warning // about Services
	warnings  []string        // about the node: conflicts with other programs
	modes     []plan.InterfaceMode
	services  int

	clusterIPs []netip.Addr
}

func (r *dryRunResult) note(w io.Writer) {
	if r.unused != nil {
		fmt.Fprintln(w, "Note:", r.unused)
	}
}

// Warn collects what would become an Event.
func (r *dryRunResult) Warn(w event.Warning) { r.complaint = append(r.complaint, w) }

// dryRun plans the node and returns what a sync would change in the kernel. Unusable
// objects are noted and skipped, as in a sync. Parts of the kernel whose modules are not
// loaded count as empty; see openKernel.
func dryRun(ctx context.Context, cfg config.Config, unloaded ...string) (*dryRunResult, error) {
	// A command prints what it finds. Both calls are needed: contextual logging may be
	// off.
	klog.SetLogger(logr.Discard())
	defer klog.ClearLogger()
	ctx = klog.NewContext(ctx, logr.Discard())
	s := settings{Config: cfg}
	from, err := s.source()
	if err != nil {
		return nil, err
	}
	if from == nil {
		return nil, errors.New("no source of Services: neither an API server (--kubeconfig) nor a folder (--manifests) is configured")
	}
	kernel, err := openKernel(ctx, &cfg, unloaded...)
	if err != nil {
		return nil, err
	}
	if err := chooseScheduler(&cfg.Plan, probeInstalled); err != nil {
		return nil, err
	}
	var result dryRunResult
	p := proxy.New(proxy.Options{
		// The proxy in a container may lack permissions that this process has.
		ReadOnly: true,
		Running:  cfg.Action != config.DryRun,
		Config:   cfg.Plan,
		Kernel: kernel.DryRun(func(part, operation, change string) {
			result.changes = append(result.changes, inspect.Change{Part: part, Operation: operation, What: change})
		}),
		KernelVersion:   kernelVersion(),
		ProbeScheduler:  probeInstalled,
		BridgeNetfilter: func(bool) plan.BridgeNetfilter { return kernel.bridgeNetfilter() },
		APIServer:       apiServers(&cfg.Source),
		Network:         kernel.routing,
		Rules:           nat.Watcher{},
		HealthChecks:    discard{},
		Observer:        discard{},
		Meter:           discard{},
		Events:          &result,
		SyncPeriod:      cfg.SyncPeriod,
		DrainPeriod:     drainPeriod,
		DrainDeadline:   cfg.DrainDeadline,
	})
	read := &delivered{Loader: from}
	ctx, cancel := context.WithTimeoutCause(ctx, dryRunLimit, fmt.Errorf("no reply within %s", dryRunLimit))
	defer cancel()
	switch err := p.Once(ctx, read); {
	case err != nil && !read.synced:
		return nil, fmt.Errorf("reading the Services: %w", err)
	case err != nil && read.unused == nil:
		return nil, err
	}
	slices.SortStableFunc(result.changes, func(a, b inspect.Change) int { return cmp.Or(cmp.Compare(a.Part, b.Part), cmp.Compare(a.What, b.What)) })
	result.unused, result.services, result.clusterIPs = read.unused, read.services, read.clusterIPs
	result.warnings, result.modes = p.Findings()
	return &result, nil
}

// probeInstalled returns an error if the kernel has no module for an IPVS scheduler. Unlike
// ipvs.Client.Probe it does not load the module.
func probeInstalled(scheduler string) error {
	if doctor.LacksScheduler(doctor.LoadedModules, doctor.InstalledModules, doctor.Release(), scheduler) {
		return fmt.Errorf("the kernel has no scheduler %q: %w", scheduler, unix.ENOENT)
	}
	return nil
}

// dryRunLimit limits the wait for the API server and the kernel.
const dryRunLimit = 2 * time.Minute

// delivered records whether the source delivered everything, its unusable objects, and the number
// and cluster IPs of Services.
type delivered struct {
	source.Loader
	synced   bool
	unused   error
	services int

	clusterIPs []netip.Addr
}

// Load records the end of the delivery.
func (d *delivered) Load(ctx context.Context, sink source.Sink) error {
	d.unused = d.Loader.Load(ctx, syncedSink{sink, d})
	return d.unused
}

// Run implements source.Source. The proxy does not call it, because it prefers Load.
func (d *delivered) Run(ctx context.Context, sink source.Sink) error { return d.Load(ctx, sink) }

type syncedSink struct {
	source.Sink
	of *delivered
}

func (s syncedSink) SetService(svc *corev1.Service) {
	s.of.services++
	for _, text := range svc.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			s.of.clusterIPs = append(s.of.clusterIPs, a)
		}
	}
	s.Sink.SetService(svc)
}

func (s syncedSink) Synced() {
	s.of.synced = true
	s.Sink.Synced()
}

// discard implements the proxy's outputs without opening a port.
type discard struct{}

func (discard) Queued()                                    {}
func (discard) Idle()                                      {}
func (discard) Passed(time.Duration, int, int)             {}
func (discard) Failing(bool, int, int)                     {}
func (discard) Compared(time.Duration, int)                {}
func (discard) Held(int, int, int)                         {}
func (discard) Conflicts(int)                              {}
func (discard) Serving()                                   {}
func (discard) Node(bool, bool, bool)                      {}
func (discard) Changes(int, int)                           {}
func (discard) Planned(time.Duration)                      {}
func (discard) Programmed(time.Duration)                   {}
func (discard) NoLocalEndpoints(int, int)                  {}
func (discard) Interfaces([]plan.InterfaceMode)            {}
func (discard) Cut(int)                                    {}
func (discard) Restored(int)                               {}
func (discard) Set(types.NamespacedName, plan.HealthCheck) {}
func (discard) Delete(types.NamespacedName)                {}
