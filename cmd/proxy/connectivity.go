package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// connectivityOptions is the command line of "kube-ipvs connectivity test".
type connectivityOptions struct {
	settingsFlags
	services []string
	output   string
	all      bool
	limit    time.Duration
	parallel int
}

func newConnectivityCommand() *cobra.Command {
	var o connectivityOptions
	cmd := &cobra.Command{
		Use:   "connectivity",
		Short: "Test whether Services answer on this node",
		Long:  "connectivity tests whether Services answer on this node.",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	test := &cobra.Command{
		Use:   "test",
		Short: "Connect to each Service that has endpoints",
		Long:  "test connects from this node to each TCP port of each Service that has endpoints, and\nexplains failures: whether the endpoints answer directly, and the verdict of trace.\nEach connection is opened and closed; no data is sent. UDP and SCTP are not tested, because\nthe expected answer is unknown.\n\nThe exit code is 0 if all answer, 1 if one does not, and 2 if the test could not be run.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFormat(o.output); err != nil {
				return err
			}
			s, err := o.found(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), &s)
		},
	}
	fs := test.Flags()
	o.addFlags(fs)
	fs.StringSliceVar(&o.services, "service", nil, "NAMESPACE/NAME of a Service to test; can be repeated; default: all")
	fs.BoolVar(&o.all, "all", false, "also list the Services that answer")
	fs.DurationVar(&o.limit, "timeout", 3*time.Second, "how long a connection may take")
	fs.IntVar(&o.parallel, "parallel", 16, "maximum number of concurrent connections")
	addOutput(test, fs, &o.output, "table", "json", "yaml")
	cmd.AddCommand(test)
	return cmd
}

func (o *connectivityOptions) run(ctx context.Context, w, notes io.Writer, s *settings) error {
	names, err := s.load(ctx)
	if err != nil && !names.Complete() {
		return err
	}
	if err != nil {
		fmt.Fprintf(notes, "Note: %v\n", err)
	}
	if err := o.known(names); err != nil {
		return err
	}
	rows := o.test(ctx, s, names)
	failed := 0
	shown := rows[:0:0]
	for _, r := range rows {
		if r.Result == inspect.Failed {
			failed++
		}
		if o.all || r.Result == inspect.Failed || o.output != "table" {
			shown = append(shown, r)
		}
	}
	if o.output != "table" || len(shown) > 0 {
		if err := inspect.Print(w, o.output, inspect.ConnectionColumns, len(inspect.ConnectionColumns), shown); err != nil {
			return err
		}
	}
	fmt.Fprintln(notes, summary(rows))
	if failed > 0 {
		return errFound
	}
	return nil
}

// known returns an error if --service names a Service that does not exist: a mistyped name must
// not look like a success.
func (o *connectivityOptions) known(names *inspect.Names) error {
	services := names.Services()
	for _, name := range o.services {
		if !slices.ContainsFunc(services, func(s service.Service) bool { return s.Name.String() == name }) {
			return fmt.Errorf("--service %q: no such Service with a cluster IP, want NAMESPACE/NAME", name)
		}
	}
	return nil
}

func summary(rows []inspect.Connection) string {
	count := map[string]int{}
	for _, r := range rows {
		count[r.Result]++
	}
	return fmt.Sprintf("%d answered, %d failed, %d not tested", count[inspect.Answered], count[inspect.Failed], count[inspect.Skipped])
}

// test connects to all Services and returns a row for each address and port.
func (o *connectivityOptions) test(ctx context.Context, s *settings, names *inspect.Names) []inspect.Connection {
	tests := o.tests(s, names)
	why := &explainer{names: names}
	slots := make(chan struct{}, max(o.parallel, 1))
	var running sync.WaitGroup
	for i := range tests {
		t := &tests[i]
		if t.row.Result == inspect.Skipped {
			continue
		}
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			if err := dial(ctx, t.address, o.limit); err != nil {
				t.row.Result = inspect.Failed
				t.row.Why = strings.Join(append([]string{reasonOf(err)}, o.explain(ctx, t, why)...), "; ")
			}
		})
	}
	running.Wait()
	rows := make([]inspect.Connection, len(tests))
	for i := range tests {
		rows[i] = tests[i].row
	}
	return rows
}

// connection is a connection to be tested.
type connection struct {
	row     inspect.Connection
	address netip.AddrPort
	port    service.Port
}

