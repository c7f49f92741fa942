//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// draining is a node with a client and the endpoint web1 of a Service. The other
// endpoint, web2, is on another node and is removed in all possible ways.
type draining struct {
	*connections
	svc       *corev1.Service
	other     *lab.BridgeNode
	proxy     *lab.Process
	followed  []follow
	lost, cut int // unexpectedly unanswered TCP connections; reset ones
}

// follow is a connection and the endpoint that answered first.
type follow struct {
	*lab.Connection
	protocol lab.Protocol
	server   string
}

func newDraining(t *testing.T) *draining {
	nodes := lab.NewThreeNodes(t)
	d := &draining{
		connections: &connections{t: t, node: nodes.Nodes[0], pods: map[string]*lab.Pod{}, folder: t.TempDir()},
		svc:         newDualStack("web", 1), other: nodes.Nodes[1],
	}
	d.caller = d.node.AddPod("caller")
	for i, name := range []string{"web1", "web2"} {
		d.pods[name] = nodes.Nodes[i].AddPod(name)
		for _, protocol := range lab.Protocols {
			d.pods[name].Serve(name, protocol, webPort)
		}
	}
	d.write(d.svc, ready(d.pods["web1"]), ready(d.pods["web2"]))
	return d
}

// start kills the running process and starts another one.
func (d *draining) start(flags ...string) {
	if d.proxy != nil {
		d.proxy.Stop()
	}
	d.proxy = d.node.StartProxy(func(*lab.Process) error { return hasPassed(d.node.Node) }, append([]string{
		"--manifests", d.folder, "--hostname-override", d.node.Name, "--cluster-cidr", podCIDRs,
		"--ipvs-min-sync-period", "100ms", "--drain-deadline", drainDeadline.String()}, flags...)...)
}

// open opens connections of every protocol until each endpoint has some.
func (d *draining) open() {
	d.t.Helper()
	for _, f := range d.followed {
		f.Reset()
	}
	d.followed = nil
	for _, vip := range clusterIPs(1) {
		for _, protocol := range lab.Protocols {
			for range 2 * reliability.Times(2, 10) { // two endpoints by round robin
				connection, err := d.caller.Connect(busyLimit, protocol, at(vip, 80))
				if err != nil {
					d.t.Fatal(err)
				}
				answer := connection.Ask(busyLimit) // SCTP retransmits after three seconds
				if answer.Err != nil {
					d.t.Fatalf("on a new connection by %s: %s", protocol, answer)
				}
				d.followed = append(d.followed, follow{connection, protocol, answer.Server})
			}
		}
	}
}

// of returns the connections of a protocol to web2.
func (d *draining) of(protocol lab.Protocol) []follow {
	return slices.DeleteFunc(slices.Clone(d.followed), func(f follow) bool { return f.protocol != protocol || f.server != "web2" })
}

// becomes sets the state of web2 and waits until it gets no new connections, or gets them
// again.
func (d *draining) becomes(web2 ...podEndpoint) (since time.Time) {
	d.t.Helper()
	since = time.Now()
	d.write(d.svc, append([]podEndpoint{ready(d.pods["web1"])}, web2...)...)
	servers := 1
	if len(web2) > 0 && web2[0].endpoint == (endpoint{}) {
		servers = 2
	}
	lab.Eventually(d.t, syncLimit, "what becomes of web2 is programmed", func() error { return served(d.node.Node, d.svc, servers) })
	return since
}

// stay checks that the connections are still answered by the same endpoint.
func (d *draining) stay(when string, protocol lab.Protocol) (asked int) {
	d.t.Helper()
	for _, f := range d.of(protocol) {
		asked++
		if answer := f.Ask(busyLimit); answer.Server != f.server {
			d.lost++
			d.t.Errorf("%s: a connection by %s to %s: %s", when, protocol, f.server, answer)
		}
	}
	return asked
}

// nextDatagram is when a client without a reply sends again. IPVS drops packets that
// match the old conntrack entry between the removal of its real server and the deletion
// of the entry.
const nextDatagram = 500 * time.Millisecond

// move checks that web1 answers the sockets, and returns how long the last one took.
func (d *draining) move(when string, since time.Time) time.Duration {
	d.t.Helper()
	for _, f := range d.of(lab.UDP) {
		lab.Eventually(d.t, syncLimit, when+": a socket meets web1", func() error {
			if answer := f.Ask(nextDatagram); answer.Server != "web1" {
				return fmt.Errorf("%s", answer)
			}
			return nil
		})
	}
	return time.Since(since)
}

