// Package bench measures the cost of kube-ipvs in the lab, against the minimum that the
// kernel needs and against kube-proxy (make bench). The untagged files store and format
// results and need no lab.
package bench

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// counted is the unit of what is counted on a processor that executes one instruction in a
// nanosecond (the lab's flag -icount).
const counted = "million instructions"

// Measure is a quantity that is measured.
type Measure struct {
	Name, Unit string
	Note       string // how
}

// The measures, in the order of the page.
var (
	ColdStart         = Measure{"Cold start", "s", "From the start of the process on a fresh node until everything is programmed, the reading of the objects from the API server included."}
	Kernel            = Measure{"Kernel part of the cold start", "s", "From the first real server that is written, except those of DNS and of the API server, until everything is programmed; planning is in it. The raw floor's is the sum of its parts."}
	KernelCPU         = Measure{"Processor time in it", "s", "The kernel's own included."}
	FloorIPVS         = Measure{"Raw floor: virtual and real servers", "s", "A small program that does nothing but send the messages, 64 to a write."}
	FloorSets         = Measure{"Raw floor: members of two sets", "s", ""}
	FloorVIPs         = Measure{"Raw floor: VIPs", "s", "Addresses on an interface, or local routes."}
	OneMedian         = Measure{"One endpoint changed, median", "ms", "From the start of the request to the API server until the new real server is written to the kernel."}
	OneTail           = Measure{"One endpoint changed, 99th percentile", "ms", "Of 1,000 changes; of kube-proxy, whose changes take seconds, of few: then it is the worst."}
	OneWorst          = Measure{"One endpoint changed, 99.9th percentile", "ms", "Of 1,000 changes. No check, resync or pod churn is under way."}
	OneDisturbed      = Measure{"The same, 99.9th percentile, beside checks and pod churn", "ms", "Of 1,000 changes, while a pod starts and another one ends every second, and the whole state and the rules are compared every 10 s."}
	PodStart          = Measure{"A pod starts", counted, "Of the whole process, in user space and in the kernel. The loop executes a part of them."}
	ManyEndpoints     = Measure{"One endpoint changed in a Service of 5,000", counted, "Of 20 changes, one after the other; draining the old endpoint is included."}
	FullConntrack     = Measure{"A UDP endpoint changed beside 262,144 conntrack entries", counted, "The median of 5 changes. The kernel's search of the table is included, and what the process does in the 2 s after it. It has no target here: the search waits for memory, so instructions do not show how long it takes."}
	ChangeCPU         = Measure{"One change", counted, "Of the changes of the rolling restart, many at once."}
	StartCounted      = Measure{"Instructions of a cold start", counted, "From the start of the process until everything is programmed, the reading of the objects included. The processor waits for the API server, which is outside of the guest; that is not included."}
	RestartCounted    = Measure{"Instructions of a restart with everything programmed", counted, "From the start of the process until everything is known to be right."}
	FloorCounted      = Measure{"Raw floor", counted, "A small program that does nothing but send the messages: real and virtual servers, members of two sets, VIPs as local routes."}
	KernelCounted     = Measure{"Instructions of the kernel part of a cold start", counted, "From the first real server that is written, except those of DNS and of the API server, until everything is programmed."}
	CheckCounted      = Measure{"Instructions of a comparison of everything", counted, "Of the kernel with the plan, beside the loop; all that the process does until it is at rest."}
	IdleCounted       = Measure{"Idle with all checks", counted + " a second", "Comparisons of everything are included: those that took place, or the share of one if there was none."}
	Emptied           = Measure{"All virtual servers deleted by another program: back after", "s", "From the deletion until the last real server is written."}
	APIWrite          = Measure{"Of that, the request to the API server, median", "ms", "Until it is answered. The watch may deliver before."}
	FirstDNS          = Measure{"DNS in the kernel", "s", "From the start of the process until the endpoint of kube-system's DNS is written."}
	Rate              = Measure{"Endpoint changes a second that were made", "1/s", "1,000 a second were asked for, for a minute. They are written to etcd, from which the API server has them."}
	Overtaken         = Measure{"Under these, changes that were overtaken", "%", "By the next one of their Service, with which they were planned. They are not in what follows."}
	RateMedian        = Measure{"Under these, one change, median", "ms", "From the request to etcd, of 50 changes, until the kernel has it."}
	RateTail          = Measure{"Under these, one change, 99th percentile", "ms", ""}
	Backlog           = Measure{"Under these, the last change in the kernel after", "ms", "From the end of the last request."}
	Rolling           = Measure{"Rolling restart of 500 pods: writes to the kernel", "messages", "The least is 1,500: add the new real server, drain the old one, delete it."}
	Restart           = Measure{"Restart with everything programmed", "s", "From the start of the process until everything is known to be right."}
	Rewrites          = Measure{"Restart with everything programmed: writes to the kernel", "messages", ""}
	IdleChecked       = Measure{"Idle with all checks: processor time", "% of a core", "What follows, and the share of a comparison of everything, if there was none meanwhile. With 30 s between two comparisons, everything is compared every 30 s with up to 666 Services of these, every 8 minutes with 10,000, every 20 minutes with 13,000 or more; less often if reading the kernel is slow."}
	Idle              = Measure{"Idle: processor time", "% of a core", "With what is looked at every second and every 30 s."}
	IdleWork          = Measure{"Idle: programs run and writes to the kernel", "", "In the same time."}
	Check             = Measure{"A comparison of everything: processor time", "s", "Of the kernel with the plan, beside the loop; all that the process does until it is at rest."}
	Memory            = Measure{"Memory after the start", "MB", "Resident."}
	PeakMemory        = Measure{"Most memory during the start", "MB", "Resident (VmHWM)."}
	Churned           = Measure{"Memory after the changes", "MB", "Resident, after all changes above and a comparison with the kernel."}
	Rechurned         = Measure{"Memory after another minute of 1,000 changes a second", "MB", "In the same way: what grows with changes would have grown again."}
	KernelMemory      = Measure{"The kernel's memory for the start", "MB", "SUnreclaim and Percpu of /proc/meminfo after the start, less before it."}
	WideStart         = Measure{"Cold start with Services of 50 endpoints", "s", ""}
	WideCPU           = Measure{"Processor time of it", "s", "Of the process, with its kernel calls; not of the programs that it runs."}
	WideMemory        = Measure{"Memory after it", "MB", "Resident."}
	MixedStart        = Measure{"Cold start with mixed Services", "s", "Each Service has both families, one in ten has a node port, one in twenty a load balancer too."}
	MixedCPU          = Measure{"Processor time of that", "s", ""}
	MixedMemory       = Measure{"Memory after that", "MB", "Resident."}
	MixedPeak         = Measure{"Most memory during that", "MB", "Resident (VmHWM)."}
	MixedKernelMemory = Measure{"The kernel's memory for that", "MB", ""}
	Programs          = Measure{"Programs run for the start", "", "By process accounting."}
	HotPath           = Measure{"Programs run for 500 changes", "", "By process accounting."}
	Rules             = Measure{"Rules of iptables on the node", "", "Of both families: a packet meets some of them."}
	RulesMet          = Measure{"Rules that the first packet of a connection meets", "", "Of iptables, from its entry until a real server is chosen, as `kube-ipvs trace` counts them."}
)

