package plugin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
)

// row is a row about a node.
type row struct {
	Node   string `json:"node"`
	Status string `json:"status"` // OK, note, warning or error
	What   string `json:"what"`
}

var rowColumns = []string{"NODE", "STATUS", "WHAT"}

// Cells returns the cells in the order of the columns.
func (r row) Cells() []string { return []string{r.Node, r.Status, r.What} }

// summary returns the rows for the JSON output of a command on a node.
type summary func(node string, output []byte) ([]row, error)

// everywhere returns a command that runs on all nodes, which are shown side by side.
func (o *options) everywhere(name, short string, rows summary) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains(inspect.Formats, output) {
				return fmt.Errorf("--output %q: must be one of %s", output, strings.Join(inspect.Formats, ", "))
			}
			pods, err := o.podsOfAll(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			all := o.ask(cmd.Context(), cmd.ErrOrStderr(), pods, name, rows)
			if err := inspect.Print(cmd.OutOrStdout(), output, rowColumns, len(rowColumns), all); err != nil {
				return err
			}
			for _, r := range all {
				if r.Status == string(doctor.Error) {
					return ErrFound
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", strings.Join(inspect.Formats, ", "))
	o.addTimeout(cmd, time.Minute)
	return cmd
}

// addTimeout adds a flag to a command. Its default is not that of other commands.
func (o *options) addTimeout(cmd *cobra.Command, limit time.Duration) {
	timeout := cmd.Flags().Duration("timeout", limit, "how long to wait for a node")
	cmd.PreRun = func(*cobra.Command, []string) { o.timeout = *timeout }
}

// within returns a context for the query of a node. A timeout of 0 is none.
func (o *options) within(ctx context.Context) (context.Context, context.CancelFunc) {
	if o.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("no answer within %gs", o.timeout.Seconds()))
}

// podsOfAll returns the pods of the nodes that --node names. If it names none, it returns all
// pods, and notes the nodes that should have one and have none.
func (o *options) podsOfAll(ctx context.Context, stderr io.Writer) ([]pod, error) {
	pods, err := o.pods(ctx, o.nodes)
	if err != nil || len(o.nodes) > 0 {
		return pods, err
	}
	without, err := o.without(ctx, pods)
	switch n := len(without); {
	case err != nil:
		fmt.Fprintln(stderr, "Note: nodes without a pod of kube-ipvs are not named:", oneLine(err.Error()))
	case n == 1:
		fmt.Fprintf(stderr, "1 node has no pod of kube-ipvs: %s\n", without[0])
	case n > 1:
		more := ""
		if n > namedNodes {
			without, more = without[:namedNodes], ", …"
		}
		fmt.Fprintf(stderr, "%d nodes have no pod of kube-ipvs: %s%s\n", n, strings.Join(without, ", "), more)
	}
	return pods, nil
}

// namedNodes is how many nodes a note names.
const namedNodes = 10

// ask runs a command in all pods, several concurrently, and returns the rows in the
// order of the pods.
func (o *options) ask(ctx context.Context, stderr io.Writer, pods []pod, name string, rows summary) []row {
	results := make([][]row, len(pods))
	o.each(stderr, pods, func(i int, p pod) {
		ctx, cancel := o.within(ctx)
		defer cancel()
		var out, problems bytes.Buffer
		code, err := o.exec(ctx, &out, &problems, p, name, "-o", "json")
		if out.Len() > 0 {
			var unreadable error
			if results[i], unreadable = rows(p.node, out.Bytes()); unreadable == nil {
				return
			}
			err = cmp.Or(err, unreadable)
		} else if err == nil {
			err = fmt.Errorf("kube-ipvs %s exited with %d", name, code)
		}
		if err != nil {
			what := err.Error()
			if text := oneLine(problems.String()); text != "" {
				what += ": " + text
			}
			if p.phase != "Running" {
				what = "the pod is " + p.phase + ": " + what
			}
			results[i] = []row{{p.node, string(doctor.Error), what}}
		}
	})
	var all []row
	for _, r := range results {
		all = append(all, r...)
	}
	return all
}

// each calls a function for all pods, several concurrently, and shows the progress.
func (o *options) each(stderr io.Writer, pods []pod, do func(int, pod)) {
	slots := make(chan struct{}, max(o.parallel, 1))
	var running sync.WaitGroup
	var mu sync.Mutex
	done := 0
	for i, p := range pods {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			do(i, p)
			mu.Lock()
			defer mu.Unlock()
			done++
			if len(pods) > 1 {
				fmt.Fprintf(stderr, "\r%d of %d nodes", done, len(pods))
			}
		})
	}
	running.Wait()
	if len(pods) > 1 {
		fmt.Fprintln(stderr)
	}
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// statusOf returns the problems of a node, or a summary.
func statusOf(node string, output []byte) ([]row, error) {
	var components []inspect.Component
	if err := json.Unmarshal(output, &components); err != nil {
		return nil, err
	}
	var rows []row
	fine := map[string]string{}
	for _, c := range components {
		fine[c.Name] = c.What
		if c.Status != string(doctor.OK) {
			rows = append(rows, row{node, c.Status, c.Name + ": " + c.What})
		}
	}
	if len(rows) == 0 {
		rows = []row{{node, string(doctor.OK), fine["kube-ipvs"] + "; " + fine["IPVS"]}}
	}
	return rows, nil
}

func doctorOf(node string, output []byte) ([]row, error) {
	var findings []doctor.Finding
	if err := json.Unmarshal(output, &findings); err != nil {
		return nil, err
	}
	var rows []row
	for _, f := range findings {
		if f.Severity == doctor.OK || f.Severity == doctor.Note {
			continue
		}
		what := f.About + ": " + f.What
		if f.Fix != "" {
			what += " (" + f.Fix + ")"
		}
		rows = append(rows, row{node, string(f.Severity), what})
	}
	if len(rows) == 0 {
		rows = []row{{node, string(doctor.OK), fmt.Sprintf("%d checks passed", len(findings))}}
	}
	return rows, nil
}

func diffOf(node string, output []byte) ([]row, error) {
	var changes []inspect.Change
	if err := json.Unmarshal(output, &changes); err != nil {
		return nil, err
	}
	rows := make([]row, 0, len(changes)+1)
	for _, c := range changes {
		rows = append(rows, row{node, string(doctor.Error), c.Part + ": " + c.What})
	}
	if len(rows) == 0 {
		rows = append(rows, row{node, string(doctor.OK), "no difference"})
	}
	return rows, nil
}
