package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kube-ipvs/kube-ipvs/pkg/capture"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// traceOptions is the command line of "kube-ipvs trace".
type traceOptions struct {
	settingsFlags
	from, to, in, output string
	live                 bool
}

// traceFormats are the output formats of trace.
var traceFormats = []string{"text", "json", "yaml", "svg", "mermaid"}

func newTraceCommand() *cobra.Command {
	var o traceOptions
	cmd := &cobra.Command{
		Use:   "trace --from POD|IP --to IP:PORT[/PROTOCOL]|svc/[NAMESPACE/]NAME[:PORT]",
		Short: "Explain the path of a connection on this node",
		Long: "trace explains one connection on this node, step by step, from the current state of the\nkernel: which rules act on it, which virtual server and real servers it reaches, the\ninterface and source address with which it leaves, and whether the reply leaves by the\ninterface on which the request entered.\nNothing is sent and nothing is changed.\n\n" +
			"Write a pod as NAMESPACE/NAME. Pods behind Services are found without permission to\nread pods. A Service stands for its cluster IP; PORT is a number or a name, and can be\nomitted if the Service has one port.\n\n" +
			"The exit code is 0 if the connection is answered, 1 if it is not, and 2 if\ntrace failed.",
		Example: "  kube-ipvs trace --from 10.244.1.5 --to 10.96.0.10:53/udp\n" +
			"  kube-ipvs trace --from default/web-0 --to svc/kube-system/kube-dns:dns-tcp\n" +
			"  kube-ipvs trace --from 198.51.100.9 --in eth1 --to 10.12.97.49:30080 -o svg > trace.svg",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&o.from, "from", "", "the client: an IP address, or a pod as NAMESPACE/NAME")
	fs.StringVar(&o.to, "to", "", "the server: IP:PORT, with /udp or /sctp if it is not TCP, or svc/[NAMESPACE/]NAME[:PORT]")
	fs.StringVar(&o.in, "in", "", "the interface on which the request enters the node; default: that of the route to the client")
	fs.BoolVar(&o.live, "live", false, "afterwards print each packet of the connection as it passes an interface, until interrupted; needs CAP_NET_RAW")
	o.addFlags(fs)
	addOutput(cmd, fs, &o.output, traceFormats...)
	return cmd
}

func (o *traceOptions) run(ctx context.Context, w, notes io.Writer) error {
	if !slices.Contains(traceFormats, o.output) {
		return fmt.Errorf("--output %q: must be one of %s", o.output, strings.Join(traceFormats, ", "))
	}
	if o.live && o.output != "text" {
		return fmt.Errorf("--output %q: not available with --live", o.output)
	}
	s, err := o.found(notes)
	if err != nil {
		return err
	}
	names := s.names(ctx, notes)
	q, err := o.question(ctx, &s, names)
	if err != nil {
		return err
	}
	x, err := o.explain(q, names)
	if err != nil {
		return err
	}
	if o.live {
		return follow(ctx, w, q, x)
	}
	if err := printExplanation(w, o.output, x); err != nil {
		return err
	}
	if x.Verdict.Outcome != trace.Answered {
		return errFound
	}
	return nil
}

func printExplanation(w io.Writer, format string, x trace.Explanation) error {
	switch format {
	case "json":
		return inspect.WriteJSON(w, x)
	case "yaml":
		return inspect.WriteYAML(w, x)
	case "svg":
		return inspect.WriteSVG(w, x)
	case "mermaid":
		return inspect.WriteMermaid(w, x)
	}
	return x.Write(w)
}

// explain reads the kernel and adds the names of Services and pods.
func (o *traceOptions) explain(q trace.Question, names *inspect.Names) (x trace.Explanation, err error) {
	kernel, err := trace.Read()
	if err != nil {
		return x, err
	}
	node, err := kernel.Node(ip.Of(q.To.Addr()))
	if err != nil {
		return x, err
	}
	if _, ok := node.Link(o.in); o.in != "" && !ok {
		return x, fmt.Errorf("--in %q: no such interface", o.in)
	}
	x = trace.Explain(node, q)
	if o.in != "" && x.EntersBy != o.in {
		return x, fmt.Errorf("--in %q: %s is an address of the node, whose requests do not enter by an interface", o.in, q.From)
	}
	names.Label(&x, q, node)
	return x, nil
}

// captureBuffer holds packets while the terminal is slow.
const captureBuffer = 4 << 20

// follow prints the connection's packets until interrupted.
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

func (o *traceOptions) question(ctx context.Context, s *settings, names *inspect.Names) (q trace.Question, err error) {
	q.In = o.in
	if q.To, q.Protocol, err = o.target(names); err != nil {
		return q, fmt.Errorf("--to %q: %w", o.to, err)
	}
	if q.From, err = netip.ParseAddr(o.from); err != nil {
		q.From, err = o.pod(ctx, s, names, ip.Of(q.To.Addr()))
	}
	if err == nil && ip.Of(q.From) != ip.Of(q.To.Addr()) {
		err = errors.New("address family differs from --to")
	}
	if err != nil {
		return q, fmt.Errorf("--from %q: %w", o.from, err)
	}
	return q, nil
}

// target resolves --to to an address and port. For a Service it uses the family of
// --from, or IPv4 if --from is a pod that may have both.
func (o *traceOptions) target(names *inspect.Names) (netip.AddrPort, ip.Protocol, error) {
	if !strings.HasPrefix(o.to, inspect.ServicePrefix) {
		return parseTarget(o.to)
	}
	if from, err := netip.ParseAddr(o.from); err == nil {
		return names.Resolve(o.to, ip.Of(from))
	}
	to, protocol, err := names.Resolve(o.to, ip.IPv4)
	if six, p, err6 := names.Resolve(o.to, ip.IPv6); err != nil && err6 == nil {
		return six, p, nil
	}
	return to, protocol, err
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

// pod resolves a pod to its address, by the endpoints of Services or else by the API server.
// The API server answers only if the account may read pods, which that of the DaemonSet may not.
func (o *traceOptions) pod(ctx context.Context, s *settings, names *inspect.Names, family ip.Family) (netip.Addr, error) {
	namespace, name, ok := strings.Cut(o.from, "/")
	if !ok {
		return netip.Addr{}, errors.New("want an IP address, or a pod as NAMESPACE/NAME")
	}
	if a, ok := names.PodAddress(o.from, family); ok {
		return a, nil
	}
	client, err := newClient(&s.Source)
	if err != nil {
		return netip.Addr{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, namesLimit)
	defer cancel()
	pod, err := client.Pod(ctx, namespace, name)
	if apierrors.IsForbidden(err) {
		return netip.Addr{}, errors.New("not an endpoint of a Service, and reading other pods is not permitted: use the pod's IP address")
	}
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
