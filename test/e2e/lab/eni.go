package lab

import (
	"fmt"
	"net/netip"
	"testing"
)

// ENIOptions are variants of the ENI cluster.
type ENIOptions struct {
	// IPv6 builds the same cluster with IPv6 addresses.
	IPv6 bool
	// Eth1Address adds the secondary interface's own address to it, as some CNIs do.
	// Otherwise eth1 has none.
	Eth1Address bool
	// Layout is the CNI's layout; nil is SeedLayout.
	Layout *Layout
	// CheckSources makes the fabric drop packets whose source address does not belong to
	// their interface.
	CheckSources bool
}

// ENICluster is the cluster of a CNI that gives pods the addresses of a secondary network
// interface. The node routes packets from pods out by eth1, all others by eth0, unless its
// layout is plain. Two backends are beyond the fabric.
type ENICluster struct {
	*Lab
	Fabric *Fabric
	Node   *Node
	Pod    *Pod
	// Eth0 and Eth1 are the fabric's ends of the node's interfaces.
	Eth0, Eth1 *Port
	Backends   []*Server
	// NodeAddress is eth0's, ENIAddress is eth1's primary one, whether or not eth1
	// carries it.
	NodeAddress, ENIAddress netip.Addr
	// VIP is the "address:port" of the load balancer; Endpoints are those of the
	// backends.
	VIP       string
	Endpoints []string

	plan    *eniPlan
	table   int // the table with the default route by eth1
	layout  *Layout
	pods    int             // so far
	bridge  *Bridge         // of a plain layout's pods
	trunk   *Segment        // that eth1 is attached to
	uplinks map[*Pod]string // of pods with a branch interface
}

// eniPlan holds the cluster's addresses.
type eniPlan struct {
	length                            int
	nodeGateway, node                 string
	eniGateway, eni, pod              string
	vip                               string
	podGateway, bridgedPod            string // of a plain layout
	backendGateways, backendAddresses []string
}

var (
	eniPlan4 = eniPlan{
		length: 24, nodeGateway: "10.12.97.1", node: "10.12.97.49",
		eniGateway: "10.12.192.1", eni: "10.12.192.10", pod: "10.12.192.44",
		vip:              "10.12.115.101",
		podGateway:       "10.12.98.1",
		bridgedPod:       "10.12.98.44",
		backendGateways:  []string{"10.253.3.1", "10.253.4.1"},
		backendAddresses: []string{"10.253.3.5", "10.253.4.194"},
	}
	eniPlan6 = eniPlan{
		length: 64, nodeGateway: "fd00:12:97::1", node: "fd00:12:97::49",
		eniGateway: "fd00:12:192::1", eni: "fd00:12:192::10", pod: "fd00:12:192::44",
		vip:              "fd00:12:115::101",
		podGateway:       "fd00:12:98::1",
		bridgedPod:       "fd00:12:98::44",
		backendGateways:  []string{"fd00:253:3::1", "fd00:253:4::1"},
		backendAddresses: []string{"fd00:253:3::5", "fd00:253:4::194"},
	}
)

// Ports of the ENI cluster's Service.
const (
	eniServicePort = 80
	eniBackendPort = 8000
)

func (p *eniPlan) prefix(address string) string { return fmt.Sprintf("%s/%d", address, p.length) }

// NewENICluster creates the ENI cluster, without any proxy's rules.
func NewENICluster(t testing.TB, options ENIOptions) *ENICluster {
	t.Helper()
	plan := &eniPlan4
	if options.IPv6 {
		plan = &eniPlan6
	}
	layout := options.Layout
	if layout == nil {
		layout = &SeedLayout
	}
	l := New(t)
	if layout.Plain {
		l.filterBridges()
	}
	c := &ENICluster{Lab: l, Fabric: l.Fabric("fabric"), Node: l.Node("node"), plan: plan, uplinks: map[*Pod]string{}}
	c.Fabric.Uplink()
	c.attachNode(plan, options)
	c.layOut(plan, layout)
	c.addPod(plan, layout)
	c.addBackends(plan)
	c.NodeAddress, c.ENIAddress = netip.MustParseAddr(plan.node), netip.MustParseAddr(plan.eni)
	c.VIP = netip.AddrPortFrom(netip.MustParseAddr(plan.vip), eniServicePort).String()
	// The cloud's load balancer is beyond the fabric, never on the node.
	c.Fabric.Route("blackhole " + plan.vip)
	if options.CheckSources {
		c.Fabric.CheckSources()
	}
	return c
}

func (c *ENICluster) attachNode(plan *eniPlan, options ENIOptions) {
	c.t.Helper()
	primary := c.Fabric.Segment(plan.prefix(plan.nodeGateway))
	c.Eth0 = primary.Attach(c.Node.Namespace, "eth0", plan.prefix(plan.node))
	primary.DefaultRoute(c.Node.Namespace, "eth0")

	c.trunk = c.Fabric.Segment(plan.prefix(plan.eniGateway))
	c.Eth1 = c.trunk.Attach(c.Node.Namespace, "eth1")
	if options.Eth1Address {
		c.Node.Address("eth1", plan.eni)
	}
	c.Eth1.Own(plan.eni)
}

func (c *ENICluster) addPod(plan *eniPlan, layout *Layout) {
	c.t.Helper()
	c.layout = layout
	address := plan.pod
	if layout.Plain {
		address = plan.bridgedPod
	}
	c.Pod = c.newPod("pod", layout.PodLink, address)
}

// AddPod creates another pod, with the next address.
func (c *ENICluster) AddPod(name string) *Pod {
	c.t.Helper()
	address := c.Pod.Addresses[0]
	for range c.pods {
		address = address.Next()
	}
	link := c.layout.PodLink
	if link != "" {
		link = fmt.Sprintf("%s%c", link[:len(link)-1], 'z'+1-c.pods)
	}
	return c.newPod(name, link, address.String())
}

func (c *ENICluster) newPod(name, link, address string) *Pod {
	c.t.Helper()
	c.pods++
	addr := netip.MustParseAddr(address)
	switch {
	case c.layout.Plain:
		return c.bridge.Pod(name, address)
	case c.layout.Branches != NoBranches:
		return c.branchPod(name, link, addr)
	}
	c.Eth1.Own(address)
	c.podRules(addr, c.table)
	return c.Node.Pod(name, link, address)
}

// podRules adds a pod's rules by address. table has the default route of its packets.
func (c *ENICluster) podRules(pod netip.Addr, table int) {
	c.t.Helper()
	c.Node.Rule(
		fmt.Sprintf("pref %d to %s lookup main", c.layout.PodTo, pod),
		fmt.Sprintf("pref %d from %s lookup %d", c.layout.PodFrom, pod, table),
	)
}

func (c *ENICluster) addBackends(plan *eniPlan) {
	c.t.Helper()
	for i, address := range plan.backendAddresses {
		segment := c.Fabric.Segment(plan.prefix(plan.backendGateways[i]))
		name := fmt.Sprintf("backend%d", i+1)
		host := segment.Client(name, plan.prefix(address))
		c.Backends = append(c.Backends, host.Serve(name, TCP, eniBackendPort))
		host.Serve(name, UDP, eniBackendPort)
		c.Endpoints = append(c.Endpoints, netip.AddrPortFrom(netip.MustParseAddr(address), eniBackendPort).String())
	}
}
