//go:build e2e

package bench

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestInstructions counts the instructions that exchanges through each subject take, and
// leaves figures.json in $LAB_OUT: what the checkout has, with what was measured now in
// its place. It needs a guest whose clock counts instructions (the lab's flag -icount).
//
//	INSTRUCTIONS_WORLDS, INSTRUCTIONS_SUBJECTS, INSTRUCTIONS_PATHS, INSTRUCTIONS_WORKLOADS
//	                      names, separated by semicolons; all if empty
//	INSTRUCTIONS_ABLATION "jumps" or "rules": measures kube-ipvs again without each rule
//	                      of its base chains, or of all chains
//	                      or only without more and more ("tables"); with INSTRUCTIONS_WORLDS,
//	                      in those worlds instead of the default one
//	INSTRUCTIONS_FIGURES  the file in the checkout, instead of figures.json
//	INSTRUCTIONS_SHOW     not empty: prints what each subject has programmed
//	INSTRUCTIONS_VARIANTS "1", or the beginning of names: measures subjects again with other
//	                      kernel parameters and rules
func TestInstructions(t *testing.T) {
	figures, err := LoadFigures(filepath.Join(os.Getenv("LAB_SRC"), cmp.Or(os.Getenv("INSTRUCTIONS_FIGURES"), figuresFile)))
	must(t, err)
	for name, value := range map[string]string{
		"kube-ipvs": os.Getenv("BENCH_VERSION"), "kube-proxy": os.Getenv("BENCH_PEER_VERSION"), "kernel": release(), "date": time.Now().UTC().Format(time.DateOnly),
	} {
		figures.Facts[name] = value
	}
	loadModules(t)
	b := &bench{t: t, results: NewResults(), api: newAPI(t)}
	b.api.addNode()
	for _, n := range numbers(t, "BENCH_SIZES") {
		b.api.grow(n)
		for _, w := range chosen(t, "INSTRUCTIONS_WORLDS", worlds, func(w *world) string { return w.name }) {
			b.countWorld(t, w, n, "", figures, (*counting).count)
			fmt.Printf("\n%s: instructions over the direct path\n\n%s\n", w.name, figures.Table(func(f Figure) bool { return f.World == w.name && f.Services == n && f.Variant == "" }))
		}
		if os.Getenv("INSTRUCTIONS_VARIANTS") != "" {
			b.countWorld(t, worldOfVariants(), n, ", variants", figures, (*counting).variants)
		}
		if os.Getenv("INSTRUCTIONS_ABLATION") != "" {
			for _, w := range worldsOfAblation(t) {
				b.countWorld(t, w, n, ", ablation", figures, (*counting).ablation)
			}
		}
	}
}

// loadModules loads what one of the subjects would load for those after it. The bridges of
// a fabric that is older than br_netfilter would show their packets to netfilter.
func loadModules(t *testing.T) {
	t.Helper()
	out, err := exec.Command("modprobe", "-a", "br_netfilter", "nf_conntrack", "nf_tables", "nft_compat", "xt_set", "ip_vs").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// figuresFile is in the checkout.
const figuresFile = "test/bench/instructions/figures.json"

func release() string {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return ""
	}
	return unix.ByteSliceToString(name.Release[:])
}

// worldOfVariants is the default world with the paths of IPv4 and the subjects of which
// variants are measured.
func worldOfVariants() *world {
	return &world{name: defaultWorld, services: []*countedService{plainService, portService}, paths: []path{clusterIPPath, nodePortPath},
		subjects: []string{Direct, floorName, KubeIPVS}, onlyTCP: true}
}

// worldsOfAblation returns the chosen worlds with TCP only, or the world of variants.
func worldsOfAblation(t *testing.T) []*world {
	if os.Getenv("INSTRUCTIONS_WORLDS") == "" {
		return []*world{worldOfVariants()}
	}
	var list []*world
	for _, w := range chosen(t, "INSTRUCTIONS_WORLDS", worlds, func(w *world) string { return w.name }) {
		tcp := *w
		tcp.onlyTCP = true
		list = append(list, &tcp)
	}
	return list
}

// countWorld has all subjects of a world measured. What was measured is kept after each.
// The name of a test must not occur twice: the "#" that would be added to the second one
// becomes part of a directory, whose name ends there for mount(8).
func (b *bench) countWorld(t *testing.T, w *world, n int, what string, figures *Figures, measure func(*counting)) {
	b.api.enter(w)
	defer b.api.leave(w)
	for _, s := range chosen(t, "INSTRUCTIONS_SUBJECTS", countedSubjects(), func(s countedSubject) string { return s.name }) {
		if slices.Contains(w.subjects, s.name) {
			t.Run(fmt.Sprintf("%s, %s, %d%s", s.name, w.name, n, what), func(t *testing.T) {
				c := &counting{testbed: newTestbed(t, s.program, w), subject: s, world: w, services: n, figures: figures}
				c.begin()
				if os.Getenv("INSTRUCTIONS_SHOW") != "" {
					c.show()
				}
				measure(c)
				c.end()
			})
			must(t, figures.Save(filepath.Join(os.Getenv("LAB_OUT"), "figures.json")))
		}
	}
}

