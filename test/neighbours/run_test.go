//go:build e2e

package neighbours

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// setup is one neighbour in one configuration.
type setup struct {
	// key names the set-up's file of results, and its known failures.
	key string
	Result
	plan plan
	// build creates the node's pods and starts the neighbour.
	build func(*side)
	// before changes the node before the program starts, while endpoints have other
	// ports: the state that it leaves is stale.
	before func(*side)
	// started runs the neighbour's actions beside a running proxy.
	started func(*side)
	// restart restarts the neighbour; nil: it has nothing to restart.
	restart func(*side)
	// wanted are the cells that must be answered even if kube-proxy fails.
	wanted func(Question) bool
	// checks are further questions.
	checks []check
}

// check is a question outside the matrix. Its result is a word.
type check struct {
	name string
	// good lists the correct results.
	good   []string
	wanted bool
	ask    func(*side) string
}

// stale is how far the endpoints' ports move after before.
const stale = 1000

// run asks every question under both programs, each on a site of its own, and writes the
// result.
func (u setup) run(t *testing.T) {
	begin := time.Now()
	a := newAPI(t)
	sides := []*side{u.newSide(t, kubeProxy), u.newSide(t, kubeIPVS)}
	a.addNode(u.plan.nodeIPs())
	first := u.plan
	if u.before != nil {
		first.shift = stale
	}
	for n := range allServices {
		svc := first.newService(n + 1)
		a.addService(svc, first.newSlices(n+1, svc, sides[0].servers))
	}
	if u.before != nil {
		for _, s := range sides {
			s.plan = first
			u.before(s)
			s.plan = u.plan
		}
		for n := range allServices {
			a.updateSlices(u.plan.newSlices(n+1, u.plan.newService(n+1), sides[0].servers))
		}
	}
	for _, s := range sides {
		s.start()
		if u.started != nil {
			u.started(s)
		}
	}
	t.Logf("both programs serve after %s", time.Since(begin).Round(time.Second))
	r := u.Result
	r.Cells = compare(sides[0], sides[1], u.wanted)
	t.Logf("the matrix is asked after %s", time.Since(begin).Round(time.Second))
	r.Checks = append(r.Checks, traced(sides, r.Cells))
	for _, c := range slices.Concat([]check{foreignFrom("pod"), foreignFrom("node")}, awayFrom(sides[0], "outside"), u.checks) {
		r.Checks = append(r.Checks, c.compare(sides))
	}
	r.Checks = append(r.Checks, u.restarts(sides)...)
	u.judge(t, r)
	r.Seconds = int(time.Since(begin).Seconds())
	r.Time, r.Version = time.Now().UTC(), os.Getenv("NEIGHBOURS_VERSION")
	if os.Getenv("NEIGHBOURS_KERNEL") != "" {
		release, err := os.ReadFile("/proc/sys/kernel/osrelease")
		if err != nil {
			t.Fatal(err)
		}
		r.Kernel = strings.TrimSpace(string(release))
		u.key += "-" + r.Kernel
	}
	u.write(t, r)
}

func (u setup) newSide(t *testing.T, p program) *side {
	t.Helper()
	s := &side{site: newSite(t, u.plan), program: p}
	u.build(s)
	return s
}

func (c check) compare(sides []*side) Check {
	out := Check{Name: c.name, KubeProxy: c.ask(sides[0]), KubeIPVS: c.ask(sides[1])}
	out.judge(c.good, c.wanted)
	return out
}

func (c *Check) judge(good []string, wanted bool) {
	right := func(word string) bool {
		for _, g := range good {
			if word == g {
				return true
			}
		}
		return false
	}
	const late = string(lab.TimedOut) // a client must not wait for what kube-proxy refuses
	switch proxy, own := right(c.KubeProxy), right(c.KubeIPVS); {
	case proxy && !own, strings.Contains(c.KubeIPVS, late) && c.KubeProxy == string(lab.Refused):
		c.Verdict = Worse
	case own && !proxy:
		c.Verdict = Better
	case !own && wanted:
		c.Verdict = Missing
	}
}

