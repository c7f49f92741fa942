// Package doctor looks for what keeps a node from serving Services, and names
// the cure. Examine is a pure function of what Observe has read; nothing is
// changed.
package doctor

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Severity says how much a finding matters.
type Severity string

// The severities: connections fail; some may fail, or soon; and no more than
// worth knowing.
const (
	Error   Severity = "error"
	Warning Severity = "warning"
	Note    Severity = "note"
)

// Finding is one thing that was found.
type Finding struct {
	Severity Severity `json:"severity"`
	About    string   `json:"about"`
	What     string   `json:"what"`
	Cure     string   `json:"cure,omitempty"`
}

// Facts is what is looked at.
type Facts struct {
	Nodes []*trace.Node // one for each family that could be read
	// Unread are errors of reading the kernel: what is missing there.
	Unread []error
	// Proxies are the processes of service proxies, by name, as far as they can
	// be seen; Self is ours.
	Proxies map[string][]int
	// Tables are those of nftables, such as "ip kube-proxy".
	Tables []string
	// Connections are conntrack's entries; Most is how many there may be, 0 if
	// that is not known.
	Connections, Most int
}

// Examine lists all findings, the worst first.
func Examine(f *Facts) []Finding {
	var out []Finding
	for _, err := range f.Unread {
		out = append(out, Finding{Error, "kernel", err.Error(), ""})
	}
	out = append(out, proxies(f)...)
	out = append(out, conntrack(f)...)
	for _, n := range f.Nodes {
		for _, examine := range []func(*trace.Node) []Finding{
			parameters, bridges, interfaces, jumps, shadows, leftovers, programmed, clashes,
		} {
			out = append(out, examine(n)...)
		}
	}
	rank := []Severity{Error, Warning, Note}
	slices.SortStableFunc(out, func(a, b Finding) int {
		return cmp.Compare(slices.Index(rank, a.Severity), slices.Index(rank, b.Severity))
	})
	return slices.Compact(out)
}

// Sick tells whether there is an error among findings.
func Sick(findings []Finding) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == Error })
}

// Write prints findings for people.
func Write(w io.Writer, findings []Finding) error {
	if len(findings) == 0 {
		_, err := fmt.Fprintln(w, "nothing found")
		return err
	}
	for _, f := range findings {
		if _, err := fmt.Fprintf(w, "%-8s %s: %s\n", f.Severity, f.About, f.What); err != nil {
			return err
		}
		if f.Cure != "" {
			if _, err := fmt.Fprintf(w, "%-8s   %s\n", "", f.Cure); err != nil {
				return err
			}
		}
	}
	return nil
}

func proxies(f *Facts) []Finding {
	var out []Finding
	if pids := f.Proxies["kube-proxy"]; len(pids) > 0 {
		out = append(out, Finding{Error, "kube-proxy", fmt.Sprintf("runs beside kube-ipvs (process %d), and each undoes what the other does", pids[0]),
			"remove its DaemonSet; kube-ipvs takes over what it has left"})
	}
	if slices.ContainsFunc(f.Tables, func(t string) bool { return t == "ip kube-proxy" || t == "ip6 kube-proxy" }) {
		out = append(out, Finding{Error, "kube-proxy", "its nftables mode has left a table, which sends packets to endpoints before IPVS sees them",
			"kube-proxy --proxy-mode nftables --cleanup, or nft delete table ip kube-proxy (and ip6)"})
	}
	if len(f.Proxies["kube-ipvs"]) == 0 {
		out = append(out, Finding{Warning, "kube-ipvs", "does not run, or runs where its process cannot be seen (without hostPID)",
			"the kernel goes on serving what it holds, and follows no change"})
	}
	return out
}

// nearlyFull is the share of conntrack's table from which it matters.
const nearlyFull = 0.9

func conntrack(f *Facts) []Finding {
	if f.Most == 0 || float64(f.Connections) < nearlyFull*float64(f.Most) {
		return nil
	}
	return []Finding{{Error, "conntrack", fmt.Sprintf("%d of %d connections: new ones are dropped when it is full", f.Connections, f.Most),
		"raise net.netfilter.nf_conntrack_max (--conntrack-max-per-core, --conntrack-min)"}}
}
