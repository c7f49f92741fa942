//go:build e2e

package neighbours

import (
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// TestNeighbourNone tests a node without other programs, with two properties of its
// links: an uplink with a smaller MTU than the pods', and a bridge without hairpin mode.
func TestNeighbourNone(t *testing.T) {
	onlyLong(t)
	setup{
		key: "none", plan: ordinaryPlan,
		Result: Result{Order: 1, Title: "No neighbour",
			What: "An ordinary node with pods on a bridge, `br_netfilter` on, no hairpin mode; the MTU of the uplink is 1400, the pods' is 1500."},
		build: func(s *side) {
			s.addBridgePods(s.plan)
			s.Node.Exec("modprobe", "br_netfilter")
			s.Eth0.SetMTU(1400)
			s.commands(`for port in $(ip -o link show master cni0 | cut -d: -f2 | cut -d@ -f1); do bridge link set dev $port hairpin off; done`)
			s.Node.Sysctl("net.bridge.bridge-nf-call-iptables", "1")
			s.Node.Sysctl("net.bridge.bridge-nf-call-ip6tables", "1")
		},
		checks: []check{
			uploads(0, toClusterIP), uploads(1, toClusterIP), uploads(0, toBalancerIP), uploads(1, toBalancerIP), uploads(0, toExternalIP), uploads(1, toExternalIP),
			callsItself(0), callsItself(1),
		},
	}.run(t)
}

// uploaded is more than all buffers on the path hold.
const uploaded = 300 << 10

// uploads sends much data from the client "pod" to a Service, often enough that endpoints
// beyond the uplink get some of it.
func uploads(family int, destination string) check {
	return check{name: fmt.Sprintf("a pod sends 300 KiB, over the smaller MTU, to the %s, IPv%d", destination, 4+2*family), good: []string{"arrives"}, ask: func(s *side) string {
		q := Question{Client: "pod", Destination: destination, Policy: policyOf(clusterService), Protocol: "TCP", IPv6: family == 1}
		for range 4 {
			begin := time.Now()
			err := s.upload(q)
			s.t.Logf("%s: 300 KiB, %s: %s, error %v", s.program, q, time.Since(begin).Round(time.Millisecond), err)
			if err != nil {
				return "does not arrive"
			}
		}
		return "arrives"
	}}
}

// upload returns when the endpoint has read everything and has closed the connection.
func (s *side) upload(q Question) error {
	var conn net.Conn
	err := s.client(q.Client).hosts[q.family()].Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", s.plan.target(q), deadline)
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(longDeadline)); err != nil {
		return err
	}
	go func() {
		// A failed write shows in the reply.
		_, _ = io.WriteString(conn, strings.Repeat("x", uploaded))
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(io.Discard, conn)
	return err
}

// callsItself connects from the endpoint "here" to its own Service, often enough that it
// reaches itself.
func callsItself(family int) check {
	return check{name: fmt.Sprintf("an endpoint calls its own Service, without hairpin mode, IPv%d", 4+2*family), good: []string{"answered"}, wanted: true, ask: func(s *side) string {
		for range 4 {
			answer := s.pods[here].DialFrom(s.ports.next(), deadline, "TCP", at(clusterIPs(clusterService)[family], servicePort(clusterService)))
			if answer.Err != nil {
				return string(answer.Outcome())
			}
		}
		return "answered"
	}}
}
