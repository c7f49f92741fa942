package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// getOptions is the command line of "kube-ipvs get".
type getOptions struct {
	settingsFlags
	output string
}

func newGetCommand() *cobra.Command {
	var o getOptions
	cmd := &cobra.Command{
		Use:   "get virtualservers|endpoints|sets|snat",
		Short: "List the kernel state of Services on this node",
		Long:  "get lists the current state of this node's kernel with the names of Services. Names come\nfrom the proxy's source: the API server or a folder of manifests. If it cannot be read,\nget prints addresses and a note.",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	fs := cmd.PersistentFlags()
	o.addFlags(fs)
	cmd.AddCommand(
		o.lists("virtualservers", "virtual servers, by Service", o.virtualServers),
		o.lists("endpoints", "real servers with their connections, by Service", o.endpoints),
		o.lists("sets [NAME]", "IP sets, or the members of one", o.sets),
		o.lists("snat", "the source that masqueraded traffic gets, by interface", o.snat),
	)
	addOutput(cmd, fs, &o.output, inspect.Formats...)
	return cmd
}

// lists returns the command for one kind of object.
func (o *getOptions) lists(use, short string, list func(ctx context.Context, w, notes io.Writer, args []string) error) *cobra.Command {
	return &cobra.Command{
		Use:   use,
		Short: "List " + short,
		Args:  cobra.MaximumNArgs(strings.Count(use, "[")),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(inspect.Formats, o.output) {
				return fmt.Errorf("--output %q: must be one of %s", o.output, strings.Join(inspect.Formats, ", "))
			}
			return list(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), args)
		},
	}
}

func (o *getOptions) virtualServers(ctx context.Context, w, notes io.Writer, _ []string) error {
	names, state, kernel, err := o.servers(ctx, notes)
	if err != nil {
		return err
	}
	defer kernel.Close()
	columns := inspect.VirtualServerColumns
	return inspect.Print(w, o.output, columns, len(columns)-1, inspect.VirtualServers(state, names))
}

func (o *getOptions) endpoints(ctx context.Context, w, notes io.Writer, _ []string) error {
	names, state, kernel, err := o.servers(ctx, notes)
	if err != nil {
		return err
	}
	defer kernel.Close()
	rows, err := inspect.Endpoints(state, names, kernel.Connections)
	if err != nil {
		return err
	}
	columns := inspect.EndpointColumns
	return inspect.Print(w, o.output, columns, len(columns)-2, rows)
}

// servers reads IPVS and the names of its addresses.
func (o *getOptions) servers(ctx context.Context, notes io.Writer) (*inspect.Names, ipvs.State, *ipvs.Netlink, error) {
	s, err := o.found(notes)
	if err != nil {
		return nil, nil, nil, err
	}
	names := s.names(ctx, notes)
	sets, err := trace.Sets()
	if err != nil {
		return nil, nil, nil, err
	}
	names.Marks(sets)
	kernel, err := ipvs.New()
	if err != nil {
		return nil, nil, nil, err
	}
	state, err := kernel.Observe()
	if err != nil {
		kernel.Close()
		return nil, nil, nil, err
	}
	return names, state, kernel, nil
}

func (o *getOptions) sets(ctx context.Context, w, notes io.Writer, args []string) error {
	s, err := o.found(notes)
	if err != nil {
		return err
	}
	names := s.names(ctx, notes)
	state, err := trace.Sets()
	if err != nil {
		return err
	}
	rows := inspect.Sets(state, names)
	if len(args) == 0 {
		return inspect.Print(w, o.output, inspect.SetColumns, len(inspect.SetColumns), rows)
	}
	i := slices.IndexFunc(rows, func(s inspect.Set) bool { return s.Name == args[0] })
	if i < 0 {
		return fmt.Errorf("no set %q", args[0])
	}
	return inspect.Print(w, o.output, inspect.MemberColumns, len(inspect.MemberColumns), rows[i].Members)
}

func (o *getOptions) snat(_ context.Context, w, notes io.Writer, _ []string) error {
	s, err := o.found(notes)
	if err != nil {
		return err
	}
	kernel, err := trace.Read()
	if err != nil {
		return err
	}
	var rows []inspect.SNAT
	for _, family := range ip.Families {
		node, err := kernel.Node(family)
		if err != nil {
			return err
		}
		rows = append(rows, inspect.SNATs(node, s.Plan.SNAT.Priority)...)
	}
	return inspect.Print(w, o.output, inspect.SNATColumns, len(inspect.SNATColumns), rows)
}
