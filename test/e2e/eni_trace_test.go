//go:build e2e

package e2e

import (
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// checkTraces compares "kube-ipvs trace" with the packets: it must predict for each
// endpoint whether it answers, the interface and the source.
func (m *eniMatrix) checkTraces(t *testing.T, all []asked) {
	nodes := m.Node.Trace()
	for _, a := range all {
		x := trace.Explain(nodes[a.family], m.question(a.eniCell))
		if !m.checkTrace(t, a, x) {
			t.Logf("%s:\n%s", a, lab.Explained(&x))
		}
	}
}

// traced are the protocols of package trace.
var traced = map[lab.Protocol]ip.Protocol{lab.TCP: ip.TCP, lab.UDP: ip.UDP, lab.SCTP: ip.SCTP}

func (m *eniMatrix) question(c eniCell) trace.Question {
	from := m.Interfaces()[0].Addresses[c.family]
	switch c.client.kind {
	case aPod:
		from = m.pods[c.client.number].Addresses[c.family]
	case outside:
		from = netip.MustParseAddr([]string{"198.51.100.200", "fd00:51::200"}[c.family])
	}
	return trace.Question{Protocol: traced[c.protocol], From: from, To: netip.MustParseAddrPort(m.target(c)), In: m.linkOf(c.client)}
}

func (m *eniMatrix) checkTrace(t *testing.T, a asked, x trace.Explanation) bool {
	t.Helper()
	answering, why := a.answering()
	if (why == "") != (x.Verdict.Outcome == trace.Answered) {
		t.Errorf("%s: traced as %s, but: %s", a, x.Verdict, why)
		return false
	}
	if len(x.Doubts) > 0 {
		t.Errorf("%s: rules not evaluated: %q", a, x.Doubts)
		return false
	}
	branches := map[netip.AddrPort]trace.ServerPath{}
	for _, b := range x.RealServers {
		branches[netip.MustParseAddrPort(b.RealServer)] = b
	}
	for _, answer := range a.answers {
		if answer.Err != nil {
			continue
		}
		b := branches[m.endpoint(a.eniCell, answer.Server)]
		seen := answer.SeenSource.Addr()
		if seen == answer.Local.Addr() {
			seen = m.question(a.eniCell).From // a client of that kind
		}
		if b.Verdict.Outcome != trace.Answered || b.SeenSource != seen.String() {
			t.Errorf("%s: traced as %s with the source %s, but: %s", a, b.Verdict, b.SeenSource, answer)
			return false
		}
	}
	for name := range m.servers {
		b, there := branches[m.endpoint(a.eniCell, name)]
		want, answers := answering[name]
		if there && answers != (b.Verdict.Outcome == trace.Answered) {
			t.Errorf("%s: %s traced as %s", a, name, b.Verdict)
			return false
		}
		if answers && want.link != "" && (b.LeavesBy != want.link || b.ReplyEntersBy != want.link) {
			t.Errorf("%s: %s traced out by %s and back by %s, want %s", a, name, b.LeavesBy, b.ReplyEntersBy, want.link)
			return false
		}
	}
	return true
}
