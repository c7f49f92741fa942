//go:build e2e

package bench

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// One more Service than those that are counted is served by a pod that there is.
var (
	planeIP     = netip.MustParseAddr("10.96.0.20")
	planeServer = netip.MustParseAddr("10.255.0.2")
	planeClient = netip.MustParseAddr("10.255.0.3")
)

// addPlane creates it, by the API server: there is one.
func (a *api) addPlane() {
	a.t.Helper()
	svc, slice := newService(0), newSlice(0, 0)
	svc.Name, slice.Name, slice.Labels = "plane", "plane-1", map[string]string{discoveryv1.LabelServiceName: "plane"}
	svc.Spec.ClusterIP, svc.Spec.ClusterIPs = planeIP.String(), []string{planeIP.String()}
	slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{planeServer.String()}}}
	a.create(metav1.NamespaceDefault, svc, slice)
}

// addPods makes the server's pod, and the clients'.
func (s *site) addPods() {
	server := s.node.Pod("server", "", planeServer.String()+"/32")
	server.Serve("server", lab.TCP, 8000)
	s.client = s.node.Pod("client", "", planeClient.String()+"/32")
}

const (
	planeClients = 4
	planeTime    = 5 * time.Second
	planeLimit   = 10 * time.Second // for one connection
)

// dataPlane has clients connect through a VIP, one connection after the other.
func (r *run) dataPlane() {
	r.t.Helper()
	address := netip.AddrPortFrom(planeIP, 80).String()
	must(r.t, r.client.Do(func() error { _, err := connect(address); return err })) // has the neighbours found
	var all sync.WaitGroup
	took := make([][]float64, planeClients)
	errs := make([]error, planeClients)
	begin := time.Now()
	for i := range planeClients {
		all.Go(func() {
			errs[i] = r.client.Do(func() error {
				for time.Since(begin) < planeTime {
					d, err := connect(address)
					if err != nil {
						return err
					}
					took[i] = append(took[i], milliseconds(d))
				}
				return nil
			})
		})
	}
	all.Wait()
	seconds := time.Since(begin).Seconds()
	var every []float64
	for i := range planeClients {
		if errs[i] != nil {
			r.t.Fatalf("%s: connection %d of a client: %v", r.subject.name, len(took[i])+1, errs[i])
		}
		every = append(every, took[i]...)
	}
	r.put(Connects, float64(len(every))/seconds)
	r.put(Connect99, Percentile(every, 0.99))
	if !r.subject.nftables {
		r.put(Rules, float64(r.rules()))
		r.put(RulesMet, float64(r.rulesMet()))
	}
}

// connect opens a connection, and resets it: closed in turn, it would hold its
// port for a minute.
func connect(address string) (time.Duration, error) {
	begin := time.Now()
	c, err := net.DialTimeout("tcp4", address, planeLimit)
	if err != nil {
		return 0, err
	}
	took := time.Since(begin)
	err = c.(*net.TCPConn).SetLinger(0)
	c.Close()
	return took, err
}

// rules counts those of iptables.
func (s *site) rules() int {
	count := 0
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		for line := range strings.Lines(s.node.Exec(save)) {
			if strings.HasPrefix(line, "-A ") {
				count++
			}
		}
	}
	return count
}

// rulesMet counts those that a connection's first packet is held against until IPVS
// or DNAT chooses a real server.
func (s *site) rulesMet() int {
	s.t.Helper()
	var explained trace.Explanation
	must(s.t, s.node.Do(func() error {
		kernel, err := trace.Read()
		if err != nil {
			return err
		}
		node, err := kernel.Node(ip.IPv4)
		if err != nil {
			return err
		}
		explained = trace.Explain(node, trace.Question{Protocol: ip.TCP, From: planeClient, To: netip.AddrPortFrom(planeIP, 80)})
		return nil
	}))
	for _, step := range explained.Steps {
		if step.Where == "IPVS" || strings.Contains(step.Rule, "-j DNAT") {
			return step.Met
		}
	}
	s.t.Fatalf("%s: no real server is chosen: %+v", s.subject.name, explained)
	return 0
}

// bare is the least that leads a connection through a VIP: IPVS by itself, with as
// many virtual servers as there are Services.
func (b *bench) bare(t *testing.T, n int) {
	r := b.begin(t, &subject{name: Bare}, n)
	must(t, r.node.Do(func() error {
		if err := floorIPVS(n); err != nil {
			return err
		}
		return floorRoutes(n)
	}))
	r.node.Exec("ip", "route", "add", "local", planeIP.String(), "dev", "lo", "table", "local")
	r.node.Exec("ipvsadm", "-A", "-t", planeIP.String()+":80", "-s", "rr")
	r.node.Exec("ipvsadm", "-a", "-t", planeIP.String()+":80", "-r", fmt.Sprintf("%s:8000", planeServer), "-m")
	r.dataPlane()
}

// plane is what is measured of a peer of which the rest is known to be worse.
func (r *run) plane() {
	r.start()
	r.passed(r.limit)
	r.dataPlane()
}
