package plan_test

import (
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Whatever kind of address of a Service a flow is for, it is bound to the ENI by which it enters.
func TestFlowsByAnENIAreBound(t *testing.T) {
	n := newENINode(t)
	n.plug("eth1", 2)
	n.Config.SNAT.Mode = plan.SNATAuto
	rules := plan.ForNode(&n.Config, &n.Node).NAT.Chains[nat.Chain{Family: ip.IPv4, Table: nat.NAT, Name: "KUBE-IPVS-UPLINK"}]
	for _, set := range []plan.SetName{plan.ClusterIP, plan.LoadBalancer, plan.ExternalIP, plan.ExternalIPLocal, plan.NodePorts} {
		bound := false
		for _, r := range rules {
			bound = bound || strings.Contains(string(r), "--match-set "+set.In(ip.IPv4)+" dst,dst ") && strings.HasSuffix(string(r), "-j KUBE-IPVS-ENTRY")
		}
		if !bound {
			t.Errorf("no rule for %s: %q", set.In(ip.IPv4), rules)
		}
	}
}
