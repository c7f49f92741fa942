package loopback

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

// NFT accesses the kernel's rules by the program nft. It may be used concurrently, and
// acts on the network namespace of the calling thread.
type NFT struct{ program string }

// New finds nft in the PATH. It returns an error if nft is not installed or the kernel
// has no nf_tables.
func New() (*NFT, error) {
	path, err := exec.LookPath("nft")
	if err != nil {
		return nil, fmt.Errorf("%w: install the package nftables", err)
	}
	n := &NFT{program: path}
	_, err = n.Observe()
	return n, err
}

// Table is the name of our table in each family.
const Table = "kube-ipvs"

// words are the keywords of nftables for a family.
var words = map[ip.Family]struct{ family, any, one string }{
	ip.IPv4: {"ip", "127.0.0.0/8", "127.0.0.1"},
	ip.IPv6: {"ip6", "::1", "::1"},
}

// rulesFormat is the table. Requests are changed before conntrack (-200), replies after
// IPVS (98 and 99), which has set the loopback address as their source. Conntrack's
// tuples show that IPVS has routed the connection: it started from a source that is not
// a loopback address, and another host replies. Its status shows that no DNAT was
// involved, such as that of a host port at an address of the node. Observe parses the
// comments.
const rulesFormat = `table %[1]s kube-ipvs {
	chain request {
		type filter hook output priority -290; policy accept;
		meta mark & %#[4]x == %#[4]x %[1]s saddr %[2]s %[1]s daddr %[3]s %[1]s saddr set %[5]s comment "%[6]s"
	}
	chain answer {
		type filter hook input priority 110; policy accept;
		ct direction reply ct status & dnat == 0 ct original %[1]s daddr %[3]s ct original %[1]s saddr != %[2]s ct reply %[1]s saddr != %[2]s %[1]s saddr %[3]s %[1]s daddr set %[3]s comment "%[6]s"
	}
}
`

const commentFormat = "mark 0x%x source %s"

func (e Exchange) comment() string { return fmt.Sprintf(commentFormat, e.Mark, e.Source) }

// input returns the input of nft for a change, which replaces the family's table
// atomically.
func input(c Change) string {
	w := words[c.Family]
	// Created first, so that it exists.
	text := fmt.Sprintf("table %[1]s %[2]s\ndelete table %[1]s %[2]s\n", w.family, Table)
	if c.Exchange == (Exchange{}) {
		return text
	}
	e := c.Exchange
	return text + fmt.Sprintf(rulesFormat, w.family, w.any, w.one, e.Mark, e.Source, e.comment())
}

// Observe reads our rules.
func (n *NFT) Observe() (State, error) {
	tables, err := n.run("", "list", "tables")
	if err != nil {
		return nil, err
	}
	have := State{}
	for f, w := range words {
		name := "table " + w.family + " " + Table
		if !hasLine(tables, name) {
			continue
		}
		text, err := n.run("", append([]string{"list"}, strings.Fields(name)...)...)
		if err != nil {
			return nil, err
		}
		have[f] = parse(text)
	}
	return have, nil
}

func hasLine(text, line string) bool {
	for l := range strings.Lines(text) {
		if strings.TrimSpace(l) == line {
			return true
		}
	}
	return false
}

// parse returns what the comments of both rules say, or the zero Exchange if there are
// other rules.
func parse(text string) Exchange {
	var e Exchange
	var source, first string
	parts := strings.Split(text, `comment "`)[1:]
	for i, p := range parts {
		comment, _, _ := strings.Cut(p, `"`)
		if i == 0 {
			first = comment
		}
		if comment != first {
			return Exchange{}
		}
	}
	if _, err := fmt.Sscanf(first, commentFormat, &e.Mark, &source); err != nil || len(parts) != 2 {
		return Exchange{}
	}
	e.Source, _ = netip.ParseAddr(source)
	return e
}

// Apply makes the changes, each by itself, and returns those that failed.
func (n *NFT) Apply(changes []Change) []Failure {
	var failures []Failure
	for _, c := range changes {
		err := check(c)
		if err == nil {
			err = generation.Change(1, func() error { _, err := n.run(input(c), "-f", "-"); return err })
		}
		if err != nil {
			failures = append(failures, Failure{Change: c, Err: err})
		}
	}
	return failures
}

func (n *NFT) run(input string, args ...string) (string, error) {
	stdout, stderr, err := program.Run(n.program, input, args...)
	if err != nil {
		return "", fmt.Errorf("nft %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr))
	}
	return stdout, nil
}
