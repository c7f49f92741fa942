package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/version"
	"k8s.io/component-base/version/verflag"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
)

// newCommand makes the command line. run is called with a configuration in
// which every value can work; its context ends with SIGTERM or SIGINT.
func newCommand(run func(context.Context, config.Config) error) *cobra.Command {
	opts := config.NewOptions()
	cmd := &cobra.Command{
		Use:           "kube-ipvs",
		Short:         "Serves Kubernetes Services on a node, with IPVS",
		Long:          "kube-ipvs runs on every node in the place of kube-proxy. It follows Services and\nEndpointSlices, from an API server or from a folder of manifests, and programs\nIPVS, IP sets and iptables so that the node serves them.\n\n\"kube-ipvs trace\" explains what becomes of a connection, \"kube-ipvs doctor\" looks\nfor what is wrong with the node, and \"kube-ipvs get\" lists what its kernel holds.",
		SilenceUsage:  true,
		SilenceErrors: true, // cli.Run prints the error
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asked := cmd.Flag("version"); asked.Value.String() == "true" {
				return printVersion(cmd.OutOrStdout())
			}
			verflag.PrintAndExitIfRequested()
			return runCommand(cmd.Context(), opts, run)
		},
	}
	sets := opts.Flags()
	verflag.AddFlags(sets.FlagSet("general"))
	for _, fs := range sets.FlagSets {
		cmd.Flags().AddFlagSet(fs)
	}
	cliflag.SetUsageAndHelpFunc(cmd, sets, 100)
	for _, below := range []*cobra.Command{
		newStatusCommand(), newDoctorCommand(), newTraceCommand(), newGetCommand(), newDiffCommand(),
		newPreflightCommand(), newConnectivityCommand(), newSysdumpCommand(),
	} {
		commandNames[below.Name()] = true
		cmd.AddCommand(below)
	}
	helpBelow(cmd)
	return cmd
}

// commandNames are those of the commands below the program, by which a process that
// runs one is distinguished from one that serves.
var commandNames = map[string]bool{"help": true, "completion": true}

// helpBelow keeps the help of the program, which has its flags in sections, from
// being inherited by the commands below it, which have few.
func helpBelow(program *cobra.Command) {
	help, usage, plain := program.HelpFunc(), program.UsageFunc(), &cobra.Command{}
	program.SetUsageFunc(func(c *cobra.Command) error {
		if c == program {
			return usage(c)
		}
		return plain.UsageFunc()(c)
	})
	program.SetHelpFunc(func(c *cobra.Command, args []string) {
		if c == program {
			help(c, args)
			return
		}
		fmt.Fprintf(c.OutOrStdout(), "%s\n\n%s", cmp.Or(c.Long, c.Short), c.UsageString())
	})
}

// completeOutput has the shell complete --output.
func completeOutput(cmd *cobra.Command, formats ...string) {
	err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	if err != nil {
		panic(err) // there is no such flag
	}
}

// printVersion says whose version it is. The library, and so kube-proxy, says
// "Kubernetes"; of this program that would be untrue.
func printVersion(w io.Writer) error {
	_, err := fmt.Fprintln(w, "kube-ipvs", version.Get())
	return err
}

func runCommand(ctx context.Context, opts *config.Options, run func(context.Context, config.Config) error) error {
	cfg, err := opts.Complete()
	if err != nil {
		return err
	}
	if path := opts.WriteConfigTo(); path != "" {
		return cfg.Write(path)
	}
	if err := logsapi.ValidateAndApply(&cfg.Logging, cfg.Features); err != nil {
		return fmt.Errorf("logging: %w", err)
	}
	for _, notice := range cfg.Notices {
		klog.FromContext(ctx).Info(notice)
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	if cfg.File != "" && cfg.Action == config.Serve {
		if ctx, err = untilConfigChanges(ctx, cfg.File, opts.Complete); err != nil {
			return err
		}
	}
	return run(ctx, cfg)
}
