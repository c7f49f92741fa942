package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// ErrFound ends a command that has printed a problem.
var ErrFound = errors.New("a problem was found")

// options are the flags of all commands.
type options struct {
	cluster
	context, kubeconfig string
	nodes               []string
	parallel            int
	// timeout limits the wait for a node, in commands that query several.
	timeout time.Duration
}

// New returns the command "kubectl ipvs". If kubectl is nil, the one in the PATH is
// used.
func New(kubectl Kubectl) *cobra.Command {
	o := &options{cluster: cluster{kubectl: kubectl, container: "kube-ipvs"}}
	cmd := &cobra.Command{
		Use:           "kubectl-ipvs",
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl ipvs"},
		Short:         "Inspect kube-ipvs on the nodes of a cluster",
		Long:          "kubectl ipvs runs the commands of kube-ipvs in its pods: status, doctor and diff on all\nnodes side by side, the others on one. It needs kubectl in the PATH, and the permission\nto list and exec into the pods of kube-ipvs. With the permission to list nodes and\nDaemonSets, it also names the nodes that have no pod of kube-ipvs.",
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRun: func(*cobra.Command, []string) {
			if o.kubectl == nil {
				o.kubectl = program{o.flags()}
			}
		},
	}
	fs := cmd.PersistentFlags()
	fs.StringVar(&o.context, "context", "", "the context of the kubeconfig")
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "the kubeconfig that kubectl uses")
	fs.StringVarP(&o.namespace, "namespace", "n", "kube-system", "the namespace of kube-ipvs")
	fs.StringVar(&o.selector, "selector", "app.kubernetes.io/name=kube-ipvs", "the labels of its pods")
	fs.StringSliceVar(&o.nodes, "node", nil, "the nodes to inspect; default: all, or for trace the client's")
	fs.IntVar(&o.parallel, "parallel", 16, "maximum number of nodes that are queried concurrently")
	cmd.AddCommand(
		o.everywhere("status", "Show the state of kube-ipvs on each node", statusOf),
		o.everywhere("doctor", "Check nodes for problems that affect Services", doctorOf),
		o.everywhere("diff", "Compare each node's kernel with the desired state", diffOf),
		o.trace(),
		o.onOne("get", "List the kernel state of Services on a node"),
		o.onOne("connectivity", "Connect from a node to each Service that has endpoints"),
		o.onOne("preflight", "Check whether kube-ipvs can replace kube-proxy on a node"),
		o.sysdump(),
	)
	return cmd
}

// flags returns the flags for kubectl.
func (o *options) flags() []string {
	var out []string
	if o.kubeconfig != "" {
		out = append(out, "--kubeconfig="+o.kubeconfig)
	}
	if o.context != "" {
		out = append(out, "--context="+o.context)
	}
	return out
}

// onOne returns a command that is passed on to one node.
func (o *options) onOne(name, short string) *cobra.Command {
	return &cobra.Command{
		Use:   name + " [ARGUMENTS]",
		Short: short,
		Long:  short + ". The arguments are those of \"kube-ipvs " + name + "\".",
		// Flags may be unknown here.
		FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if wantsHelp(args) {
				return cmd.Help()
			}
			args, err := o.take(cmd, args)
			if err != nil {
				return err
			}
			pods, err := o.pods(cmd.Context(), o.nodes)
			if errors.Is(err, errNoPod) && name == "preflight" {
				return fmt.Errorf("%w: before kube-ipvs runs there, use deploy/preflight.yaml, as the migration guide does", err)
			}
			if err != nil {
				return err
			}
			if len(pods) > 1 {
				return fmt.Errorf("there are %d nodes: choose one with --node", len(pods))
			}
			return o.pass(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), pods[0], append([]string{name}, args...))
		},
	}
}

// wantsHelp reports whether arguments ask for help. cobra does not look at those of commands
// with DisableFlagParsing.
func wantsHelp(args []string) bool {
	return slices.Contains(args, "--help") || slices.Contains(args, "-h")
}

// pass runs a command in a pod and returns its result.
func (o *options) pass(ctx context.Context, stdout, stderr io.Writer, p pod, args []string) error {
	code, err := o.exec(ctx, stdout, stderr, p, args...)
	switch {
	case err != nil:
		return fmt.Errorf("on node %s: %w", p.node, err)
	case code == 1:
		return ErrFound
	case code != 0:
		return fmt.Errorf("on node %s: kube-ipvs %s exited with %d", p.node, args[0], code)
	}
	return nil
}

// take removes our own flags from arguments that are otherwise passed on. Flags of the
// program with the same name, such as trace's --kubeconfig, cannot be used here.
func (o *options) take(cmd *cobra.Command, args []string) (rest []string, err error) {
	ours := cmd.Root().PersistentFlags()
	for i := 0; i < len(args); i++ {
		name, value, given := strings.Cut(args[i], "=")
		f := ours.Lookup(strings.TrimPrefix(name, "--"))
		if name == "-n" {
			f = ours.Lookup("namespace")
		}
		if f == nil || !strings.HasPrefix(name, "-") {
			rest = append(rest, args[i])
			continue
		}
		if !given {
			if i++; i == len(args) {
				return nil, fmt.Errorf("flag needs an argument: %s", name)
			}
			value = args[i]
		}
		if err := ours.Set(f.Name, value); err != nil {
			return nil, err
		}
	}
	if _, ok := o.kubectl.(program); ok || o.kubectl == nil {
		o.kubectl = program{o.flags()}
	}
	return rest, nil
}

// trace returns the command that runs on the client's node.
func (o *options) trace() *cobra.Command {
	return &cobra.Command{
		Use:                "trace --from POD|IP --to IP:PORT|svc/[NAMESPACE/]NAME[:PORT] [ARGUMENTS]",
		Short:              "Explain the path of a connection, on the client's node",
		Long:               "trace runs \"kube-ipvs trace\" on the node of the client, which is a pod as\nNAMESPACE/NAME or its IP address, or on the one that --node names.",
		Example:            "  kubectl ipvs trace --from default/web-0 --to svc/kube-system/kube-dns:dns-tcp",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if wantsHelp(args) {
				return cmd.Help()
			}
			args, err := o.take(cmd, args)
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			at, from := valueOf(args, "--from")
			_, to := valueOf(args, "--to")
			if from == "" {
				return errors.New("--from is required: a pod as NAMESPACE/NAME, or an IP address")
			}
			var p pod
			if len(o.nodes) == 0 {
				var address string
				if p, address, err = o.of(ctx, from, to); err != nil {
					return err
				}
				args[at] = strings.TrimSuffix(args[at], from) + address
			} else {
				pods, err := o.pods(ctx, o.nodes)
				if err != nil {
					return err
				}
				if len(pods) > 1 {
					return errors.New("trace needs exactly one node")
				}
				p = pods[0]
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "on node %s\n", p.node)
			return o.pass(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr(), p, append([]string{"trace"}, args...))
		},
	}
}

// valueOf returns the value of a flag, such as "--from", and the index of its last argument.
func valueOf(args []string, flag string) (at int, value string) {
	for i, a := range args {
		if v, ok := strings.CutPrefix(a, flag+"="); ok {
			return i, v
		}
		if a == flag && i+1 < len(args) {
			return i + 1, args[i+1]
		}
	}
	return 0, ""
}
