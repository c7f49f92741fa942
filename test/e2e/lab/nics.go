package lab

import "fmt"

// layOutPlainly adds an address to the secondary interface, and a bridge for the node's pods. The
// fabric routes the pods' subnet to the primary interface.
func (c *ENICluster) layOutPlainly(plan *eniPlan) {
	c.t.Helper()
	c.Node.Address("eth1", plan.prefix(plan.eni))
	c.bridge = c.Node.Bridge("cni0", plan.prefix(plan.podGateway))
	pods := c.bridge.gateways[0].Masked().String()
	c.Fabric.Route(fmt.Sprintf("%s via %s", pods, plan.node))
	c.Eth0.Accept(pods)
}

// Entry returns the interface by which the node receives a pod's packets.
func (c *ENICluster) Entry(pod *Pod) string {
	if c.bridge != nil {
		return c.bridge.name
	}
	return pod.HostInterface
}

// Neighbor creates a host in the network of the secondary interface.
func (c *ENICluster) Neighbor(name, address string) *Namespace {
	c.t.Helper()
	return c.trunk.Client(name, c.plan.prefix(address))
}

// ProxyFlags returns the flags that kube-ipvs needs in the layout.
func (c *ENICluster) ProxyFlags() []string {
	flags := []string{"--cluster-cidr", c.prefixes([]string{c.plan.prefix(c.Pod.Addresses[0].String())})[0].Masked().String()}
	if c.layout.ReplyGateway {
		flags = append(flags, "--reply-gateway", "eth1="+c.plan.eniGateway)
	}
	if c.layout.SNATMode != "" {
		flags = append(flags, "--snat-mode", c.layout.SNATMode)
	}
	return flags
}
