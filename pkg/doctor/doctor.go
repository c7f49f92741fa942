// Package doctor checks a node for problems that affect Services, and names the fix.
// Examine is a pure function of what Observe has read; nothing is changed.
package doctor

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Severity is how serious a finding is.
type Severity string

// Error: connections fail. Warning: some fail, or may fail soon. Note: worth knowing.
// OK: a check has passed.
const (
	Error   Severity = "error"
	Warning Severity = "warning"
	Note    Severity = "note"
	OK      Severity = "OK"
)

// Finding is a problem, or a check that has passed.
type Finding struct {
	Severity Severity `json:"severity"`
	About    string   `json:"about"`
	What     string   `json:"what"`
	Fix      string   `json:"fix,omitempty"`
}

// Facts are the input of the checks.
type Facts struct {
	Nodes []*trace.Node // one per family that could be read
	// Unread are errors of reading the kernel. Data whose reading failed is missing
	// below.
	Unread []error
	// Proxies are the processes of service proxies by name, except this one. Hidden
	// reports whether there may be others: in a Pod without hostPID only the Pod's own
	// processes are visible.
	Proxies map[string][]int
	Hidden  bool
	// Answers are other programs that listen on kube-proxy's ports.
	Answers []Answer
	// Serving reports whether kube-ipvs answers on its port for probes. Unready are its
	// reasons for not being ready.
	Serving bool
	Unready []string
	// Config is the proxy's configuration.
	Config plan.Config
	// Tables are the tables of nftables, such as "ip kube-proxy".
	Tables []string
	// Connections is the number of conntrack entries. Most is their maximum, 0 if
	// unknown.
	Connections, Most int
	// Lacking are iptables extensions that the kernel does not have.
	Lacking map[ip.Family][]string
	// LackingTypes are set types that the kernel does not have.
	LackingTypes []ipset.Type
	// LacksConntrack reports that the kernel has no nf_conntrack_netlink.
	LacksConntrack bool
	// Others are the rules of the iptables back end that the node does not use. Unseen
	// reports that it may have rules which could not be read.
	Others []OtherRules
	Unseen bool
}

// Answer describes a program on one of kube-proxy's ports.
type Answer struct {
	Port int
	Mode string // the response of /proxyMode; "" if the program does not serve that path
}

// check looks for one kind of problem. about and fine are printed if there is none, and
// in addition to a mere note.
type check struct {
	about, fine string
	find        func(*Facts) []Finding
}

var checks = []check{
	{"kernel", "IPVS, IP sets, rules, routes and parameters can be read", unread},
	{"kube-proxy", "does not run on this node, and has left no state that affects packets", both(kubeProxy, otherBackEnd)},
	{"kube-ipvs", "runs, and reports no problem", kubeIPVS},
	{"conntrack", "its table has room", fullConntrack},
	{"parameters", "the node forwards, and connection tracking follows IPVS", eachNode(parameters)},
	{"bridges", "the rules see traffic between pods on one bridge", bridges},
	{"interfaces", "interfaces with their own routing table pass the reverse-path check and have their own source addresses", eachNode(interfaces)},
	{"rules", "the rules of Services are reached, and no rule of another program decides before them", both(rules, lost)},
	{"marks", "no chain of nftables overwrites the marks of Services", eachNode(nativeMarks)},
	{"Services", "each port of a cluster IP has a virtual server; each cluster IP is local, and on no other interface", eachNode(programmed)},
	{"virtual servers", "all belong to Services", eachNode(foreign)},
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

// Examine performs all checks and returns their findings, the worst first. A check
// without findings returns OK.
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

// Sick reports whether the findings include an error.
func Sick(findings []Finding) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == Error })
}

// Write prints findings as text.
func Write(w io.Writer, findings []Finding) error {
	for _, f := range findings {
		if _, err := fmt.Fprintf(w, "%-8s %s: %s\n", f.Severity, f.About, f.What); err != nil {
			return err
		}
		if f.Fix != "" {
			if _, err := fmt.Fprintf(w, "%-8s   %s\n", "", f.Fix); err != nil {
				return err
			}
		}
	}
	return nil
}

func kubeProxy(f *Facts) []Finding {
	var out []Finding
	const fix = "remove its DaemonSet; kube-ipvs takes over the state that it left"
	if pids := f.Proxies["kube-proxy"]; len(pids) > 0 {
		out = append(out, Finding{Error, "kube-proxy", fmt.Sprintf("runs beside kube-ipvs (process %d), and both overwrite each other's state", pids[0]), fix})
	}
	for _, a := range f.Answers {
		if len(out) > 0 {
			break // the process itself, reported above
		}
		if a.Mode != "" {
			out = append(out, Finding{Error, "kube-proxy", fmt.Sprintf("answers on port %d, in mode %s: it runs beside kube-ipvs, and both overwrite each other's state", a.Port, a.Mode), fix})
		} else {
			out = append(out, Finding{Warning, "kube-proxy", fmt.Sprintf("another program uses its port %d, so kube-ipvs cannot serve there", a.Port), "check whether kube-proxy still runs"})
		}
	}
	if slices.ContainsFunc(f.Tables, func(t string) bool { return t == "ip kube-proxy" || t == "ip6 kube-proxy" }) {
		out = append(out, Finding{Error, "kube-proxy", "its nftables mode has left a table, which sends packets to endpoints before IPVS sees them",
			"restart kube-ipvs, or kube-proxy --proxy-mode nftables --cleanup"})
	}
	out = append(out, eachNode(leftovers)(f)...)
	if f.Hidden && len(out) == 0 {
		out = append(out, Finding{Note, "kube-proxy", "its processes are not visible from this Pod (without hostPID): detected by its ports and by its state in the kernel", ""})
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
		return []Finding{{Warning, "kube-ipvs", "does not answer on its port for probes, and its process is not visible from this Pod (without hostPID)",
			"if it does not run, the kernel continues to serve, but does not follow changes"}}
	}
	return []Finding{{Warning, "kube-ipvs", "does not run: the kernel continues to serve, but does not follow changes", "start it"}}
}

// nearlyFull is the fill level of the conntrack table above which it is a problem.
const nearlyFull = 0.9

func fullConntrack(f *Facts) []Finding {
	if f.Most == 0 || float64(f.Connections) < nearlyFull*float64(f.Most) {
		return nil
	}
	return []Finding{{Error, "conntrack", fmt.Sprintf("%d of %d entries: new connections are dropped when it is full", f.Connections, f.Most),
		"raise net.netfilter.nf_conntrack_max (--conntrack-max-per-core, --conntrack-min)"}}
}
