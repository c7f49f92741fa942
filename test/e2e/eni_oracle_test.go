//go:build e2e

package e2e

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// The dimensions of the ENI matrix. A set-up is the state of the node, a question is a
// client and a destination, and a cell is both.

// eniSetup is a node and the configuration of its proxy.
type eniSetup struct {
	mode    string
	enis    int
	address bool // the ENIs carry their own addresses
}

func (s eniSetup) String() string {
	return fmt.Sprintf("%s,%d ENIs,with addresses=%v", s.mode, s.enis, s.address)
}

// eniModes are ordered so that state that a mode leaves (src_valid_mark) does not help
// the next one.
var eniModes = []string{"off", "snat", "auto", "fwmark"}

// The endpoints: a pod with an address of eth1's, a pod with one of no ENI's, and
// a pod of another node.
const (
	onENI    = "on-eni"
	ordinary = "ordinary"
	remote   = "remote"
)

// eniPlaces are the locations of a Service's endpoints.
var eniPlaces = [][]string{{onENI}, {ordinary}, {remote}, {onENI, remote}}

// eniProtocols leave SCTP to other tests: a third protocol would make this one much longer.
var eniProtocols = []lab.Protocol{lab.TCP, lab.UDP}

var eniPolicies = []corev1.ServiceExternalTrafficPolicy{
	corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal,
}

// eniClient is a client. A pod's number is that of its ENI, or 0. An external client's
// number is that of the interface to which the cloud delivers its requests.
type eniClient struct {
	kind     string
	number   int
	nodePort bool // connects to the interface's own address instead of a LoadBalancer IP
}

const (
	aPod    = "pod"
	aNode   = "node"
	outside = "outside"
)

func (c eniClient) String() string {
	switch {
	case c.kind == aNode:
		return "the node"
	case c.nodePort:
		return fmt.Sprintf("outside by eth%d to the node port", c.number)
	case c.kind == outside:
		return fmt.Sprintf("outside by eth%d", c.number)
	case c.number == 0:
		return "a pod on no ENI"
	}
	return fmt.Sprintf("a pod on eth%d", c.number)
}

// eniClients returns all clients of a node with a number of ENIs.
func eniClients(enis int) []eniClient {
	clients := []eniClient{{kind: aNode}}
	for number := range enis + 1 {
		clients = append(clients,
			eniClient{kind: aPod, number: number},
			eniClient{kind: outside, number: number},
			eniClient{kind: outside, number: number, nodePort: true})
	}
	return clients
}

// eniService is one Service for each policy and place, numbered from 1.
type eniService struct {
	number int
	policy corev1.ServiceExternalTrafficPolicy
	place  []string
}

func eniServices() []eniService {
	var services []eniService
	for _, policy := range eniPolicies {
		for _, place := range eniPlaces {
			services = append(services, eniService{len(services) + 1, policy, place})
		}
	}
	return services
}

// eniCell is one question in one set-up.
type eniCell struct {
	eniSetup
	eniService
	client   eniClient
	protocol lab.Protocol
	family   int // 0: IPv4, 1: IPv6
}

func (c eniCell) String() string {
	return fmt.Sprintf("%s: IPv%d, %s, %s, endpoints %s, from %s",
		c.eniSetup, []int{4, 6}[c.family], c.protocol, c.policy, strings.Join(c.place, "+"), c.client)
}

func (s eniSetup) cells() []eniCell {
	var cells []eniCell
	for _, service := range eniServices() {
		for _, client := range eniClients(s.enis) {
			for _, protocol := range eniProtocols {
				for family := range 2 {
					cells = append(cells, eniCell{s, service, client, protocol, family})
				}
			}
		}
	}
	return cells
}

// cannot is the reason why a connection cannot work. docs/concepts/eni.md quotes each
// one.
type cannot string

const (
	noSource cannot = "MASQUERADE finds no address on the ENI and uses another interface's, " +
		"but the request still leaves by the ENI"
	noWayBack cannot = "without a mark the return path to the client uses the primary interface: strict `rp_filter` drops " +
		"the request at the ENI, and IPv6, which has no `rp_filter`, sends the reply out by the wrong interface"
	noAddress  cannot = "the node has no such address"
	noEndpoint cannot = "the client's address must be preserved, and no endpoint is on this node"
)

// whoIsSeen is the source address that an endpoint sees.
type whoIsSeen string

const (
	theClient whoIsSeen = "the client"
	// theNode is any address of the node: on a pod's link without an address the kernel
	// chooses one.
	theNode whoIsSeen = "the node"
	// theLink is the address of the interface that the request left by.
	theLink whoIsSeen = "the interface"
)

// eniWant is the expected result of a connection to one endpoint.
type eniWant struct {
	cannot cannot
	seen   whoIsSeen
	// link is the interface by which the request leaves and the endpoint's reply enters;
	// "" is the endpoint's own link.
	link string
}

// want is the oracle. It knows what routing and the cloud permit and what the mode
// promises, and nothing of rules, sets and marks. Client and node always use one
// interface.
func (c eniCell) want(endpoint string) eniWant {
	fromOutside := c.client.kind == outside
	byENI := fromOutside && c.client.number > 0
	replyRouting := c.mode == "auto" || c.mode == "fwmark"
	here := endpoint != remote
	switch {
	case byENI && c.client.nodePort && !c.address:
		return eniWant{cannot: noAddress}
	case byENI && !replyRouting:
		return eniWant{cannot: noWayBack}
	case fromOutside && c.policy == corev1.ServiceExternalTrafficPolicyLocal && !here:
		return eniWant{cannot: noEndpoint}
	case fromOutside && c.policy == corev1.ServiceExternalTrafficPolicyLocal:
		return eniWant{seen: theClient}
	case c.client.kind == aPod && c.policy == corev1.ServiceExternalTrafficPolicyLocal:
		return c.wantItself(here)
	case here:
		return eniWant{seen: theNode}
	case c.client.kind == aPod && c.client.number > 0:
		return c.wantByENI()
	}
	return eniWant{seen: theLink, link: "eth0"}
}

// wantItself returns the result for a pod that keeps its address, and with it its
// interface.
func (c eniCell) wantItself(here bool) eniWant {
	if here {
		return eniWant{seen: theClient}
	}
	return eniWant{seen: theClient, link: fmt.Sprintf("eth%d", c.client.number)}
}

// wantByENI returns the result for a pod on an ENI with an endpoint on another node.
func (c eniCell) wantByENI() eniWant {
	switch {
	case c.mode == "fwmark", c.mode == "auto" && !c.address:
		return eniWant{seen: theLink, link: "eth0"}
	case c.address:
		return eniWant{seen: theLink, link: fmt.Sprintf("eth%d", c.client.number)}
	}
	return eniWant{cannot: noSource}
}

// answering returns the endpoints that must answer, each with the expected result.
// Endpoints that the policy excludes are not missed if others exist: then every
// connection is answered. Otherwise why is the reason why some or all are not.
func (c eniCell) answering() (answer map[string]eniWant, why cannot) {
	answer = map[string]eniWant{}
	for _, endpoint := range c.place {
		if want := c.want(endpoint); want.cannot != "" {
			why = want.cannot
		} else {
			answer[endpoint] = want
		}
	}
	if why == noEndpoint && len(answer) > 0 {
		why = ""
	}
	return answer, why
}
