//go:build e2e

package neighbours

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// The address plan of a cluster with AWS VPC CNI: pods, endpoints and clients have
// addresses of the VPC. IPv6 pods are on the primary interface, as in IPv6 clusters.
var awsPlan = plan{
	gateways: [2]string{"10.12.97.1/24", "fd00:12:97::1/64"}, node: [2]string{"10.12.97.49/24", "fd00:12:97::49/64"},
	lan:    [2]string{"10.12.97.9/24", "fd00:12:97::9/64"},
	beyond: [2]string{"10.12.50.1/24", "fd00:12:50::1/64"}, there: [2]string{"10.12.50.5/24", "fd00:12:50::5/64"},
	pods:        [2]string{"", "fd00:12:97:0:1::/80"},
	externalNet: [2]string{"10.12.115.%d", "fd00:12:115::%d"},
	clusterCIDR: "10.12.0.0/16,fd00:12::/32",
}

// awsENI is the secondary interface: its own address and its subnet.
const (
	awsENI        = "10.12.192.10"
	awsENISubnet  = "10.12.192.0/24"
	awsENIGateway = "10.12.192.1/24"
	awsENITable   = 2 // CalculateRouteTableId(1, 0)
	awsMTU        = 1500
)

const awsWhat = "AWS VPC CNI v1.23.2: `SetupHostNetwork`, `SetupENINetwork`, `SetupPodNetwork`%s of its own packages ran on the node, " +
	"with their defaults; `rp_filter` of the primary interface is 2, as its init container leaves it. " +
	"Endpoints, pods and the client “lan” have addresses of the VPC, which is the cluster CIDR. The fabric drops packets " +
	"with a source that is not the interface's. “lan” is in the node's subnet, “outside” is outside the VPC; external IPs are inside it, load balancer IPs are not."

// TestNeighbourAWS is AWS VPC CNI with pods on the primary and on a secondary
// interface.
func TestNeighbourAWS(t *testing.T) {
	setup{
		key: "aws", plan: awsPlan,
		Result: Result{Order: 10, Title: "AWS VPC CNI", What: fmt.Sprintf(awsWhat, "") +
			" IPv4 as in IPv4 clusters, with one secondary ENI; IPv6 as in IPv6 clusters, with pods on the primary interface. One node has both.",
			Missing: "The CNI's daemon itself needs EC2's API; its calls were made in its order. Prefix delegation, custom networking and several network cards."},
		build: func(s *side) { buildAWS(s) }, restart: restartAWS,
	}.run(t)
}

// awsNode collects the steps for the CNI's code.
type awsNode struct {
	*side
	steps []map[string]any
	env   []string
}

func (n *awsNode) step(do string, fields map[string]any) {
	fields["Do"] = do
	n.steps = append(n.steps, fields)
}

// carryOut runs the collected steps with the CNI's code.
func (n *awsNode) carryOut() {
	n.t.Helper()
	text, err := json.Marshal(n.steps)
	if err != nil {
		n.t.Fatal(err)
	}
	n.steps = nil
	words := append([]string{"AWS_VPC_ENI_MTU=1500", "AWS_VPC_K8S_CNI_LOG_FILE=stderr"}, n.env...)
	n.Node.Feed(string(text), "env", append(words, path("aws"))...)
}

// host sets up the node itself, for both families.
func (n *awsNode) host(securityGroups bool) {
	mac := n.Node.MAC("eth0").String()
	n.step("host", map[string]any{"MAC": mac, "IP": "10.12.97.49", "VPC": []string{"10.12.0.0/16"}, "SecurityGroups": securityGroups})
	n.step("host", map[string]any{"MAC": mac, "IP": "fd00:12:97::49", "VPC": []string{"fd00:12::/32"}, "SecurityGroups": securityGroups, "IPv6": true})
}

// pod creates a pod as the CNI's plugin does. Table 0 is the main table.
func (n *awsNode) pod(name string, table int, ip string) *lab.Pod {
	n.t.Helper()
	pod := &lab.Pod{Namespace: n.Namespace(name), Node: n.Node, HostInterface: "eni" + name, Addresses: []netip.Addr{netip.MustParseAddr(ip)}}
	n.step("pod", map[string]any{"Namespace": pod.Path(), "IP": ip, "Table": table, "HostLink": pod.HostInterface, "MTU": awsMTU})
	if table == 0 {
		n.Eth0.Own(ip)
	}
	return pod
}

func newAWSNode(s *side, env ...string) *awsNode {
	s.Node.Sysctl("net.ipv4.conf.eth0.rp_filter", "2")
	s.Fabric.CheckSources()
	return &awsNode{side: s, env: env}
}

