package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/version"
	"k8s.io/component-base/version/verflag"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
)

// newCommand builds the command line. run is called with a validated configuration; its
// context ends with SIGTERM or SIGINT.
func newCommand(run func(context.Context, config.Config) error) *cobra.Command {
	opts := config.NewOptions()
	cmd := &cobra.Command{
		Use:           "kube-ipvs",
		Short:         "Serves Kubernetes Services on a node, with IPVS",
		Long:          "kube-ipvs replaces kube-proxy on every node. It watches Services and EndpointSlices,\nfrom an API server or a folder of manifests, and programs IPVS, IP sets and iptables\nso that the node serves the Services.\n\nIts commands show the state of the node and explain it.",
		SilenceUsage:  true,
		SilenceErrors: true, // cli.Run prints the error
		Args:          noArgs,
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

// noArgs rejects arguments, except empty ones. As under kube-proxy, a template of a manifest may pass
// the empty value of a variable.
func noArgs(cmd *cobra.Command, args []string) error {
	return cobra.NoArgs(cmd, slices.DeleteFunc(slices.Clone(args), func(arg string) bool { return arg == "" }))
}

// commandNames are the names of the subcommands. They distinguish a process that runs
// one from a process that serves.
var commandNames = map[string]bool{"help": true, "completion": true}

// helpBelow keeps subcommands, which have few flags, from inheriting the program's
// help, which sorts its flags into sections.
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
			long := c.Long
			c.Long += "\n\n" + commandList(c)
			help(c, args)
			c.Long = long
			return
		}
		fmt.Fprintf(c.OutOrStdout(), "%s\n\n%s", cmp.Or(c.Long, c.Short), c.UsageString())
	})
}

// commandList returns a line for each subcommand.
func commandList(program *cobra.Command) string {
	lines := []string{"Commands (see \"" + program.Name() + " COMMAND --help\"):"}
	for _, c := range program.Commands() {
		if c.IsAvailableCommand() {
			lines = append(lines, fmt.Sprintf("  %-12s %s", c.Name(), c.Short))
		}
	}
	return strings.Join(lines, "\n")
}

// addOutput adds the flag --output, and its completion by the shell. The first format is the
// default.
func addOutput(cmd *cobra.Command, fs *pflag.FlagSet, output *string, formats ...string) {
	fs.StringVarP(output, "output", "o", formats[0], strings.Join(formats, ", "))
	err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	if err != nil {
		panic(err) // the flag does not exist
	}
}

// printVersion prints the program's name and version. The library, and so kube-proxy,
// would print "Kubernetes" instead of the name.
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
	logger := klog.FromContext(ctx)
	if cfg.Action == config.Serve {
		logger.Info("Version info", "version", version.Get()) // as kube-proxy does
	}
	for _, notice := range cfg.Notices {
		logger.Info(notice)
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