// Measures are all of them.
var Measures = []Measure{
	ColdStart, Kernel, KernelCPU, FloorIPVS, FloorSets, FloorVIPs, FirstDNS, OneMedian, OneTail, OneWorst, OneDisturbed, APIWrite, Rate, Overtaken, RateMedian, RateTail, Backlog,
	Rolling, Emptied, Restart, Rewrites, IdleChecked, Idle, Check, IdleWork, Memory, PeakMemory, Churned, Rechurned, KernelMemory,
	WideStart, WideCPU, WideMemory, MixedStart, MixedCPU, MixedMemory, MixedPeak, MixedKernelMemory, Programs, HotPath, Rules, RulesMet,
}

// Counted are the measures of the page of counted instructions. The first seconds on it are those of
// the counting processor too.
var Counted = []Measure{
	StartCounted, RestartCounted, ChangeCPU, PodStart, ManyEndpoints, FullConntrack, IdleCounted, CheckCounted, FloorCounted, KernelCounted, Emptied, Memory, PeakMemory,
}

// Point identifies a figure: measure, subject and number of Services.
type Point struct {
	Measure, Subject string
	Services         int
}

// Results are the results of a run. Figures that were not measured are absent.
type Results struct {
	Facts    [][2]string // about the run, by name
	Subjects []string    // in the order in which they came
	Figures  map[Point]float64
}

// NewResults returns empty Results.
func NewResults() *Results { return &Results{Figures: map[Point]float64{}} }

// Put stores a figure.
func (r *Results) Put(m Measure, subject string, services int, value float64) {
	if !slices.Contains(r.Subjects, subject) {
		r.Subjects = append(r.Subjects, subject)
	}
	r.Figures[Point{m.Name, subject, services}] = value
}

// Get returns a figure, or false if it was not measured.
func (r *Results) Get(m Measure, subject string, services int) (float64, bool) {
	v, ok := r.Figures[Point{m.Name, subject, services}]
	return v, ok
}

