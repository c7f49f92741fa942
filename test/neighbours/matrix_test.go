//go:build e2e

package neighbours

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// The kinds of destinations.
const (
	toClusterIP  = "ClusterIP"
	toNodePort   = "NodePort"
	toBalancerIP = "load balancer IP"
	toExternalIP = "external IP"
)

var destinations = []string{toClusterIP, toNodePort, toBalancerIP, toExternalIP}

// questions returns the questions of a site's matrix.
func questions(s *site) []Question {
	var all []Question
	for _, c := range s.clients {
		for _, destination := range destinations {
			if s.plan.asks != nil && !s.plan.asks(c, destination) {
				continue
			}
			for n := range services {
				for _, protocol := range protocols {
					for family := range 2 {
						if c.hosts[family] != nil {
							all = append(all, Question{c.name, destination, policyOf(n + 1), string(protocol), family == 1})
						}
					}
				}
			}
		}
	}
	return all
}

// promise is the oracle. It follows ServiceSpec alone. A client that is neither a pod nor
// the node is external, whatever its address is.
func (s *site) promise(q Question) Promise {
	inside := s.client(q.Client).inside
	switch {
	case q.Destination == toClusterIP && !inside:
		return Open
	case q.Destination != toClusterIP && q.Policy == policyOf(localService) && !inside:
		return KeepsClient
	}
	return Answered
}

func (s *site) client(name string) *client {
	all := slices.Concat(s.clients, s.extra)
	return all[slices.IndexFunc(all, func(c *client) bool { return c.name == name })]
}

func (q Question) service() int {
	if q.Policy == policyOf(localService) {
		return localService
	}
	return clusterService
}

func (q Question) family() int {
	if q.IPv6 {
		return 1
	}
	return 0
}

func (p plan) target(q Question) string {
	n, port := q.service(), servicePort(q.service())
	var ips [2]string
	switch q.Destination {
	case toClusterIP:
		ips = clusterIPs(n)
	case toNodePort:
		ips, port = p.nodeIPs(), nodePort(n)
	case toBalancerIP:
		ips = p.balancerIPs(n)
	case toExternalIP:
		ips = p.externalIPs(n)
	}
	return at(ips[q.family()], port)
}

func at(ip string, port uint16) string {
	return netip.AddrPortFrom(netip.MustParseAddr(ip), port).String()
}

// ports assigns each request its own source port. IPVS matches replies on endpoint and
// client only, so it would mix up two VIPs that one client port connects to.
type ports struct{ last atomic.Int32 }

func (p *ports) next() uint16 { return uint16(33000 + p.last.Add(1)%27000) }

// A cell sends requests until all endpoints have answered, and at least as many as round
// robin needs to reach each endpoint while other cells use the same Service. The deadline
// allows for one lost SYN. The second attempt, for cells that differ, allows for a
// machine that stood still. For those that are worse, it does not end after a few failures: the
// next request may be for an endpoint that answers.
const (
	deadline     = 2500 * time.Millisecond
	longDeadline = 7 * time.Second
	briefly      = time.Second
	askedAtOnce  = 16
	leastTries   = 4
	mostTries    = 9
	givesUpAfter = 2
)

// ask sends the requests of one cell.
func (s *side) ask(q Question, limit time.Duration, failures int) Seen {
	seen := Seen{Outcomes: map[string]int{}}
	host := s.client(q.Client).hosts[q.family()]
	endpoints, sources := map[string]bool{}, map[string]bool{}
	enough := func(tries int) bool {
		return tries >= mostTries || tries >= leastTries && len(endpoints) == s.endpoints(q.family())
	}
	for try, failed := 0, 0; !enough(try) && failed < failures; try++ {
		answer := host.DialFrom(s.ports.next(), limit, lab.Protocol(q.Protocol), s.plan.target(q))
		seen.Outcomes[string(answer.Outcome())]++
		if answer.Err != nil {
			failed++
			continue
		}
		endpoints[answer.Server] = true
		sources[s.source(q, answer)] = true
	}
	seen.Endpoints, seen.Sources = slices.Sorted(maps.Keys(endpoints)), slices.Sorted(maps.Keys(sources))
	return seen
}

// endpoints returns the number of endpoints of one family.
func (s *site) endpoints(family int) (count int) {
	for _, e := range s.servers {
		if e.addresses[family].IsValid() {
			count++
		}
	}
	return count
}

// source classifies the address that an endpoint saw.
func (s *side) source(q Question, answer lab.Answer) string {
	seen := answer.SeenSource.Addr()
	switch {
	case s.isNode(seen), s.client(q.Client).hosts[0] == s.Node.Namespace && seen == answer.Local.Addr():
		return "node"
	case seen == answer.Local.Addr():
		return "client"
	}
	return seen.String()
}

func (s *side) isNode(a netip.Addr) bool { return slices.Contains(s.own, a) }

// readOwn reads the node's addresses without VIPs.
func (s *side) readOwn() {
	s.own = nil
	for line := range strings.Lines(s.Node.Exec("ip", "-o", "address")) {
		words := strings.Fields(line)
		if len(words) < 4 || words[1] == "kube-ipvs0" {
			continue
		}
		if prefix, err := netip.ParsePrefix(words[3]); err == nil {
			s.own = append(s.own, prefix.Addr())
		}
	}
}

// askAll asks questions concurrently. It stops asking one after the given number of failures.
func (s *side) askAll(all []Question, limit time.Duration, failures int) []Seen {
	s.readOwn()
	seen := make([]Seen, len(all))
	var wait sync.WaitGroup
	slots := make(chan struct{}, askedAtOnce)
	for i, q := range all {
		wait.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			seen[i] = s.ask(q, limit, failures)
		})
	}
	wait.Wait()
	return seen
}

// compare asks both programs every question. Cells in which kube-ipvs fails are asked
// again, with more time.
func compare(proxy, own *side, wanted func(Question) bool) []Cell {
	all := questions(own.site)
	var seen [2][]Seen
	var wait sync.WaitGroup
	for i, s := range []*side{proxy, own} {
		wait.Go(func() { seen[i] = s.askAll(all, deadline, givesUpAfter) })
	}
	wait.Wait()
	cells := make([]Cell, len(all))
	doubtful := map[int][]int{} // cells to ask again, by the failures after which to give up
	for i, q := range all {
		cells[i] = Cell{Question: q, API: own.promise(q), KubeProxy: seen[0][i], KubeIPVS: seen[1][i]}
		switch cells[i].judge(wanted); cells[i].Verdict {
		case Same:
		case Worse:
			doubtful[mostTries] = append(doubtful[mostTries], i)
		default:
			doubtful[givesUpAfter] = append(doubtful[givesUpAfter], i)
		}
	}
	for failures, list := range doubtful {
		var again []Question
		for _, i := range list {
			again = append(again, all[i])
		}
		for i, s := range []*side{proxy, own} {
			wait.Go(func() { seen[i] = s.askAll(again, longDeadline, failures) })
		}
		wait.Wait()
		for n, i := range list {
			cells[i].KubeProxy, cells[i].KubeIPVS = seen[0][n], seen[1][n]
			cells[i].judge(wanted)
		}
	}
	return cells
}

func (c *Cell) judge(wanted func(Question) bool) {
	c.Verdict = Compare(c.API, c.KubeProxy, c.KubeIPVS, c.API != Open && wanted != nil && wanted(c.Question))
}

func (q Question) String() string {
	return fmt.Sprintf("%s -> %s, %s, %s, IPv%d", q.Client, q.Destination, q.Policy, q.Protocol, 4+2*q.family())
}
