package loopback

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// NFT is the kernel's rules, reached with the program nft. It is safe for
// concurrent use; its calls act on the calling thread's network namespace.
type NFT struct{ program string }

// New finds nft in the PATH. It fails if there is none, or if the kernel has no
// nf_tables.
func New() (*NFT, error) {
	path, err := exec.LookPath("nft")
	if err != nil {
		return nil, fmt.Errorf("%w: install the package nftables", err)
	}
	n := &NFT{program: path}
	_, err = n.Observe()
	return n, err
}

// Table is the name of ours in each family.
const Table = "kube-ipvs"

// words are nftables' for a family.
var words = map[ip.Family]struct{ family, any, one string }{
	ip.IPv4: {"ip", "127.0.0.0/8", "127.0.0.1"},
	ip.IPv6: {"ip6", "::1", "::1"},
}

// rulesFormat is the table. A request is met before conntrack (-200), and an
// answer behind IPVS (98 and 99), which has given it the loopback address as its
// source. That IPVS has led the connection elsewhere shows in conntrack's tuples: it
// began with another source than a loopback one, and is answered by somebody else;
// that it was nobody's DNAT, as of a host port asked from an address of the node's,
// in its status. In the comments stands what Observe looks for.
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

// input is what nft is given for a change: the family's table is replaced at once.
func input(c Change) string {
	w := words[c.Family]
	// Made first, so that there is one to delete.
	text := fmt.Sprintf("table %[1]s %[2]s\ndelete table %[1]s %[2]s\n", w.family, Table)
	if c.Exchange == (Exchange{}) {
		return text
	}
	e := c.Exchange
	return text + fmt.Sprintf(rulesFormat, w.family, w.any, w.one, e.Mark, e.Source, e.comment())
}

// Observe reads what is ours.
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

// parse gives what the comments of both rules say, and the zero Exchange if there
// are other rules.
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

// Apply makes the changes true, each by itself, and gives back those that were
// not made.
func (n *NFT) Apply(changes []Change) []Failure {
	var failures []Failure
	for _, c := range changes {
		err := check(c)
		if err == nil {
			err = kernel.Change(1, func() error { _, err := n.run(input(c), "-f", "-"); return err })
		}
		if err != nil {
			failures = append(failures, Failure{Change: c, Err: err})
		}
	}
	return failures
}

func (n *NFT) run(input string, args ...string) (string, error) {
	stdout, stderr, err := kernel.Run(n.program, input, args...)
	if err != nil {
		return "", fmt.Errorf("nft %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr))
	}
	return stdout, nil
}
