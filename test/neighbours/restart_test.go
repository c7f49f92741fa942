//go:build e2e

package neighbours

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// held is a connection that stays open.
type held struct {
	name       string
	connection *lab.Connection
	server     string
}

// hold opens connections from every client to a ClusterIP, a NodePort and a LoadBalancer
// IP, over both protocols. It omits connections that are not answered.
func (s *side) hold() []held {
	found := make(chan *held)
	asked := 0
	for _, q := range questions(s.site) {
		if q.Destination == toExternalIP {
			continue
		}
		asked++
		go func() { found <- s.holdOne(q) }()
	}
	var all []held
	for range asked {
		if h := <-found; h != nil {
			all = append(all, *h)
		}
	}
	return all
}

// holdOne returns nil for a question that is not answered.
func (s *side) holdOne(q Question) *held {
	host := s.client(q.Client).hosts[q.family()]
	c, err := host.ConnectFrom(s.ports.next(), longDeadline, lab.Protocol(q.Protocol), s.plan.target(q))
	if err != nil {
		return nil
	}
	answer := c.Ask(longDeadline)
	if answer.Err != nil {
		c.Reset()
		return nil
	}
	return &held{q.String(), c, answer.Server}
}

// longest is the maximum number of connections that a line of the page names.
const longest = 4

// broken returns the connections that do not answer, or whose endpoint changed.
func broken(connections []held) map[string]string {
	words := make(chan [2]string)
	for _, h := range connections {
		go func() {
			answer := h.connection.Ask(longDeadline)
			switch {
			case answer.Err != nil:
				words <- [2]string{h.name, string(answer.Outcome())}
			case answer.Server != h.server:
				words <- [2]string{h.name, "answered by another endpoint"}
			default:
				words <- [2]string{}
			}
		}()
	}
	bad := map[string]string{}
	for range connections {
		if w := <-words; w[0] != "" {
			bad[w[0]] = w[1]
		}
	}
	return bad
}

// restarts holds connections open while the program restarts, and then the neighbour. A
// connection that breaks only under kube-ipvs is worse.
func (u setup) restarts(sides []*side) []Check {
	events := []struct {
		name string
		do   func(*side)
	}{{"the program restarts", (*side).restart}, {"the neighbour restarts", u.restart}}
	var checks []Check
	for _, e := range events {
		if e.do == nil {
			continue
		}
		var lost [2]map[string]string
		var count [2]int
		var cells [2]map[string]bool
		for i, s := range sides {
			connections := s.hold()
			count[i] = len(connections)
			e.do(s)
			cells[i] = s.unanswered()
			lost[i] = broken(connections)
			for _, h := range connections {
				h.connection.Reset()
			}
		}
		c := Check{Name: "connections held while " + e.name, KubeProxy: heldText(count[0], lost[0]), KubeIPVS: heldText(count[1], lost[1])}
		for name := range lost[1] {
			if _, too := lost[0][name]; !too {
				c.Verdict = Worse
			}
		}
		checks = append(checks, c, compareUnanswered("new connections after "+e.name, cells))
	}
	return checks
}

func heldText(count int, lost map[string]string) string {
	if len(lost) == 0 {
		return fmt.Sprintf("all %d go on", count)
	}
	names := slices.Sorted(maps.Keys(lost))
	var parts []string
	for _, name := range names[:min(len(names), longest)] {
		parts = append(parts, name+": "+lost[name])
	}
	text := fmt.Sprintf("%d of %d break: %s", len(lost), count, strings.Join(parts, "; "))
	if len(names) > longest {
		text += "; …"
	}
	return text
}

// unanswered returns the TCP cells that twice differ from what the API says.
func (s *side) unanswered() map[string]bool {
	var all []Question
	for _, q := range questions(s.site) {
		if q.Protocol == string(lab.TCP) && s.promise(q) != Open {
			all = append(all, q)
		}
	}
	for _, limit := range []time.Duration{deadline, longDeadline, longDeadline} {
		var again []Question
		for i, seen := range s.askAll(all, limit, givesUpAfter) {
			if !seen.Keeps(s.promise(all[i])) {
				again = append(again, all[i])
			}
		}
		all = again
	}
	bad := map[string]bool{}
	for _, q := range all {
		bad[q.String()] = true
	}
	return bad
}

// compareUnanswered returns worse if a cell fails only under kube-ipvs. The matrix covers
// cells that failed before the restart.
func compareUnanswered(name string, bad [2]map[string]bool) Check {
	c := Check{Name: name, KubeProxy: fmt.Sprintf("%d cells fail", len(bad[0])), KubeIPVS: fmt.Sprintf("%d cells fail", len(bad[1]))}
	for cell := range bad[1] {
		if !bad[0][cell] {
			c.Verdict = Worse
			c.KubeIPVS += ", such as " + cell
			break
		}
	}
	return c
}
