//go:build e2e

package e2e

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// The dimensions of the behavior matrix. Its oracle follows the Service and EndpointSlice
// API and knows nothing of IPVS, sets and marks.

// Two pods may be endpoints. node3 has none.
const (
	web1 = "web1" // on node1
	web2 = "web2" // on node2
)

// endpointNodes maps endpoints to their nodes.
var endpointNodes = map[string]int{web1: 1, web2: 2}

// condition is the state of an endpoint in its EndpointSlice.
type condition int

const (
	absent        condition = iota
	isReady                 // ready
	isUnready               // neither ready nor serving
	isTerminating           // terminating and serving
	isGone                  // terminating and not serving
)

// place is the set of endpoints that a Service has.
type place struct {
	name       string
	conditions map[string]condition
}

var places = []place{
	{"on node1", map[string]condition{web1: isReady}},
	{"on node2", map[string]condition{web2: isReady}},
	{"on both", map[string]condition{web1: isReady, web2: isReady}},
	{"none", nil},
	{"all terminating", map[string]condition{web1: isTerminating, web2: isTerminating}},
	{"node1's terminating", map[string]condition{web1: isTerminating, web2: isReady}},
	{"none that serves", map[string]condition{web1: isUnready, web2: isGone}},
}

// eligible returns the endpoints that get traffic, on one node or on any (0): the ready
// ones or, if there are none, those that terminate and still serve (KEP-1669). For one
// node only its own endpoints count.
func (p place) eligible(node int) []string {
	for _, wanted := range []condition{isReady, isTerminating} {
		var found []string
		for _, name := range []string{web1, web2} {
			if p.conditions[name] == wanted && (node == 0 || endpointNodes[name] == node) {
				found = append(found, name)
			}
		}
		if len(found) > 0 {
			return found
		}
	}
	return nil
}

// matrixService is one Service for each pair of policies and place, numbered from 1.
type matrixService struct {
	number                       int
	externalLocal, internalLocal bool // the traffic policies; else Cluster
	place                        place
}

func matrixServices() []matrixService {
	var services []matrixService
	for _, external := range []bool{false, true} {
		for _, internal := range []bool{false, true} {
			for _, place := range places {
				services = append(services, matrixService{len(services) + 1, external, internal, place})
			}
		}
	}
	return services
}

func (s matrixService) String() string {
	policy := map[bool]string{false: "Cluster", true: "Local"}
	return fmt.Sprintf("eTP %s, iTP %s, endpoints %s", policy[s.externalLocal], policy[s.internalLocal], s.place.name)
}

// matrixClient is a client.
type matrixClient struct {
	name string
	kind clientKind
	// node is the node that the client is on, or is. For an external client it is the
	// node that its packets to VIPs are routed to.
	node int
}

type clientKind int

const (
	podClient clientKind = iota
	nodeClient
	outsideClient
)

var matrixClients = []matrixClient{
	{web1, podClient, 1}, // an endpoint as client, maybe of itself
	{"pod1", podClient, 1},
	{"pod3", podClient, 3},
	{"node1", nodeClient, 1},
	{"node3", nodeClient, 3},
	{"outside1", outsideClient, 1},
	{"outside3", outsideClient, 3},
}

// destination is the kind of address that a client connects to.
type destination struct {
	kind destinationKind
	node int // whose address it is; 0: a VIP
}

type destinationKind string

const (
	clusterIP    destinationKind = "cluster IP"
	externalIP   destinationKind = "external IP"
	balancerIP   destinationKind = "load balancer IP"
	nodePort     destinationKind = "node port"
	podSidePort  destinationKind = "node port at the address on the pods' side"
	loopbackPort destinationKind = "node port at the loopback address"
	// vipNodePort does not reach a Service: only node addresses have node ports.
	vipNodePort destinationKind = "the node port's number at the cluster IP"
)

var destinations = []destination{
	{clusterIP, 0}, {externalIP, 0}, {balancerIP, 0}, {nodePort, 1}, {nodePort, 3},
	{podSidePort, 1}, {podSidePort, 3}, {loopbackPort, 1}, {loopbackPort, 3}, {vipNodePort, 0},
}

func (d destination) String() string {
	if d.node == 0 {
		return string(d.kind)
	}
	return fmt.Sprintf("%s, node%d", d.kind, d.node)
}

// asks reports whether a cell exists. Only a node itself can use its loopback address. An
// external client cannot reach the pods' side, and reaches VIPs only through the node
// that its packets are routed to.
func (c matrixClient) asks(d destination) bool {
	switch d.kind {
	case loopbackPort:
		return c.kind == nodeClient && c.node == d.node
	case podSidePort:
		return c.kind != outsideClient && c.node == d.node
	case nodePort:
		return c.kind != outsideClient || c.node == d.node
	}
	return true
}

// matrixSetup is a configuration of the proxies.
type matrixSetup struct {
	name      string
	protocols []lab.Protocol
	flags     []string
	// byBridge: a node recognizes pods by their bridge, and so only its own pods.
	byBridge bool
}

var matrixSetups = []matrixSetup{
	{name: "as by default", protocols: lab.Protocols, flags: []string{"--cluster-cidr", podCIDRs}},
	{
		name: "VIPs claimed in other ways, pods known by their bridge", protocols: []lab.Protocol{lab.TCP},
		flags: []string{
			"--claim-cluster-ips", "route", "--claim-external-ips", "address", "--claim-load-balancers", "route",
			"--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "cni0",
		},
		byBridge: true,
	},
}

