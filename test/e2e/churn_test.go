//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// turnover is a Service whose pods are replaced one after the other.
type turnover struct {
	svc  *corev1.Service
	pods []*lab.Pod // all running pods, whether or not they are endpoints
	live []podEndpoint
	next int
}

// replace replaces the oldest pod: a new one becomes ready, the old one terminates and
// leaves the slices. The old pod serves until every node has processed the change, as
// pods with a graceful termination do.
func (o *turnover) replace(set func(...podEndpoint)) {
	added := o.pods[o.next%len(o.pods)]
	o.next++
	set(append(o.live, ready(added))...)
	set(append([]podEndpoint{terminating(o.live[0].pod)}, o.live[1:]...)...)
	set(o.live[1:]...)
}

// has returns an error if a node lacks one of the endpoints.
func (o *turnover) has(node *lab.Node) error {
	table := readIPVS(node)
	for family, ip := range o.svc.Spec.ClusterIPs {
		entry := table[virtualServer{lab.TCP, netip.MustParseAddrPort(at(ip, 80))}]
		want := map[netip.AddrPort]bool{}
		for _, e := range o.live {
			if !e.terminating {
				want[netip.AddrPortFrom(e.pod.Addresses[family], webPort)] = true
			}
		}
		for to := range want {
			if !strings.Contains(entry.realServers[to], "-w 1") {
				return fmt.Errorf("%s lacks %s: %v", ip, to, entry.realServers)
			}
		}
		if entry.active() != len(want) {
			return fmt.Errorf("%s has %v", ip, entry.realServers)
		}
	}
	return nil
}

// rollout is the turnover in the ordinary cluster.
type rollout struct {
	*cluster
	turnover
	t *testing.T
}

// TestChurn replaces a Service's pods while clients connect, as a rollout does, and
// stops, kills and restarts the proxy meanwhile. No connection fails, and open
// connections stay open.
func TestChurn(t *testing.T) {
	r := newRollout(t)
	var loads []*lab.Load
	for _, w := range r.waysIn() {
		loads = append(loads, w.from.PacedLoad(20*time.Millisecond, lab.DialTimeout, 1, lab.TCP, w.address))
	}
	long := r.openConnections()

	r.replace(2)
	r.restart(syscall.SIGTERM)
	r.replace(1)
	r.restart(syscall.SIGKILL)
	r.replace(1)

	for _, load := range loads {
		tally := load.Stop()
		if len(tally.Failures) > 0 || len(tally.Outcomes) != 1 {
			t.Errorf("%v, the first failures: %v", tally.Outcomes, tally.Failures)
		}
		if len(tally.Servers) < len(r.pods) {
			t.Errorf("answered by %v alone", tally.Servers)
		}
		t.Log(tally.Outcomes, tally.Servers)
	}
	for _, l := range long {
		if answer := l.Ask(lab.DialTimeout); answer.Err != nil {
			t.Errorf("a connection that was open throughout: %s", answer)
		}
		l.Close()
	}
}

// newRollout creates six pods; two of them are endpoints.
func newRollout(t *testing.T) *rollout {
	r := &rollout{cluster: newCluster(t), t: t, turnover: turnover{svc: newExposed("rollout", 1)}}
	r.pods = []*lab.Pod{r.web1, r.web2}
	for i, node := range []*lab.BridgeNode{r.Nodes[0], r.Nodes[1], r.Nodes[2], r.Nodes[0]} {
		pod := node.AddPod(fmt.Sprintf("web%d", i+3))
		pod.Serve(pod.Name, lab.TCP, webPort)
		pod.Serve(pod.Name, lab.UDP, webPort)
		r.pods = append(r.pods, pod)
	}
	r.live, r.next = []podEndpoint{ready(r.web1), ready(r.web2)}, 2
	// Every step must be a separate sync, although the steps follow quickly.
	r.flags = []string{"--ipvs-min-sync-period", "100ms"}
	r.startProxies()
	r.serve(t, r.svc, dualStackSlices(r.svc, webPort, r.live...), 2, 2, 2)
	return r
}

// wayIn is an address to which a client keeps connecting.
type wayIn struct {
	from    *lab.Namespace
	address string
}

func (r *rollout) waysIn() []wayIn {
	return []wayIn{
		{r.caller3.Namespace, at(clusterIPs(1)[0], 80)},
		{r.caller3.Namespace, at(clusterIPs(1)[1], 80)},
		{r.Client, at(nodeIPs(r.Nodes[2])[0], 30001)},
		{r.Client, at(balancerIPs(1)[0], 80)},
	}
}

