//go:build e2e

package bench

import (
	"net/netip"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// One additional Service, which is not counted, has an existing pod as its endpoint.
var (
	planeIP     = netip.MustParseAddr("10.96.0.20")
	planeServer = netip.MustParseAddr("10.255.0.2")
	planeClient = netip.MustParseAddr("10.255.0.3")
)

// addPlane creates that Service through the API server.
func (a *api) addPlane() {
	a.t.Helper()
	svc, slice := newService(0), newSlice(0, 0)
	svc.Name, slice.Name, slice.Labels = "plane", "plane-1", map[string]string{discoveryv1.LabelServiceName: "plane"}
	svc.Spec.ClusterIP, svc.Spec.ClusterIPs = planeIP.String(), []string{planeIP.String()}
	slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{planeServer.String()}}}
	a.create(metav1.NamespaceDefault, svc, slice)
}

// addPods adds the client and the server whose path is traced.
func (s *site) addPods() {
	s.node.Pod("server", "", planeServer.String()+"/32")
	s.node.Pod("client", "", planeClient.String()+"/32")
}

// ruleCounts records the number of iptables rules, and how many of them a packet is
// matched against.
func (r *run) ruleCounts() {
	r.t.Helper()
	if !r.subject.nftables {
		r.put(Rules, float64(r.rules()))
		r.put(RulesMet, float64(r.rulesMet()))
	}
}

// rules returns the number of iptables rules.
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

// rulesMet returns how many rules a connection's first packet is matched against until
// IPVS or DNAT selects a real server.
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
			return step.Rules
		}
	}
	s.t.Fatalf("%s: no real server is chosen: %+v", s.subject.name, explained)
	return 0
}