// matrixCell is one connection to test.
type matrixCell struct {
	setup matrixSetup
	matrixService
	client      matrixClient
	destination destination
	protocol    lab.Protocol
	family      int // 0: IPv4, 1: IPv6
}

func (c matrixCell) String() string {
	return fmt.Sprintf("%s IPv%d, %s: %s, from %s", c.protocol, []int{4, 6}[c.family], c.matrixService, c.destination, c.client.name)
}

// cells returns the cells of one family. Adjacent cells use different Services.
func (s matrixSetup) cells(family int) []matrixCell {
	var cells []matrixCell
	for _, client := range matrixClients {
		for _, destination := range destinations {
			for _, protocol := range s.protocols {
				for _, service := range matrixServices() {
					if client.asks(destination) {
						cells = append(cells, matrixCell{s, service, client, destination, protocol, family})
					}
				}
			}
		}
	}
	return cells
}

// verdict is the expected result of a cell's connections.
type verdict struct {
	fate fate
	// answers maps each endpoint that must answer to the source that it must see. No
	// other endpoint may answer.
	answers map[string]source
	why     deviation
}

type fate string

const (
	isAnswered fate = "answered"
	isRefused  fate = "refused"
	isDropped  fate = "dropped"
)

type source string

const (
	theClients source = "the client's own"
	theNodes   source = "the asked node's"
)

// deviation is the reason for a deviation from the API. docs/concepts/traffic-policies.md
// quotes each one.
type deviation string

const (
	refusedAtOnce deviation = "the client gets an error at once instead of a timeout"
	sameToPods    deviation = "a node port and a LoadBalancer IP mean the same to them"
)

// want is the oracle. It quotes the documentation of ServiceSpec.
func (c matrixCell) want() verdict {
	everywhere := c.place.eligible(0)
	switch {
	case c.destination.kind == vipNodePort, len(everywhere) == 0:
		return verdict{fate: isRefused}
	case !c.local():
		return c.answeredBy(everywhere, c.leftOpen())
	}
	here := c.place.eligible(c.asked())
	switch {
	case len(here) > 0:
		return c.answeredBy(here, "")
	case c.isInternal(): // "dropping the traffic if there are no local endpoints"
		return verdict{fate: isRefused, why: refusedAtOnce}
	}
	// "Traffic mistakenly sent to a node with no endpoints will be dropped."
	return verdict{fate: isDropped}
}

// asked returns the ingress node: for a VIP, the client's own node, or the node that its
// packets are routed to.
func (c matrixCell) asked() int {
	if c.destination.node != 0 {
		return c.destination.node
	}
	return c.client.node
}

// isInternal reports whether internalTrafficPolicy, not externalTrafficPolicy, applies to
// the destination.
func (c matrixCell) isInternal() bool { return c.destination.kind == clusterIP }

// local reports whether only endpoints of the ingress node may be used. "Note that
// traffic sent to an External IP or LoadBalancer IP from within the cluster will always
// get "Cluster" semantics, but clients sending to a NodePort from within the cluster may
// need to take traffic policy into account when picking a node."
func (c matrixCell) local() bool {
	if c.isInternal() {
		return c.internalLocal
	}
	return c.externalLocal && !c.within()
}

// within reports whether the ingress node recognizes the client as internal: a pod or
// itself. For its node ports only its own pods count; kube-proxy's developers call the
// others "neither internal nor external", and upstream's tests leave them open.
func (c matrixCell) within() bool {
	onAsked := c.client.node == c.asked()
	known := c.destination.node == 0 && !c.setup.byBridge
	return c.client.kind == podClient && (onAsked || known) || c.client.kind == nodeClient && onAsked
}

// leftOpen returns the deviation that the oracle chose where the API says "may".
func (c matrixCell) leftOpen() deviation {
	if c.externalLocal && c.destination.kind != clusterIP && c.destination.node != 0 {
		return sameToPods
	}
	return ""
}

func (c matrixCell) answeredBy(endpoints []string, why deviation) verdict {
	v := verdict{fate: isAnswered, answers: map[string]source{}, why: why}
	for _, endpoint := range endpoints {
		v.answers[endpoint] = c.seenBy(endpoint)
	}
	return v
}

// seenBy returns the source that an endpoint sees. Pods see each other's address through
// a cluster IP and, under externalTrafficPolicy Local, through a VIP of their own node.
// The node serves external clients "without masquerading the client source IP". All other
// clients, and an endpoint that connects to itself, need replies through the ingress
// node.
func (c matrixCell) seenBy(endpoint string) source {
	switch {
	case c.client.kind == podClient && endpoint == c.client.name:
		return theNodes
	case c.isInternal() && c.client.kind == podClient:
		return theClients
	case !c.isInternal() && c.externalLocal && c.client.kind == podClient && c.destination.node == 0:
		return theClients
	case !c.isInternal() && c.local():
		return theClients
	}
	return theNodes
}

func (s matrixService) policies() (external corev1.ServiceExternalTrafficPolicy, internal corev1.ServiceInternalTrafficPolicy) {
	external, internal = corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyCluster
	if s.externalLocal {
		external = corev1.ServiceExternalTrafficPolicyLocal
	}
	if s.internalLocal {
		internal = corev1.ServiceInternalTrafficPolicyLocal
	}
	return external, internal
}
