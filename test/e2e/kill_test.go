//go:build e2e

package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// kills is a node whose proxy is killed again and again while the Services of its folder
// change. The Service "steady" does not change.
type kills struct {
	*connections
	client *lab.Namespace
	random *rand.Rand
	steady *corev1.Service
	flags  []string
}

// churned is the number of changing Services.
const churned = 6

// TestReliabilityKills kills the process at random times during and after its first sync,
// while Services are created, changed and deleted: KILLS times, by default 12, and 1,000
// in `make reliability`; at most for KILL_LIMIT, if set. Connections to the unchanged
// Service, old and new, are not affected. In the end the kernel equals that of a single
// process on a clean node, and the cleanup restores the state before the test.
func TestReliabilityKills(t *testing.T) {
	record := reliability.Begin(t, reliability.Crash, "lab")
	k := newKills(t)
	before := withoutEmpty(kernelState(k.node.Node))
	began := time.Now()
	process := k.start()
	lab.Eventually(k.t, 4*syncLimit, "the first pass", func() error { return hasPassed(k.node.Node) })
	whole := time.Since(began)
	long := k.openLong(t)
	loads := k.loads()
	stop := k.follow(t)

	times, asked, deadline := 0, 0, killDeadline(t)
	for times < killTimes(t) && time.Now().Before(deadline) {
		process.Stop()
		process = k.start()
		time.Sleep(whole/4 + time.Duration(k.random.Int64N(int64(whole))))
		if times++; times%10 == 0 {
			asked += k.askAll(t, long)
			t.Logf("%d kills after %s", times, time.Since(began).Round(time.Second))
		}
	}
	process.Stop()
	stop()
	asked += k.askAll(t, long)
	answered, failed := 0, 0
	for _, load := range loads {
		tally := load.Stop()
		answered += tally.Outcomes[lab.OK]
		for outcome, n := range tally.Outcomes {
			if outcome != lab.OK {
				failed += n
				t.Errorf("new connections: %d times %s: %v", n, outcome, tally.Failures)
			}
		}
	}
	for _, connection := range long {
		connection.Close()
	}
	differences := k.checkEnd(t, before)
	record(
		reliability.Figure{Name: "kills of the process", Value: float64(times), Shows: fmt.Sprintf("at random times, 0.25 to 1.25 times the duration of a start after it began, while %d Services changed", churned)},
		reliability.Figure{Name: "duration of a start", Value: whole.Seconds(), Unit: "s"},
		reliability.Figure{Name: "new connections to an unchanged Service", Value: float64(answered)},
		reliability.Figure{Name: "of these, not answered", Value: float64(failed)},
		reliability.Figure{Name: "connections to it that stayed open all the time", Value: float64(len(long)), Shows: "TCP, UDP and SCTP, IPv4 and IPv6, from a pod and from an external client"},
		reliability.Figure{Name: "requests on these connections", Value: float64(asked)},
		reliability.Figure{Name: "lines in which the kernel finally differs from a node that was programmed in one sync", Value: float64(differences)},
	)
}

func killTimes(t *testing.T) int {
	times := reliability.Times(12, 1000)
	if text := os.Getenv("KILLS"); text != "" {
		var err error
		if times, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	return times
}

func killDeadline(t *testing.T) time.Time {
	limit := 24 * time.Hour
	if text := os.Getenv("KILL_LIMIT"); text != "" {
		var err error
		if limit, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	return time.Now().Add(limit)
}

func newKills(t *testing.T) *kills {
	nodes := lab.NewThreeNodes(t)
	k := &kills{
		connections: &connections{t: t, node: nodes.Nodes[0], pods: map[string]*lab.Pod{}, folder: t.TempDir()},
		random:      rand.New(rand.NewPCG(7, 7)), steady: newExposed("steady", 1),
	}
	k.caller = k.node.AddPod("caller")
	for _, name := range []string{"web1", "web2"} {
		pod := k.node.AddPod(name)
		for _, protocol := range lab.Protocols {
			pod.Serve(name, protocol, webPort)
		}
		k.pods[name] = pod
	}
	nodes.Fabric.Route("203.0.113.0/24 via " + k.node.IPv4.String())
	nodes.Fabric.Route("fd00:203:1::/64 via " + k.node.IPv6.String())
	k.client = nodes.Client
	k.steady.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	k.write(k.steady, ready(k.pods["web1"]), ready(k.pods["web2"]))
	k.flags = []string{
		"--manifests", k.folder, "--hostname-override", k.node.Name, "--cluster-cidr", podCIDRs,
		"--ipvs-min-sync-period", "100ms", "--drain-deadline", drainDeadline.String(),
	}
	return k
}

func (k *kills) start() *lab.Process {
	return k.node.StartProxy(func(*lab.Process) error { return nil }, k.flags...)
}

// churn changes one Service: its endpoints, its type, its port, or whether it exists.
func (k *kills) churn(random *rand.Rand) {
	n := 2 + random.IntN(churned)
	svc := newExposed(fmt.Sprint("web", n), n)
	web1, web2 := ready(k.pods["web1"]), ready(k.pods["web2"])
	switch random.IntN(6) {
	case 0:
		k.write(svc, web1)
	case 1:
		k.write(svc, web1, web2)
	case 2:
		k.write(svc, web2, terminating(k.pods["web1"]))
	case 3:
		k.write(svc)
	case 4:
		k.write(newDualStack(svc.Name, n), web2)
	case 5:
		for _, name := range []string{"", "-0", "-1"} {
			// The file may not exist.
			_ = os.Remove(filepath.Join(k.folder, svc.Name+name+".yaml"))
		}
	}
}

// follow changes the folder until it is stopped.
func (k *kills) follow(t *testing.T) (stop func()) {
	done := make(chan struct{})
	var churning sync.WaitGroup
	random := rand.New(rand.NewPCG(8, 8))
	churning.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(200 * time.Millisecond):
				k.churn(random)
			}
		}
	})
	stop = sync.OnceFunc(func() { close(done); churning.Wait() })
	t.Cleanup(stop)
	return stop
}