func (o *connectivityOptions) tests(s *settings, names *inspect.Names) []connection {
	var out []connection
	for _, svc := range names.Services() {
		if len(o.services) > 0 && !slices.Contains(o.services, svc.Name.String()) {
			continue
		}
		for _, p := range svc.Ports {
			for _, a := range svc.ClusterIPs {
				at := netip.AddrPortFrom(a, p.Port)
				row := inspect.Connection{Service: strings.TrimSuffix(svc.Name.String()+":"+p.Name, ":"), Protocol: p.Protocol.String(), Address: at.String(), Result: inspect.Answered}
				if row.Why = notTested(s, &svc, &p, ip.Of(a)); row.Why != "" {
					row.Result = inspect.Skipped
				}
				out = append(out, connection{row, at, p})
			}
		}
	}
	return out
}

// notTested returns why a port is not tested, or "".
func notTested(s *settings, svc *service.Service, p *service.Port, family ip.Family) string {
	var usable, here bool
	for _, e := range p.Endpoints {
		if ip.Of(e.Addr.Addr()) == family && (e.Ready || e.Serving) {
			usable = true
			here = here || e.Node == s.Plan.NodeName
		}
	}
	switch {
	case p.Protocol != ip.TCP:
		return "not TCP"
	case !usable:
		return "has no endpoint"
	case svc.InternalLocal && !here:
		return "internalTrafficPolicy is Local, and no endpoint is on this node"
	}
	return ""
}

func dial(ctx context.Context, to netip.AddrPort, limit time.Duration) error {
	d := net.Dialer{Timeout: limit}
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err == nil {
		_ = c.Close()
	}
	return err
}

// reasonOf returns an error without the address, which the row already shows.
func reasonOf(err error) string {
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return "no answer"
	}
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(inner) {
		err = inner
	}
	return err.Error()
}

// explain explains a failure by connecting to the endpoints directly, and by trace.
func (o *connectivityOptions) explain(ctx context.Context, t *connection, why *explainer) []string {
	var out, deaf []string
	answering := 0
	for _, e := range t.port.Endpoints {
		if ip.Of(e.Addr.Addr()) != ip.Of(t.address.Addr()) || !e.Ready && !e.Serving || answering+len(deaf) >= testedEndpoints {
			continue
		}
		if err := dial(ctx, e.Addr, o.limit); err != nil {
			deaf = append(deaf, e.Addr.String()+" ("+reasonOf(err)+")")
		} else {
			answering++
		}
	}
	switch {
	case len(deaf) > 0 && answering == 0:
		out = append(out, "the endpoints do not answer directly either: "+strings.Join(deaf, ", "))
	case len(deaf) > 0:
		out = append(out, "some endpoints do not answer directly: "+strings.Join(deaf, ", "))
	default:
		out = append(out, "the endpoints answer directly")
	}
	if verdict := why.explain(t.address); verdict != "" {
		out = append(out, "trace: "+verdict)
	}
	return out
}

// testedEndpoints limits how many endpoints of a Service are tested directly.
const testedEndpoints = 8

// explainer traces connections of the node itself. It reads the kernel once.
type explainer struct {
	names *inspect.Names

	mu     sync.Mutex
	kernel *trace.Kernel
	err    error
	nodes  map[ip.Family]*trace.Node
}

func (e *explainer) explain(to netip.AddrPort) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	node, err := e.node(ip.Of(to.Addr()))
	if err != nil {
		return err.Error()
	}
	from, ok := ownAddress(node)
	if !ok {
		return ""
	}
	return trace.Explain(node, trace.Question{Protocol: ip.TCP, From: from, To: to}).Verdict.String()
}

func (e *explainer) node(family ip.Family) (*trace.Node, error) {
	if e.kernel == nil && e.err == nil {
		e.kernel, e.err = trace.Read()
		e.nodes = map[ip.Family]*trace.Node{}
	}
	if e.err != nil {
		return nil, e.err
	}
	if n := e.nodes[family]; n != nil {
		return n, nil
	}
	n, err := e.kernel.Node(family)
	if err == nil {
		e.nodes[family] = n
	}
	return n, err
}

// ownAddress returns a global address of the node, the first one in text order. It returns false
// if the node has none of this family.
func ownAddress(n *trace.Node) (netip.Addr, bool) {
	var all []netip.Addr
	for _, l := range n.Links {
		for _, a := range l.Addresses {
			if a.Global && ip.Of(a.Prefix.Addr()) == n.Family {
				all = append(all, a.Prefix.Addr())
			}
		}
	}
	if len(all) == 0 {
		return netip.Addr{}, false
	}
	return slices.MinFunc(all, func(a, b netip.Addr) int { return cmp.Compare(a.String(), b.String()) }), true
}