// Fact sets a line about the run.
func (r *Results) Fact(name, value string) {
	at := slices.IndexFunc(r.Facts, func(f [2]string) bool { return f[0] == name })
	if at < 0 {
		at = len(r.Facts)
		r.Facts = append(r.Facts, [2]string{})
	}
	r.Facts[at] = [2]string{name, value}
}

// NotMeasured is the text for a missing figure.
const NotMeasured = "not measured"

// Markdown returns the page with a table for each measure that has figures.
func (r *Results) Markdown(targets []Target) string {
	var b strings.Builder
	b.WriteString("# Measurements\n\nWritten by `make bench`; do not edit. What is not measured says so.\n\n")
	r.writeFacts(&b)
	b.WriteString("\n![Cold start and one change, by the number of Services](measurements.svg)\n")
	r.writeTargets(&b, targets)
	b.WriteString("\n## Figures\n")
	for _, m := range Measures {
		r.writeTable(&b, m)
	}
	return b.String()
}

func (r *Results) writeTargets(b *strings.Builder, targets []Target) {
	b.WriteString("\n## Targets\n\n| target | wanted | measured | |\n|---|---|---|---|\n")
	for _, t := range targets {
		b.WriteString(t.row(r))
	}
}

// CountedPage returns the page of what TestCounted measures.
func (r *Results) CountedPage(targets []Target) string {
	var b strings.Builder
	b.WriteString("# Instructions of the control plane\n\nWritten by `make bench-counted`; do not edit. What is not measured says so.\n\n" +
		"One processor executes one instruction in each nanosecond, so no figure here depends on what else the machine\ndoes. " +
		"Instructions are those of the process in user space and in the kernel, garbage collection included. See\n[how to read the results](README.md#how-to-read-the-results).\n\n")
	r.writeFacts(&b)
	r.writeTargets(&b, targets)
	b.WriteString("\n## Figures\n")
	for _, m := range Counted {
		r.writeTable(&b, m)
	}
	return b.String()
}

// Page returns a page with a table for each of the given measures that has figures.
func (r *Results) Page(title, intro string, measures []Measure) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n%s\n\n", title, intro)
	r.writeFacts(&b)
	for _, m := range measures {
		r.writeTable(&b, m)
	}
	return b.String()
}

func (r *Results) writeFacts(b *strings.Builder) {
	b.WriteString("| | |\n|---|---|\n")
	for _, f := range r.Facts {
		fmt.Fprintf(b, "| %s | %s |\n", f[0], f[1])
	}
}

func (r *Results) writeTable(b *strings.Builder, m Measure) {
	sizes, subjects := r.extent(m)
	if len(sizes) == 0 {
		return
	}
	title := m.Name
	if m.Unit != "" {
		title += ", " + m.Unit
	}
	fmt.Fprintf(b, "\n### %s\n\n", title)
	if m.Note != "" {
		fmt.Fprintf(b, "%s\n\n", m.Note)
	}
	b.WriteString("| Services |")
	for _, n := range sizes {
		fmt.Fprintf(b, " %s |", thousands(n))
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(sizes)) + "\n")
	for _, s := range subjects {
		fmt.Fprintf(b, "| %s |", s)
		for _, n := range sizes {
			fmt.Fprintf(b, " %s |", r.cell(m, s, n))
		}
		b.WriteString("\n")
	}
}

// extent returns the sizes and subjects of a measure's table.
func (r *Results) extent(m Measure) (sizes []int, subjects []string) {
	for p := range r.Figures {
		if p.Measure == m.Name && !slices.Contains(sizes, p.Services) {
			sizes = append(sizes, p.Services)
		}
	}
	slices.Sort(sizes)
	for _, s := range r.Subjects {
		if slices.ContainsFunc(sizes, func(n int) bool { _, ok := r.Get(m, s, n); return ok }) {
			subjects = append(subjects, s)
		}
	}
	return sizes, subjects
}

func (r *Results) cell(m Measure, subject string, services int) string {
	v, ok := r.Get(m, subject, services)
	if !ok {
		return NotMeasured
	}
	return Round(v)
}

// Round formats a figure with three significant digits, without trailing zeros.
func Round(v float64) string {
	switch a := math.Abs(v); {
	case a == math.Trunc(a) && a < 1e6 || a >= 100:
		return thousands(int(math.Round(v)))
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// thousands formats a number as 44,125.
func thousands(n int) string {
	text := fmt.Sprint(n)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// Percentile returns the value below which a part of the values lies. part is from 0 to
// 1.
func Percentile(values []float64, part float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)-1, int(part*float64(len(sorted))))]
}