// buildAWS gives the node a secondary ENI and pods on both interfaces.
func buildAWS(s *side) {
	n := newAWSNode(s)
	eth1 := s.Fabric.Segment(awsENIGateway).Attach(s.Node.Namespace, "eth1")
	eth1.Own(awsENI)
	n.host(false)
	n.step("eni", map[string]any{"IP": awsENI, "MAC": s.Node.MAC("eth1").String(), "Subnet": awsENISubnet, "Table": awsENITable})
	n.carryOut()
	pod, pod6 := n.pod("pod", 0, "10.12.97.60"), n.pod("pod6", 0, "fd00:12:97:0:1::2")
	podENI := n.pod("podeni", awsENITable, "10.12.192.44")
	hereV4, hereV6, hereENI := n.pod("here", 0, "10.12.97.61"), n.pod("here6", 0, "fd00:12:97:0:1::3"), n.pod("hereeni", awsENITable, "10.12.192.45")
	eth1.Own("10.12.192.44", "10.12.192.45")
	n.carryOut()
	s.addClients("pod", true, pod.Namespace, pod6.Namespace)
	s.addClients("pod on an ENI", true, podENI.Namespace, nil)
	s.addServer(here, hereV4.Namespace, hereV4.Addresses...)
	s.addServer(here, hereV6.Namespace, hereV6.Addresses...)
	s.addServer(here+"-eni", hereENI.Namespace, hereENI.Addresses...)
	s.state["rules"] = "10.12.192.44 10.12.192.45"
}

// restartAWS does what the CNI's daemon does when it starts.
func restartAWS(s *side) {
	n := &awsNode{side: s}
	n.host(false)
	n.step("eni", map[string]any{"IP": awsENI, "MAC": s.Node.MAC("eth1").String(), "Subnet": awsENISubnet, "Table": awsENITable})
	for _, ip := range strings.Fields(s.state["rules"]) {
		n.step("rules", map[string]any{"IP": ip})
	}
	n.carryOut()
}

// TestNeighbourAWSSecurityGroups is AWS VPC CNI with security groups for pods, in
// both modes. AWS documents the strict one as unsupported with kube-proxy's IPVS mode.
func TestNeighbourAWSSecurityGroups(t *testing.T) {
	for i, mode := range []string{"standard", "strict"} {
		t.Run(mode, func(t *testing.T) {
			onlyLong(t)
			setup{
				key: "aws-security-groups-" + mode, plan: awsPlan,
				Result: Result{Order: 11 + i, Title: "AWS VPC CNI, security groups for pods, " + mode,
					What: fmt.Sprintf(awsWhat, ", `SetupBranchENIPodNetwork`") +
						" The client “pod with security groups” has a branch ENI (a VLAN of a trunk ENI) of its own.",
					Missing: "Endpoints with a branch ENI; the security groups themselves, which are the cloud's."},
				build: func(s *side) { buildBranches(s, mode) }, restart: func(s *side) { setUpTrunk(&awsNode{side: s, env: enforcing(mode)}) },
				wanted: func(q Question) bool { return strings.Contains(q.Client, "security") },
			}.run(t)
		})
	}
}

func buildBranches(s *side, mode string) {
	n := newAWSNode(s, enforcing(mode)...)
	trunk := s.Fabric.Segment(awsENIGateway)
	eth1 := trunk.Attach(s.Node.Namespace, "eth1")
	eth1.Own(awsENI)
	eth1.Accept("10.12.200.0/24", "fd00:12:200::/64", "fe80::/10")
	setUpTrunk(n)
	pod, pod6 := n.pod("pod", 0, "10.12.97.60"), n.pod("pod6", 0, "fd00:12:97:0:1::2")
	hereV4, hereV6 := n.pod("here", 0, "10.12.97.61"), n.pod("here6", 0, "fd00:12:97:0:1::3")
	group := n.branch(trunk, mode, "group", 1, "10.12.200.44", "10.12.200.1", "10.12.200.1/24")
	group6 := n.branch(trunk, mode, "group6", 2, "fd00:12:200::44", "fe80:ec2::1", "fd00:12:200::1/64", "fe80:ec2::1/64")
	n.carryOut()
	s.addClients("pod", true, pod.Namespace, pod6.Namespace)
	s.addClients("pod with security groups", true, group, group6)
	s.addServer(here, hereV4.Namespace, hereV4.Addresses...)
	s.addServer(here, hereV6.Namespace, hereV6.Addresses...)
}

func enforcing(mode string) []string { return []string{"POD_SECURITY_GROUP_ENFORCING_MODE=" + mode} }

// setUpTrunk does what the CNI's daemon does when it starts on a node with a trunk ENI.
func setUpTrunk(n *awsNode) {
	n.host(true)
	n.step("eni", map[string]any{"IP": awsENI, "MAC": n.Node.MAC("eth1").String(), "Subnet": awsENISubnet, "Table": awsENITable, "Trunk": true})
	n.carryOut()
}

// branch makes a pod with a branch ENI. The fabric knows the ENI's hardware address,
// as the cloud does.
func (n *awsNode) branch(trunk *lab.Segment, mode, name string, vlan int, ip, gateway string, fabric ...string) *lab.Namespace {
	n.t.Helper()
	prefix := map[string]string{"strict": "vlan", "standard": "eni"}[mode]
	mac := net.HardwareAddr{0x02, 0xee, 0, 0, 0, byte(vlan)}
	host := n.Namespace(name)
	n.step("branch", map[string]any{
		"Namespace": host.Path(), "IP": ip, "HostLink": prefix + name, "MTU": awsMTU, "VLAN": vlan, "MAC": mac.String(), "Gateway": gateway,
		"Parent": n.linkNumber("eth1"),
	})
	n.Fabric.Neighbour(trunk.VLAN(vlan, fabric...), netip.MustParseAddr(ip), mac)
	return host
}

func (s *site) linkNumber(link string) int {
	s.t.Helper()
	number, _, _ := strings.Cut(s.Node.Exec("ip", "-o", "link", "show", "dev", link), ":")
	n, err := strconv.Atoi(number)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}
