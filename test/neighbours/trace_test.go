//go:build e2e

package neighbours

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

const tracedRight = "right in all cells"

// traced matches the verdicts of "kube-ipvs trace" on a client's cells against what
// became of its requests, on the nodes of both programs.
func traced(sides []*side, cells []Cell, client string) Check {
	c := Check{Name: "verdicts of `kube-ipvs trace` for “" + client + "”"}
	c.KubeProxy, c.KubeIPVS = sides[0].trace(cells, client, func(c Cell) Seen { return c.KubeProxy }), sides[1].trace(cells, client, func(c Cell) Seen { return c.KubeIPVS })
	c.judge([]string{tracedRight}, true)
	return c
}

// trace returns tracedRight, or the first verdict that is not.
func (s *side) trace(cells []Cell, client string, seen func(Cell) Seen) string {
	s.t.Helper()
	nodes := s.Node.Trace()
	var first string
	wrong := 0
	for _, c := range cells {
		if c.Client != client {
			continue
		}
		q := trace.Question{Protocol: protocolOf(c.Protocol), From: s.addressOf(client, c.family()), To: netip.MustParseAddrPort(s.plan.target(c.Question))}
		x := trace.Explain(nodes[c.family()], q)
		if seen(c).Always() == (x.Verdict.Outcome == trace.Answered) {
			continue
		}
		wrong++
		s.t.Logf("%s: %s: %s, traced as %s", s.program, c.Question, seen(c), lab.Explained(&x))
		if first == "" {
			first = fmt.Sprintf("%s: traced as %s, seen: %s", c.Question, x.Verdict.Outcome, seen(c))
		}
	}
	if wrong > 0 {
		return fmt.Sprintf("%d are wrong, such as %s", wrong, first)
	}
	return tracedRight
}

func protocolOf(name string) ip.Protocol {
	p, err := ip.ParseProtocol(name)
	if err != nil {
		panic(err)
	}
	return p
}

// addressOf returns the address that a client's requests carry.
func (s *side) addressOf(client string, family int) netip.Addr {
	s.t.Helper()
	target := [2]string{"198.51.100.9", "fd00:51::9"}[family]
	out := s.client(client).hosts[family].Exec("ip", "-o", "route", "get", target)
	words := strings.Fields(out)
	for i, w := range words[:len(words)-1] {
		if w == "src" {
			return netip.MustParseAddr(words[i+1])
		}
	}
	s.t.Fatalf("no source towards %s: %s", target, out)
	return netip.Addr{}
}