// openConnections opens a connection to each endpoint.
func (r *rollout) openConnections() []*lab.Connection {
	var open []*lab.Connection
	for range r.live {
		connection, err := r.caller3.Connect(lab.DialTimeout, lab.TCP, at(clusterIPs(1)[0], 80))
		if err != nil {
			r.t.Fatal(err)
		}
		open = append(open, connection)
	}
	return open
}

// replace replaces several pods.
func (r *rollout) replace(times int) {
	for range times {
		r.turnover.replace(r.set)
	}
}

// set makes these the endpoints and waits until every node has them.
func (r *rollout) set(endpoints ...podEndpoint) {
	r.live = slices.Clone(endpoints)
	for _, slice := range dualStackSlices(r.svc, webPort, endpoints...) {
		r.api.setSlice(slice)
	}
	for _, node := range r.Nodes {
		r.Eventually(syncLimit, node.Name+" has the endpoints", func() error {
			if err := r.has(node.Node); err != nil {
				return err
			}
			return r.hasHairpinMembers(node.Node)
		})
	}
}

// hasHairpinMembers compares KUBE-LOOP-BACK with the endpoints on a node, terminating ones
// included. Real servers do not show the removal of a terminating endpoint, because it already
// has weight 0. Members are deleted last, so that after this no write is outstanding.
func (r *rollout) hasHairpinMembers(node *lab.Node) error {
	members := node.Exec("ipset", "save")
	for _, pod := range r.pods {
		if pod.Node.Name != node.Name {
			continue
		}
		want := slices.ContainsFunc(r.live, func(e podEndpoint) bool { return e.pod == pod })
		for _, a := range pod.Addresses {
			if member := fmt.Sprintf("%s,tcp:%d,%s", a, webPort, a); strings.Contains(members, member) != want {
				return fmt.Errorf("KUBE-LOOP-BACK has %s: %v", member, !want)
			}
		}
	}
	return nil
}

// restart stops the proxies of the two nodes that have clients, checks that the kernel
// continues to serve, and starts them again. A new process does not rewrite correct
// state.
func (r *rollout) restart(signal syscall.Signal) {
	for _, i := range []int{0, 2} {
		if err := r.proxies[i].Signal(signal); err != nil {
			r.t.Fatal(err)
		}
		code := r.proxies[i].ExitCode()
		if signal == syscall.SIGTERM && code != 0 {
			r.t.Errorf("the proxy ended with %d:\n%s", code, r.proxies[i].Log())
		}
		before := kernelState(r.Nodes[i].Node)
		events := r.Nodes[i].Start("ip", "monitor", "address", "link")
		r.startProxy(i)
		if after := kernelState(r.Nodes[i].Node); !sameButDrained(before, after) {
			r.t.Errorf("%s: the restart has changed the kernel:\n%s\nto\n%s", r.Nodes[i].Name, before, after)
		}
		events.Stop()
		if log := events.Log(); strings.Contains(log, "kube-ipvs0") {
			r.t.Errorf("%s: the restart has rewritten addresses:\n%s", r.Nodes[i].Name, log)
		}
	}
}

// sameButDrained compares two states without draining real servers, which are removed
// once they have drained.
func sameButDrained(a, b string) bool {
	return slices.Equal(withoutDraining(a), withoutDraining(b))
}

func withoutDraining(state string) []string {
	return slices.DeleteFunc(strings.Split(state, "\n"), func(line string) bool { return strings.HasSuffix(line, "-w 0") })
}

// TestIssue71514UDPChurn removes an endpoint while clients keep their sockets. Once the
// change is in the kernel, no datagram reaches that endpoint, and another one answers.
func TestIssue71514UDPChurn(t *testing.T) {
	r := newRollout(t)
	for _, w := range r.waysIn() {
		sockets, removed := r.openSockets(w), r.live[0].pod
		met := 0
		for _, socket := range sockets {
			answer := socket.Ask(lab.DialTimeout)
			if answer.Err != nil {
				t.Errorf("%s before the change: %s", w.address, answer)
			}
			if answer.Server == removed.Name {
				met++
			}
		}
		if met == 0 {
			t.Errorf("%s: no client has met %s", w.address, removed.Name)
		}
		r.replace(1)
		for _, socket := range sockets {
			if answer := socket.Ask(lab.DialTimeout); answer.Err != nil || answer.Server == removed.Name {
				t.Errorf("%s after %s was removed: %s", w.address, removed.Name, answer)
			}
			socket.Close()
		}
	}
}

// openSockets opens enough sockets to reach every endpoint.
func (r *rollout) openSockets(w wayIn) []*lab.Connection {
	var sockets []*lab.Connection
	for range manyRequests {
		socket, err := w.from.Connect(lab.DialTimeout, lab.UDP, w.address)
		if err != nil {
			r.t.Fatal(err)
		}
		sockets = append(sockets, socket)
	}
	return sockets
}
