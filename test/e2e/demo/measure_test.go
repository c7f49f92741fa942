//go:build e2e

package demo

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// way is how packets passed the node's interfaces to the network. Different ways
// of different packets are all named.
type way struct{ leaves, returns string }

// nothing stands for a way that no packet went.
const nothing = "nothing"

// measurement is what a pod's requests did.
type measurement struct {
	way
	packets  *lab.Capture
	outcomes map[lab.Outcome]int
	servers  map[string]bool
	last     lab.Answer
	// reversePath counts what rp_filter dropped at the node, spoofed what the
	// network dropped for its source.
	reversePath, spoofed int
}

// measure has the pod call the load balancer's address.
func measure(c *lab.ENICluster, options lab.ENIOptions, requests int) measurement {
	m := measurement{outcomes: map[lab.Outcome]int{}, servers: map[string]bool{}}
	m.packets = c.Node.Watch(lab.TCP, c.Endpoints...)
	say("    the pod sends %d request(s)", requests)
	droppedBefore := reversePathDrops(c.Node)
	for range requests {
		m.last = c.Pod.Dial(lab.TCP, c.VIP)
		m.outcomes[m.last.Outcome()]++
		if m.last.Err == nil {
			m.servers[m.last.Server] = true
		}
	}
	m.reversePath = reversePathDrops(c.Node) - droppedBefore
	if options.CheckSources {
		m.spoofed = c.Eth0.Spoofed() + c.Eth1.Spoofed()
	}
	m.way = wayOf(m.packets.Packets(), c.Endpoints)
	return m
}

// wayOf sorts packets into requests that leave and replies that come.
func wayOf(packets []lab.Packet, backends []string) way {
	leaves, returns := map[string]bool{}, map[string]bool{}
	for _, p := range packets {
		switch {
		case p.Out && slices.Contains(backends, p.To.String()):
			leaves[fmt.Sprintf("%s as %s", p.Interface, p.From.Addr())] = true
		case !p.Out && slices.Contains(backends, p.From.String()):
			returns[p.Interface] = true
		}
	}
	return way{leaves: names(leaves), returns: names(returns)}
}

func names(set map[string]bool) string {
	if len(set) == 0 {
		return nothing
	}
	return strings.Join(slices.Sorted(maps.Keys(set)), " and ")
}

// result is the outcome in words.
func (m *measurement) result() string {
	if answered := m.outcomes[lab.OK]; answered > 0 {
		total := 0
		for _, count := range m.outcomes {
			total += count
		}
		return fmt.Sprintf("%d of %d answered, by %s", answered, total, names(m.servers))
	}
	text := fmt.Sprintf("%s after %.1f s", m.last.Outcome(), m.last.Elapsed.Seconds())
	if m.reversePath > 0 {
		text += fmt.Sprintf(", rp_filter dropped %d", m.reversePath)
	}
	if m.spoofed > 0 {
		text += fmt.Sprintf(", the network dropped %d", m.spoofed)
	}
	return text
}

// shownPackets are enough to see which way they go.
const shownPackets = 5

// show prints what the capture saw at the node, behind the virtual server.
func (m *measurement) show() {
	packets := m.packets.Packets()
	for _, p := range packets[:min(len(packets), shownPackets)] {
		direction := "in "
		if p.Out {
			direction = "out"
		}
		fmt.Printf("           %6.3f %s %s %21s > %-21s %s\n",
			p.At.Sub(begin).Seconds(), direction, p.Interface, p.From, p.To, p.Flags)
	}
	if more := len(packets) - shownPackets; more > 0 {
		fmt.Printf("           and %d more\n", more)
	}
	say("    %s", m.result())
}

// row is a line of the table.
type row struct {
	setup string
	measurement
}

func printTable(rows []row) {
	fmt.Println()
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "SET-UP\tREQUEST LEAVES BY\tREPLY COMES BY\tRESULT")
	for _, r := range rows {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", r.setup, r.leaves, r.returns, r.result())
	}
	// To standard output, like everything here: there is nowhere to report to.
	_ = table.Flush()
}

// reversePathDrops counts the packets that rp_filter has dropped at the node.
func reversePathDrops(n *lab.Node) int {
	var text []byte
	// Without the counter the table has one word less; the result is the same.
	_ = n.Do(func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/netstat")
		return err
	})
	var header []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if i := slices.Index(header, "IPReversePathFilter"); i > 0 && i < len(fields) {
			count, _ := strconv.Atoi(fields[i])
			return count
		}
		header = fields
	}
	return 0
}

// command is one look at a node's kernel.
type command struct {
	title string
	args  []string
	// keep selects the lines worth showing; nil for all.
	keep func(line string) bool
}

func (c command) run(setup string, n *lab.Node) string {
	out, err := n.TryExec(c.args[0], c.args[1:]...)
	if err != nil {
		out = err.Error()
	}
	var text strings.Builder
	fmt.Fprintf(&text, "\n--- %s: %s\n", setup, c.title)
	left := 0
	for line := range strings.Lines(out) {
		if c.keep == nil || c.keep(line) {
			text.WriteString(line)
		} else {
			left++
		}
	}
	if left > 0 {
		fmt.Fprintf(&text, "(%d lines left out)\n", left)
	}
	return text.String()
}

// wholeState is everything that kube-ipvs writes; sourceRules are where an SNAT
// source shows.
var (
	wholeState = []command{
		{title: "ipvsadm -Ln", args: []string{"ipvsadm", "-Ln"}},
		{title: "ipset save, the members", args: []string{"ipset", "save"}, keep: isMember},
		{title: "ip rule", args: []string{"ip", "rule"}},
		{title: "iptables-save -c, the rules that matched packets", args: []string{"iptables-save", "-c"}, keep: isMet},
	}
	sourceRules = []command{
		{title: "iptables-save -c -t nat, its rule for the source", args: []string{"iptables-save", "-c", "-t", "nat"}, keep: isSourceRule},
	}
)

func isMember(line string) bool { return strings.HasPrefix(line, "add ") }

// isMet selects the tables' names and the rules whose counters are not zero.
func isMet(line string) bool {
	return strings.HasPrefix(line, "*") || strings.HasPrefix(line, "[") && !strings.HasPrefix(line, "[0:0]")
}

func isSourceRule(line string) bool { return strings.Contains(line, "-j SNAT") }