// end checks that the SCTP associations are no longer answered.
func (d *draining) end(when string) (ended int) {
	d.t.Helper()
	for _, f := range d.of(lab.SCTP) {
		if answer := f.Ask(lostAfter); answer.Err == nil {
			d.t.Errorf("%s: an association: %s", when, answer)
		}
		ended++
	}
	return ended
}

// reset checks that the TCP connections are reset, and returns how long the last one
// took.
func (d *draining) reset(when string, since time.Time) time.Duration {
	d.t.Helper()
	for _, f := range d.of(lab.TCP) {
		lab.Eventually(d.t, 4*syncLimit, when+": a connection is reset", func() error {
			if answer := f.Ask(lostAfter); answer.Outcome() != lab.Reset {
				return fmt.Errorf("%s", answer)
			}
			return nil
		})
		d.cut++
	}
	return time.Since(since)
}

// fresh checks that web1 answers new connections of every protocol, and returns their
// number.
func (d *draining) fresh(when string) (dialled int) {
	d.t.Helper()
	for _, vip := range clusterIPs(1) {
		for _, protocol := range lab.Protocols {
			for range manyRequests {
				dialled++
				if answer := d.caller.DialWithin(busyLimit, protocol, at(vip, 80)); answer.Server != "web1" {
					d.t.Errorf("%s: a new connection by %s: %s", when, protocol, answer)
				}
			}
		}
	}
	return dialled
}

// TestReliabilityDraining makes an endpoint terminate, return, terminate while processes
// are killed, and be removed. Then its node fails.
func TestReliabilityDraining(t *testing.T) {
	record := reliability.Begin(t, reliability.Draining, "lab")
	d := newDraining(t)
	web2 := d.pods["web2"]
	d.start()
	d.open()
	since := d.becomes(terminating(web2))
	moved := d.move("web2 terminates", since)
	tcp, ended := d.stay("web2 terminates", lab.TCP), d.end("web2 terminates")
	fresh := d.fresh("web2 terminates")
	d.becomes(ready(web2))
	back := d.stay("web2 is back", lab.TCP)

	d.start("--udp-drain")
	d.open()
	d.becomes(terminating(web2))
	d.start("--udp-drain")
	kept, drained := d.stay("a process was killed that drained web2", lab.TCP), d.stay("a process was killed that drained web2", lab.UDP)
	since = d.becomes()
	moved = max(moved, d.move("web2 is removed", since))
	d.stay("web2 is removed, and answers", lab.TCP)
	gone(web2, true)
	deadline := d.reset("web2 is gone", time.Now())
	gone(web2, false)

	d.becomes(ready(web2))
	d.open()
	d.other.Down("eth0")
	dead := ready(web2)
	dead.notReady = true
	since = d.becomes(dead)
	elsewhere := d.move("web2's node is dead", since)
	fresh += d.fresh("web2's node is dead")
	flushed := d.reset("web2's node is dead", d.becomes())
	if n := counted(t, d.node.Node, "kube_ipvs_drain_cut_connections_total"); n < float64(d.cut) { // some that clients have closed may count too
		t.Errorf("%d connections were reset, and %v counted", d.cut, n)
	}
	record(
		reliability.Figure{Name: "TCP connections to an endpoint that terminates", Value: float64(tcp + kept), Shows: "IPv4 and IPv6; for half of them the process was killed meanwhile"},
		reliability.Figure{Name: "of these, to an endpoint that became ready again", Value: float64(back), Shows: "it stopped draining, without being removed"},
		reliability.Figure{Name: "UDP flows to an endpoint that terminates, with `--udp-drain`", Value: float64(drained), Shows: "the process was killed meanwhile"},
		reliability.Figure{Name: "of all these, lost", Value: float64(d.lost)},
		reliability.Figure{Name: "UDP flows without it: time until the last one moved to another endpoint", Value: moved.Seconds(), Unit: "s", Shows: "on an emulated node that tests one flow after the other"},
		reliability.Figure{Name: "SCTP associations, which end at once", Value: float64(ended)},
		reliability.Figure{Name: "TCP connections to a removed endpoint that does not answer any more: time until the last one was reset", Value: deadline.Seconds(), Unit: "s", Shows: fmt.Sprintf("with a deadline of %s, checked every 5 s", drainDeadline)},
		reliability.Figure{Name: "UDP flows to a failed node: time until the last one moved to another endpoint", Value: elsewhere.Seconds(), Unit: "s", Shows: "after its endpoint became unready"},
		reliability.Figure{Name: "TCP connections to it: time until the last one was reset", Value: flushed.Seconds(), Unit: "s", Shows: "after its endpoint was removed"},
		reliability.Figure{Name: "new connections meanwhile, of every protocol", Value: float64(fresh), Shows: "all answered by the remaining endpoints"},
	)
}