// chosen returns those of a list that an environment variable names, or all.
func chosen[T any](t testing.TB, variable string, all []T, name func(T) string) []T {
	t.Helper()
	value := os.Getenv(variable)
	if value == "" {
		return all
	}
	var list []T
	for word := range strings.SplitSeq(value, ";") {
		for _, s := range all {
			if name(s) == strings.TrimSpace(word) {
				list = append(list, s)
			}
		}
	}
	return list
}

// countedSubject is what leads packets from a VIP to an endpoint: a program, or rules
// that the testbed sets up.
type countedSubject struct {
	name    string
	program *subject
	// conntrack is IPVS's parameter where there is no program; empty is no IPVS.
	conntrack string
}

func countedSubjects() []countedSubject {
	return []countedSubject{
		{name: Direct},
		{name: bareName, conntrack: "0"},
		{name: floorName, conntrack: "1"},
		{name: KubeIPVS, program: byDefault()},
		{name: portName, program: byDefault("--claim-load-balancers", "port")},
		{name: fwmarkName, program: byDefault("--snat-mode", "fwmark")},
		{name: ipvsName, program: dualStack(ipvsPeer)},
		{name: iptName, program: dualStack(iptPeer)},
		{name: nftName, program: dualStack(nftPeer)},
		{name: floorAgainName, conntrack: "1"},
	}
}

// byDefault is our program with default settings, and some more.
func byDefault(args ...string) *subject {
	program := os.Getenv("LAB_KUBE_IPVS")
	if program == "" {
		program = filepath.Join(os.Getenv("LAB_SRC"), "bin/kube-ipvs")
	}
	return dualStack(&subject{name: "kube-ipvs", program: program, args: slices.Concat(common, args)})
}

func dualStack(s *subject) *subject {
	both := *s
	both.args = append(slices.Clone(s.args), "--cluster-cidr", "10.128.0.0/9,fd00:128::/32")
	return &both
}

// passLimit is for a peer's first pass: on one emulated processor some are slow.
const passLimit = 2 * time.Hour

// counting is the measurement of one subject in one world.
type counting struct {
	*testbed
	subject  countedSubject
	world    *world
	services int
	figures  *Figures
	lowest   bool // a figure is its lowest batch, not the median
}

// count measures the subject as it is.
func (c *counting) count() { c.measure("", c.paths()) }

// end lets the program end.
func (c *counting) end() {
	if c.subject.program != nil {
		must(c.t, c.process.Signal(unix.SIGCONT))
		c.stop()
	}
}

// show prints what has been programmed.
func (c *counting) show() {
	for _, command := range []string{"iptables-save", "nft list ruleset", "ip rule", "ip route show table local", "grep -H . /proc/sys/net/ipv4/vs/*"} {
		out, err := c.node.TryExec("sh", "-c", command)
		fmt.Printf("--- %s: %s %v\n%s", c.subject.name, command, err, out)
	}
}

// begin starts the program, and stops it by a signal when it has programmed everything;
// what it has programmed stays.
func (c *counting) begin() {
	switch {
	case c.subject.program != nil:
		c.start()
		c.passed(passLimit)
		must(c.t, c.process.Signal(unix.SIGSTOP))
	case c.subject.conntrack != "":
		c.virtualServers(c.world, c.subject.conntrack)
	}
}

// paths returns the paths to measure. Under kube-proxy, connections of pods on an ENI do not leave
// by it, so there only paths without the ENI are compared.
func (c *counting) paths() []path {
	peer := c.subject.program != nil && c.subject.program.peer
	return slices.DeleteFunc(chosen(c.t, "INSTRUCTIONS_PATHS", slices.Clone(c.world.paths), func(p path) string { return p.name }),
		func(p path) bool { return c.world.eni && peer && !p.elsewhere })
}

// measure measures all workloads on some paths.
func (c *counting) measure(variant string, paths []path) {
	for _, p := range paths {
		if c.subject.conntrack == "1" {
			c.masqueradeOnly(p)
		}
		for _, w := range chosen(c.t, "INSTRUCTIONS_WORKLOADS", workloads, func(w workload) string { return w.name }) {
			if !w.udp || !c.world.onlyTCP && !p.elsewhere {
				c.figure(variant, p, w)
			}
		}
	}
}

// figure measures one figure: the median of its batches, or the lowest one for c.lowest.
// What is in the way drops the exchange: then there is none.
func (c *counting) figure(variant string, p path, w workload) {
	figure := Figure{Services: c.services, World: c.world.name, Subject: c.subject.name, Variant: variant, Path: p.name, Workload: w.title}
	numbers, err := c.instructions(p, w, c.subject.name == Direct)
	if err != nil {
		fmt.Printf("instructions: %s, %s, %s, %s: %v\n", c.subject.name, variant, p.name, w.title, err)
		if variant == "" {
			c.t.Error(err)
		}
		return
	}
	figure.Value = numbers[len(numbers)/2]
	if c.lowest {
		figure.Value = numbers[0]
	}
	c.figures.Put(figure)
	over, _ := c.figures.Over(figure)
	fmt.Printf("instructions: %-25s %-20s %-15s %8d %+8d  %s\n", c.subject.name, p.name, w.title, figure.Value, over, variant)
}
