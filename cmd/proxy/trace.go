package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/signal"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/capture"
	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// traceOptions is the command line of "kube-ipvs trace".
type traceOptions struct {
	nameOptions
	from, to, in, output string
	live                 bool
}

func newTraceCommand() *cobra.Command {
	var o traceOptions
	cmd := &cobra.Command{
		Use:   "trace --from POD-OR-IP --to IP:PORT[/PROTOCOL]",
		Short: "Explain what becomes of a connection on this node",
		Long:  "trace explains one connection on this node, step by step, from what the kernel\nholds now: which rules act on it, which virtual server and real servers it meets,\nthe interface and the source with which it leaves, and whether the answer comes\nback the same way. Nothing is sent and nothing is changed.",
		Example: "  kube-ipvs trace --from 10.244.1.5 --to 10.96.0.10:53/udp\n" +
			"  kube-ipvs trace --from default/web-0 --to 203.0.113.5:443\n" +
			"  kube-ipvs trace --from 198.51.100.9 --in eth1 --to 10.12.97.49:30080 -o json",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&o.from, "from", "", "who asks: an IP address, or a pod as NAMESPACE/NAME, which asks the API server")
	fs.StringVar(&o.to, "to", "", "what is asked: IP:PORT, with /udp or /sctp if it is not TCP")
	fs.StringVar(&o.in, "in", "", "the interface by which the request enters the node; default: the one that leads to the client")
	fs.BoolVar(&o.live, "live", false, "then print each packet of the connection as it passes an interface, until interrupted; needs CAP_NET_RAW")
	fs.StringVarP(&o.output, "output", "o", "text", "text or json")
	o.addFlags(fs)
	completeOutput(cmd, "text", "json")
	return cmd
}

func (o *traceOptions) run(ctx context.Context, w, notes io.Writer) error {
	if o.output != "text" && o.output != "json" {
		return fmt.Errorf("--output %q: must be text or json", o.output)
	}
	if o.live && o.output != "text" {
		return fmt.Errorf("--output %q: cannot be had with --live", o.output)
	}
	q, err := o.question(ctx)
	if err != nil {
		return err
	}
	x, err := o.explain(ctx, q, notes)
	if err != nil {
		return err
	}
	if o.live {
		return follow(ctx, w, q, x)
	}
	if o.output == "text" {
		return x.Write(w)
	}
	return inspect.WriteJSON(w, x)
}

// traceNamesLimit is short: a node that does not reach the API server is one to be
// explained, and its kernel tells all but the names.
const traceNamesLimit = 5 * time.Second

// explain reads the kernel, and the names of what is in it.
func (o *traceOptions) explain(ctx context.Context, q trace.Question, notes io.Writer) (x trace.Explanation, err error) {
	kernel, err := trace.Read()
	if err != nil {
		return x, err
	}
	node, err := kernel.Node(ip.Of(q.To.Addr()))
	if err != nil {
		return x, err
	}
	if _, ok := node.Link(o.in); o.in != "" && !ok {
		return x, fmt.Errorf("--in %q: the node has no such interface", o.in)
	}
	x = trace.Explain(node, q)
	names, err := o.names(ctx, traceNamesLimit)
	if err != nil {
		fmt.Fprintf(notes, "Without the names of Services: %v\n", err)
		return x, nil
	}
	names.Label(&x, q, node)
	return x, nil
}

// captureBuffer holds packets while the screen is slow.
const captureBuffer = 4 << 20

// follow prints the connection's packets until it is interrupted.
func follow(ctx context.Context, w io.Writer, q trace.Question, x trace.Explanation) error {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	socket, err := capture.Open(captureBuffer)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = socket.Close() })
	if err := x.Write(w); err != nil {
		return err
	}
	has := trace.Flow(q, x)
	for {
		p, err := socket.Next()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		if has(p) {
			fmt.Fprintln(w, trace.Line(time.Now(), p))
		}
	}
}

func (o *traceOptions) question(ctx context.Context) (q trace.Question, err error) {
	if q.To, q.Protocol, err = parseTarget(o.to); err != nil {
		return q, fmt.Errorf("--to %q: %w", o.to, err)
	}
	q.In = o.in
	if q.From, err = netip.ParseAddr(o.from); err != nil {
		q.From, err = o.pod(ctx, ip.Of(q.To.Addr()))
	}
	if err == nil && ip.Of(q.From) != ip.Of(q.To.Addr()) {
		err = errors.New("is of another family than --to")
	}
	if err != nil {
		return q, fmt.Errorf("--from %q: %w", o.from, err)
	}
	return q, nil
}

// parseTarget reads "10.96.0.10:53/udp".
func parseTarget(text string) (netip.AddrPort, ip.Protocol, error) {
	address, name, given := strings.Cut(text, "/")
	protocol := ip.TCP
	if given {
		var err error
		if protocol, err = ip.ParseProtocol(strings.ToUpper(name)); err != nil {
			return netip.AddrPort{}, 0, err
		}
	}
	to, err := netip.ParseAddrPort(address)
	return to, protocol, err
}

// pod asks the API server for a pod's address.
func (o *traceOptions) pod(ctx context.Context, family ip.Family) (netip.Addr, error) {
	namespace, name, ok := strings.Cut(o.from, "/")
	if !ok {
		return netip.Addr{}, errors.New("is neither an IP address nor a pod as NAMESPACE/NAME")
	}
	client, err := newClient(&config.Source{Kubeconfig: o.kubeconfig})
	if err != nil {
		return netip.Addr{}, err
	}
	pod, err := client.Pod(ctx, namespace, name)
	if err != nil {
		return netip.Addr{}, err
	}
	return addressOf(pod, family)
}

func addressOf(pod *corev1.Pod, family ip.Family) (netip.Addr, error) {
	for _, have := range pod.Status.PodIPs {
		if a, err := netip.ParseAddr(have.IP); err == nil && ip.Of(a) == family {
			return a, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("the pod has no %s address", family)
}