// openLong opens connections and sockets to every kind of address with its own client
// port: IPVS mixes up connections from one port to two VIPs of an endpoint.
func (k *kills) openLong(t *testing.T) []*lab.Connection {
	var long []*lab.Connection
	open := func(from *lab.Namespace, protocol lab.Protocol, address string) {
		connection, err := from.Connect(busyLimit, protocol, address)
		if err != nil {
			t.Fatalf("%s %s: %v", protocol, address, err)
		}
		long = append(long, connection)
	}
	for i := range 2 {
		for _, protocol := range lab.Protocols {
			open(k.caller.Namespace, protocol, at(clusterIPs(1)[i], 80))
		}
		open(k.client, lab.TCP, at(balancerIPs(1)[i], 80))
	}
	return long
}

// busyLimit is the timeout on a machine that keeps starting a program.
const busyLimit = time.Minute

// loads starts clients that connect to the unchanged Service.
func (k *kills) loads() []*lab.Load {
	var loads []*lab.Load
	for i := range 2 {
		loads = append(loads,
			k.caller.PacedLoad(300*time.Millisecond, busyLimit, 1, lab.TCP, at(clusterIPs(1)[i], 80)),
			k.client.PacedLoad(300*time.Millisecond, busyLimit, 1, lab.TCP, at(balancerIPs(1)[i], 80)))
	}
	return loads
}

// askAll sends a request on every connection and returns their number.
func (k *kills) askAll(t *testing.T, long []*lab.Connection) int {
	t.Helper()
	for _, connection := range long {
		if answer := connection.Ask(busyLimit); answer.Err != nil {
			t.Errorf("a connection that was open throughout: %s", answer)
		}
	}
	return len(long)
}

// checkEnd lets a last process repair the kernel, compares the result with that of a
// process on a clean node, and returns the number of differing lines.
func (k *kills) checkEnd(t *testing.T, before string) (differences int) {
	last := k.start()
	lab.Eventually(k.t, 4*syncLimit, "the last process has drained everything", func() error {
		if err := hasPassed(k.node.Node); err != nil {
			return err
		}
		if state := k.node.Exec("ipvsadm", "-Sn"); strings.Contains(state, "-w 0") {
			return fmt.Errorf("not yet:\n%s", state)
		}
		return nil
	})
	after := kernelState(k.node.Node)
	if code, output := k.node.RunProxy("doctor"); code != 0 {
		t.Errorf("doctor finds:\n%s", output)
	}
	last.Terminate()
	if code, output := k.node.RunProxy("--cleanup"); code != 0 {
		t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	if diff := cmp.Diff(before, withoutEmpty(kernelState(k.node.Node))); diff != "" {
		t.Errorf("before the first start (-), and after --cleanup (+):\n%s", diff)
	}
	clean := k.start()
	lab.Eventually(k.t, 4*syncLimit, "a process on the clean node has completed a sync", func() error { return hasPassed(k.node.Node) })
	want := kernelState(k.node.Node)
	clean.Terminate()
	if diff := cmp.Diff(want, after); diff != "" {
		t.Errorf("on a clean node (-), after all kills (+):\n%s", diff)
	}
	is := strings.Split(after, "\n")
	for _, line := range strings.Split(want, "\n") {
		if !slices.Contains(is, line) {
			differences++
		}
	}
	return differences
}