// foreignFrom connects to a port of a VIP that no Service has. kube-proxy refuses it. The
// first connection takes until the rules for it are written.
func foreignFrom(name string) check {
	return check{name: "a port of a VIP that no Service has, from " + name, good: []string{"answered by balancer"}, ask: func(s *side) string {
		var words []string
		for family, ip := range foreignIPs {
			answer := s.client(name).hosts[family].DialFrom(s.ports.next(), longDeadline, lab.TCP, at(ip, foreignPort))
			words = append(words, word(answer))
		}
		return both(words)
	}}
}

// awayFrom connects an external client, if there is one, to a Service under Local whose endpoints
// are on other nodes. It is answered if the neighbour masquerades it.
func awayFrom(s *side, name string) (checks []check) {
	if !slices.ContainsFunc(s.clients, func(c *client) bool { return c.name == name }) {
		return nil
	}
	for _, destination := range []string{toNodePort, toBalancerIP} {
		checks = append(checks, check{name: "no endpoint here under Local, " + destination + ", from " + name, good: []string{"answered by " + there}, ask: func(s *side) string {
			var words []string
			for family := range 2 {
				to := at(s.plan.nodeIPs()[family], nodePort(awayService))
				if destination == toBalancerIP {
					to = at(s.plan.balancerIPs(awayService)[family], servicePort(awayService))
				}
				words = append(words, word(s.client(name).hosts[family].DialFrom(s.ports.next(), longDeadline, lab.TCP, to)))
			}
			return both(words)
		}})
	}
	return checks
}

func word(answer lab.Answer) string {
	if answer.Err != nil {
		return string(answer.Outcome())
	}
	return "answered by " + answer.Server
}

// both joins the results of both families.
func both(words []string) string {
	if len(words) == 2 && words[0] != words[1] {
		return fmt.Sprintf("IPv4: %s, IPv6: %s", words[0], words[1])
	}
	return words[0]
}

// judge fails the test for cells that are worse or missing, unless they are known
// failures.
func (u setup) judge(t *testing.T, r Result) {
	t.Helper()
	bad := map[string]string{}
	for _, c := range r.Cells {
		if c.Verdict == Worse || c.Verdict == Missing {
			bad[c.Question.String()] = fmt.Sprintf("%s: kube-proxy: %s; kube-ipvs: %s; API: %s", c.Verdict, c.KubeProxy, c.KubeIPVS, c.API)
		}
	}
	for _, c := range r.Checks {
		if c.Verdict == Worse || c.Verdict == Missing {
			bad[c.Name] = fmt.Sprintf("%s: kube-proxy: %s; kube-ipvs: %s", c.Verdict, c.KubeProxy, c.KubeIPVS)
		}
	}
	for _, k := range knownFailures[u.key] {
		found := 0
		for name, text := range bad {
			if k.matches(name) {
				t.Logf("known failure, row %d: %s: %s", k.row, name, text)
				delete(bad, name)
				found++
			}
		}
		if found == 0 && k.fixing {
			t.Logf("row %d is no failure any more: %s", k.row, k.cells)
		} else if found == 0 {
			t.Errorf("row %d is no failure any more: remove it from knownFailures[%q]: %s", k.row, u.key, k.cells)
		}
	}
	for name, text := range bad {
		t.Errorf("%s: %s", name, text)
	}
}

func (u setup) write(t *testing.T, r Result) {
	t.Helper()
	data, err := json.MarshalIndent(r, "", "\t")
	if err == nil {
		dir := filepath.Join(os.Getenv("LAB_OUT"), "neighbours")
		if err = os.MkdirAll(dir, 0o755); err == nil {
			err = os.WriteFile(filepath.Join(dir, u.key+".json"), data, 0o644)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// path returns the path of a helper program.
func path(name string) string { return filepath.Join(os.Getenv("LAB_CACHE"), "neighbours", name) }

// onlyLong skips a set-up in the short run.
func onlyLong(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("in the long run only")
	}
}

// commands runs lines of a shell script on the node.
func (s *site) commands(lines ...string) {
	s.t.Helper()
	s.Node.Exec("sh", "-ec", strings.Join(lines, "\n"))
}
