package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
)

func newStatusCommand() *cobra.Command {
	var o settingsFlags
	var output string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the proxy on this node, one line per component",
		Long:  "status shows the state of the proxy that runs on this node. Each component has a line,\nwith OK if nothing is wrong.\n\nThe exit code is 0 if the proxy is ready, 1 if it is not or does not run, and 2 if\nits state is unknown.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := o.found(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return showStatus(cmd.Context(), cmd.OutOrStdout(), output, &s)
		},
	}
	o.addFlags(cmd.Flags())
	addOutput(cmd, cmd.Flags(), &output, "table", "json", "yaml")
	return cmd
}

func showStatus(ctx context.Context, w io.Writer, output string, s *settings) error {
	if err := checkFormat(output); err != nil {
		return err
	}
	if !s.Probes.IsValid() {
		return errors.New("the state is unknown: the proxy's probes are disabled by its configuration (probeBindAddress)")
	}
	report, err := health.Ask(ctx, s.Probes)
	rows := components(report, err, s)
	if err := inspect.Print(w, output, inspect.ComponentColumns, len(inspect.ComponentColumns), rows); err != nil {
		return err
	}
	if slices.ContainsFunc(rows, func(c inspect.Component) bool { return c.Status == string(doctor.Error) }) {
		return errFound
	}
	return nil
}

// components returns the lines of a status.
func components(r *health.Report, err error, s *settings) []inspect.Component {
	if err != nil {
		return []inspect.Component{{Status: string(doctor.Error), Name: "kube-ipvs", What: notRunning(err, s.Probes)}}
	}
	var rows []inspect.Component
	add := func(name string, bad bool, severity doctor.Severity, format string, args ...any) {
		if !bad {
			severity = doctor.OK
		}
		rows = append(rows, inspect.Component{Status: string(severity), Name: name, What: fmt.Sprintf(format, args...)})
	}
	ago := func(t time.Time) string { return r.Now.Sub(t).Round(time.Second).String() + " ago" }
	add("kube-ipvs", !r.Ready, doctor.Error, "%s on node %s, started %s, %s", r.Version, cmp.Or(r.Node, "?"), ago(r.Started), ready(r))
	if r.Syncs == 0 {
		add("sync", true, doctor.Error, "the first sync is not finished")
	} else {
		add("sync", !r.Live, doctor.Error, "last one %s, in %s", ago(r.LastSync), time.Duration(r.SyncSeconds*float64(time.Second)).Round(time.Millisecond))
	}
	add("node", r.NodeRefused, doctor.Error, "%s", word(r.NodeRefused, "something is refused by the kernel, or cannot be read", "everything is accepted by the kernel"))
	add("Services", r.ServicesRefused > 0, doctor.Warning, "%d, %d of them refused by the kernel", r.Services, r.ServicesRefused)
	add("IPVS", false, "", "%d virtual servers, %d real servers, %d of them draining", r.VirtualServers, r.RealServers, r.Draining)
	if r.LastComparison.IsZero() {
		add("kernel", false, "", "read at the start, and not compared since")
	} else {
		add("kernel", r.LastDifferences > 0, doctor.Warning, "compared %s, %d differences then, %d since the start", ago(r.LastComparison), r.LastDifferences, r.Differences)
	}
	add("conflicts", r.Conflicts > 0, doctor.Warning, "%d virtual servers are wanted by more than one Service", r.Conflicts)
	add("load balancers", !r.Eligible, doctor.Note, "%s", word(!r.Eligible, "told not to use the node: the Node does not exist, is being deleted, or is about to be removed by the autoscaler", "may use the node"))
	add("source", false, "", "%s", sourceName(s))
	return rows
}

func notRunning(err error, probes netip.AddrPort) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Sprintf("does not answer on %s", probes)
	}
	return "does not run, or does not answer probes: " + err.Error()
}

func ready(r *health.Report) string {
	if r.Ready {
		return "ready"
	}
	return "not ready: " + strings.Join(r.Why, "; ")
}

func word(bad bool, is, isNot string) string {
	if bad {
		return is
	}
	return isNot
}

// sourceName describes where Services come from.
func sourceName(s *settings) string {
	if s.Source.Manifests != "" {
		return "the folder " + s.Source.Manifests
	}
	c, err := clientConfig(&s.Source)
	if err != nil {
		return "unknown: " + err.Error()
	}
	return "the API server " + c.Host + ", by the configuration of " + s.Origin
}
