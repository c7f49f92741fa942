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

// traced compares the verdicts of "kube-ipvs trace" with the results of the cells, on the
// nodes of both programs. It skips cells that the API leaves open, because the network
// decides them.
func traced(sides []*side, cells []Cell) Check {
	c := Check{Name: "verdicts of `kube-ipvs trace`"}
	c.KubeProxy, c.KubeIPVS = sides[0].trace(cells, func(c Cell) Seen { return c.KubeProxy }), sides[1].trace(cells, func(c Cell) Seen { return c.KubeIPVS })
	c.judge([]string{tracedRight}, true)
	return c
}

// trace returns tracedRight, or the first wrong verdict. A cell whose requests had
// different results has no verdict.
func (s *side) trace(cells []Cell, seen func(Cell) Seen) string {
	s.t.Helper()
	nodes := s.Node.Trace()
	addresses := map[string]netip.Addr{}
	var first string
	wrong := 0
	for _, c := range cells {
		if c.API == Open {
			continue
		}
		who := fmt.Sprint(c.Client, c.IPv6)
		if !addresses[who].IsValid() {
			addresses[who] = s.addressOf(c.Client, c.family())
		}
		q := trace.Question{Protocol: protocolOf(c.Protocol), From: addresses[who], To: netip.MustParseAddrPort(s.plan.target(c.Question))}
		x := trace.Explain(nodes[c.family()], q)
		answered := x.Verdict.Outcome == trace.Answered
		if seen(c).Always() == answered || answered && seen(c).Outcomes[ok] > 0 {
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
