// Package doctor looks for what keeps a node from serving Services, and names
// the cure. Examine is a pure function of what Observe has read; nothing is
// changed.
package doctor

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Severity says how much a finding matters.
type Severity string

// The severities: connections fail; some may fail, or soon; worth knowing; and a check
// that has found nothing of these.
const (
	Error   Severity = "error"
	Warning Severity = "warning"
	Note    Severity = "note"
	OK      Severity = "OK"
)

// Finding is one thing that was found, or that a check has found nothing.
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
	// Proxies are the processes of service proxies, by name, but for the one that
	// looks. Hidden reports whether there may be others that cannot be seen: in a Pod
	// without hostPID there are no processes but the Pod's own.
	Proxies map[string][]int
	Hidden  bool
	// Answers are programs that are not this one and answer on kube-proxy's ports.
	Answers []Answer
	// Serving reports whether kube-ipvs answers on its port for probes, and Unready
	// are its reasons for not being ready.
	Serving bool
	Unready []string
	// Config is the proxy's configuration.
	Config plan.Config
	// Tables are those of nftables, such as "ip kube-proxy".
	Tables []string
	// Connections are conntrack's entries; Most is how many there may be, 0 if
	// that is not known.
	Connections, Most int
	// Lacking are extensions of iptables that the kernel does not have.
	Lacking map[ip.Family][]string
	// Others are the rules of the back end of iptables that the node does not use.
	// Unseen reports that there may be some that could not be read.
	Others []OtherRules
	Unseen bool
}

// Answer is of a program on one of kube-proxy's ports.
type Answer struct {
	Port int
	Mode string // as kube-proxy's /proxyMode says it; "" if that is not answered
}

// check looks for one kind of problem. about and fine are what it says when there is
// none; with a problem that is no more than a note it says both.
type check struct {
	about, fine string
	find        func(*Facts) []Finding
}

var checks = []check{
	{"kernel", "IPVS, IP sets, rules, routes and parameters can be read", unread},
	{"kube-proxy", "does not run on this node, and has left nothing that acts on packets", both(kubeProxy, otherBackEnd)},
	{"kube-ipvs", "runs, and is ready", kubeIPVS},
	{"conntrack", "its table has room", conntrack},
	{"parameters", "the node forwards, and connection tracking follows IPVS", eachNode(parameters)},
	{"bridges", "the rules see what pods on one bridge send each other", eachNode(bridges)},
	{"interfaces", "what enters by an interface with a routing table of its own can leave by it, with a source of its own", eachNode(interfaces)},
	{"rules", "the rules of Services are reached, and no other program's decide before them", both(rules, lost)},
	{"Services", "each port of a cluster IP has its virtual server, and is local to the node alone", eachNode(programmed)},
	{"virtual servers", "all are of Services", eachNode(foreign)},
}

func both(a, b func(*Facts) []Finding) func(*Facts) []Finding {
	return func(f *Facts) []Finding { return append(a(f), b(f)...) }
}

func eachNode(find func(*trace.Node) []Finding) func(*Facts) []Finding {
	return func(f *Facts) []Finding {
		var out []Finding
		for _, n := range f.Nodes {
			out = append(out, find(n)...)
		}
		return out
	}
}

// Examine makes every check, and lists what they find, the worst first. A check that
// finds nothing is listed as OK.
func Examine(f *Facts) []Finding {
	var out []Finding
	for _, c := range checks {
		found := c.find(f)
		if !slices.ContainsFunc(found, func(x Finding) bool { return x.Severity != Note }) && (len(f.Nodes) > 0 || len(f.Unread) == 0) {
			out = append(out, Finding{OK, c.about, c.fine, ""})
		}
		out = append(out, found...)
	}
	rank := []Severity{Error, Warning, Note, OK}
	slices.SortStableFunc(out, func(a, b Finding) int {
		return cmp.Compare(slices.Index(rank, a.Severity), slices.Index(rank, b.Severity))
	})
	return slices.Compact(out)
}

func unread(f *Facts) []Finding {
	var out []Finding
	for _, err := range f.Unread {
		out = append(out, Finding{Error, "kernel", err.Error(), ""})
	}
	return out
}

// Sick tells whether there is an error among findings.
func Sick(findings []Finding) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == Error })
}

// Write prints findings for people.
func Write(w io.Writer, findings []Finding) error {
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

func kubeProxy(f *Facts) []Finding {
	var out []Finding
	const cure = "remove its DaemonSet; kube-ipvs takes over what it has left"
	if pids := f.Proxies["kube-proxy"]; len(pids) > 0 {
		out = append(out, Finding{Error, "kube-proxy", fmt.Sprintf("runs beside kube-ipvs (process %d), and each undoes what the other does", pids[0]), cure})
	}
	for _, a := range f.Answers {
		if len(out) > 0 {
			break // it is the process
		}
		if a.Mode != "" {
			out = append(out, Finding{Error, "kube-proxy", fmt.Sprintf("answers on port %d, in mode %s: it runs beside kube-ipvs, and each undoes what the other does", a.Port, a.Mode), cure})
		} else {
			out = append(out, Finding{Warning, "kube-proxy", fmt.Sprintf("another program has its port %d: kube-ipvs cannot be asked there", a.Port), "see whether kube-proxy still runs"})
		}
	}
	if slices.ContainsFunc(f.Tables, func(t string) bool { return t == "ip kube-proxy" || t == "ip6 kube-proxy" }) {
		out = append(out, Finding{Error, "kube-proxy", "its nftables mode has left a table, which sends packets to endpoints before IPVS sees them",
			"restart kube-ipvs, or kube-proxy --proxy-mode nftables --cleanup"})
	}
	out = append(out, eachNode(leftovers)(f)...)
	if f.Hidden && len(out) == 0 {
		out = append(out, Finding{Note, "kube-proxy", "its processes cannot be seen from this Pod (without hostPID): known by its ports and by what it leaves in the kernel", ""})
	}
	return out
}

func kubeIPVS(f *Facts) []Finding {
	switch {
	case len(f.Unready) > 0:
		return []Finding{{Warning, "kube-ipvs", "is not ready: " + strings.Join(f.Unready, "; "), "see its log; kube-ipvs status shows more"}}
	case f.Serving, len(f.Proxies["kube-ipvs"]) > 0:
		return nil
	case f.Hidden:
		return []Finding{{Warning, "kube-ipvs", "does not answer on its port for probes, and its process cannot be seen from this Pod (without hostPID)",
			"the kernel goes on serving what it holds; nothing follows changes if it does not run"}}
	}
	return []Finding{{Warning, "kube-ipvs", "does not run: the kernel goes on serving what it holds, and nothing follows changes", "start it"}}
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
