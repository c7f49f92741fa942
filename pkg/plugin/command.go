package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// ErrFound ends a command that has found something wrong and has printed it.
var ErrFound = errors.New("something is wrong")

// options are the flags that all commands have.
type options struct {
	cluster
	context, kubeconfig string
	nodes               []string
	parallel            int
}

// New makes the command "kubectl ipvs". kubectl is the PATH's if it is nil.
func New(kubectl Kubectl) *cobra.Command {
	o := &options{cluster: cluster{kubectl: kubectl, container: "kube-ipvs"}}
	cmd := &cobra.Command{
		Use:           "kubectl-ipvs",
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl ipvs"},
		Short:         "Look at kube-ipvs on the nodes of a cluster",
		Long:          "kubectl ipvs runs the commands of kube-ipvs in its pods: status, doctor and diff on all\nnodes side by side, the others on one. It needs kubectl in the PATH, and the permission\nto list and exec into the pods of kube-ipvs.",
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
	fs.StringSliceVar(&o.nodes, "node", nil, "the nodes to look at; default: all, or for trace the client's")
	fs.IntVar(&o.parallel, "parallel", 16, "how many nodes are asked at once")
	cmd.AddCommand(
		o.everywhere("status", "Show how kube-ipvs fares on each node", statusOf),
		o.everywhere("doctor", "Look for what keeps nodes from serving Services", doctorOf),
		o.everywhere("diff", "Compare each node's kernel with what the Services want", diffOf),
		o.trace(),
		o.onOne("get", "List what a node's kernel holds for Services"),
		o.onOne("connectivity", "Connect from a node to each Service that has endpoints"),
		o.onOne("preflight", "Look whether kube-ipvs can take kube-proxy's place on a node"),
		o.sysdump(),
	)
	return cmd
}

// flags are those for kubectl.
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

// onOne is a command that is passed on to one node.
func (o *options) onOne(name, short string) *cobra.Command {
	return &cobra.Command{
		Use:   name + " [ARGUMENTS]",
		Short: short,
		Long:  short + ". The arguments are those of \"kube-ipvs " + name + "\".",
		// They may be flags that are not known here.
		FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			args, err := o.take(cmd, args)
			if err != nil {
				return err
			}
			pods, err := o.pods(cmd.Context(), o.nodes)
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

// pass runs a command in a pod, and ends as it does.
func (o *options) pass(ctx context.Context, stdout, stderr io.Writer, p pod, args []string) error {
	code, err := o.exec(ctx, stdout, stderr, p, args...)
	switch {
	case err != nil:
		return err
	case code == 1:
		return ErrFound
	case code != 0:
		return fmt.Errorf("on the node %s: kube-ipvs %s ended with %d", p.node, args[0], code)
	}
	return nil
}

// take takes our own flags out of arguments that are otherwise passed on. Those of the
// program with the same name, such as trace's --kubeconfig, have no use here.
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

// trace runs where the client is.
func (o *options) trace() *cobra.Command {
	return &cobra.Command{
		Use:                "trace --from POD|IP --to IP:PORT|svc/[NAMESPACE/]NAME[:PORT] [ARGUMENTS]",
		Short:              "Explain what becomes of a connection, on the client's node",
		Long:               "trace runs \"kube-ipvs trace\" on the node of the client, which is a pod as\nNAMESPACE/NAME or its IP address, or on the one that --node names.",
		Example:            "  kubectl ipvs trace --from default/web-0 --to svc/kube-system/kube-dns:dns-tcp",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			args, err := o.take(cmd, args)
			if err != nil {
				return err
			}
			if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
				return cmd.Help()
			}
			ctx := cmd.Context()
			at, from := fromOf(args)
			if from == "" {
				return errors.New("--from is missing: a pod as NAMESPACE/NAME, or an IP address")
			}
			var p pod
			if len(o.nodes) == 0 {
				var address string
				if p, address, err = o.of(ctx, from); err != nil {
					return err
				}
				args[at] = strings.TrimSuffix(args[at], from) + address
			} else {
				pods, err := o.pods(ctx, o.nodes)
				if err != nil {
					return err
				}
				if len(pods) > 1 {
					return errors.New("a connection is traced on one node")
				}
				p = pods[0]
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "on the node %s\n", p.node)
			return o.pass(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr(), p, append([]string{"trace"}, args...))
		},
	}
}

// fromOf finds the value of --from, and which argument it ends.
func fromOf(args []string) (at int, value string) {
	for i, a := range args {
		if v, ok := strings.CutPrefix(a, "--from="); ok {
			return i, v
		}
		if a == "--from" && i+1 < len(args) {
			return i + 1, args[i+1]
		}
	}
	return 0, ""
}
