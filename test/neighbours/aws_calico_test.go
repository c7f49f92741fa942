//go:build e2e

package neighbours

import (
	"fmt"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// awsCalico is Felix beside AWS VPC CNI, for policies only, as on many EKS clusters.
var awsCalico = calico{prefix: "eni", denied: [2]string{"10.12.97.62", "fd00:12:97:0:1::4"}, other: true, pods: []calicoPod{
	{"pod", "enipod", "0x21200000"},
	{"pod6", "enipod6", "0x22200000"},
	{"podeni", "enipodeni", "0x23200000"},
	{here, "enihere", "0x31300000"},
	{here + "6", "enihere6", "0x32300000"},
	{here + "eni", "enihereeni", "0x33300000"},
	{"denied", "enidenied", "0x41400000"},
	{"denied6", "enidenied6", "0x42400000"},
}}

// TestNeighbourAWSCalico tests two programs that write marks, connmarks and rules on one node.
func TestNeighbourAWSCalico(t *testing.T) {
	onlyLong(t)
	setup{
		key: "aws-calico", plan: awsPlan,
		Result: Result{Order: 13, Title: "AWS VPC CNI with Calico (Felix) for policies",
			What: fmt.Sprintf(awsWhat, "") + " " +
				fmt.Sprintf(calicoWhat, "iptables", "Insert mode, with `InterfacePrefix` eni, `IptablesMangleAllowAction` Return and no pools; "+
					"a loop looks every second and puts its jumps first again."),
			Missing: "Both daemons themselves: the CNI's calls were made in its order, and Felix's rules are from its source."},
		build: func(s *side) {
			buildAWS(s)
			n := &awsNode{side: s}
			denied := [2]*lab.Namespace{n.pod("denied", 0, awsCalico.denied[0]).Namespace, n.pod("denied6", 0, awsCalico.denied[1]).Namespace}
			n.carryOut()
			s.extra = append(s.extra, &client{name: "denied", hosts: denied, inside: true})
			awsCalico.start(s, "insert")
		},
		restart: func(s *side) { restartAWS(s); awsCalico.write(s, "insert") },
		checks:  []check{policyHolds(0), policyHolds(1)},
	}.run(t)
}
