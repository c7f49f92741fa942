package main

// eniPath shows a pod on a secondary interface that calls a Service: broken, and fixed.
func eniPath() string {
	c := newCanvas(980, 478, "A pod on a secondary network interface calls a Service, under kube-proxy and under kube-ipvs")
	eniNode(c, 20, "kube-proxy: time-out")
	c.arrow("bad", 245, 110, 300, 110)
	c.arrow("bad", 360, 140, 360, 195)
	c.lines("bad", 350, 160, "end", "routed by the pod's", "source: out by eth1")
	c.arrow("bad", 360, 250, 360, 322)
	c.lines("bad", 350, 280, "end", "source 10.12.97.49", "is eth0's, not eth1's")
	c.cross(360, 336)
	c.text("bad", 376, 345, "start", "dropped")
	c.line("bad", ` stroke-dasharray="5 4" marker-end="url(#bad)"`, []int{200, 388, 110, 388, 110, 252})
	c.lines("bad", 36, 440, "start", "… and if the network lets it pass: the reply comes", "by eth0, where rp_filter drops it")

	eniNode(c, 500, "kube-ipvs: answered")
	c.arrow("ok", 725, 110, 780, 110)
	c.arrow("ok", 810, 140, 810, 170, 620, 170, 620, 195)
	c.lines("ok", 640, 160, "start", "marked: out by eth0")
	c.arrow("ok", 620, 250, 620, 388, 678, 388)
	c.lines("ok", 630, 285, "start", "source 10.12.97.49:", "the interface's own")
	c.arrow("ok", 700, 363, 700, 346, 590, 346, 590, 252)
	c.lines("ok", 710, 350, "start", "reply by the same interface")
	c.lines("ok", 516, 440, "start", "Out by eth1 instead, if eth1 has an address,", "or --snat-source names one")
	return c.String()
}

// eniNode draws the parts that both halves share.
func eniNode(c *canvas, x int, heading string) {
	c.text("h", x+10, 38, "start", heading)
	c.area(x, 52, 460, 210, "node")
	c.box("box", x+30, 80, 195, 60, "pod 10.12.192.44", "calls VIP 10.12.115.101:80")
	c.box("box", x+280, 80, 140, 60, "IPVS", "picks an endpoint")
	c.box("box", x+30, 197, 150, 52, "eth0", "10.12.97.49")
	c.box("box", x+270, 197, 160, 52, "eth1, an ENI", "no address")
	c.area(x, 310, 460, 110, "")
	c.text("s", x+450, 436, "end", "cloud network")
	c.box("box", x+180, 365, 200, 46, "endpoint 10.253.3.5:8000")
}

// packetPath shows the hooks that a connection to a VIP passes, and the actions of
// each.
func packetPath() string {
	c := newCanvas(1060, 430, "The path of a packet from a client to an endpoint of a Service, and of the reply")
	c.text("h", 20, 34, "start", "Request")
	steps := []struct {
		name  string
		lines []string
	}{
		{"PREROUTING", []string{"conntrack", "mark for masquerading", "mark of the interface", "(reply routing)"}},
		{"routing", []string{"the VIP is local", "rp_filter"}},
		{"INPUT", []string{"source ranges", "refused ports", "mark of the node-local", "endpoints"}},
		{"IPVS", []string{"virtual server:", "scheduler, affinity", "destination becomes", "the endpoint"}},
		{"OUTPUT", []string{"marks are cleared,", "or restored", "routed again"}},
		{"POSTROUTING", []string{"SNAT to the interface's", "source, or", "MASQUERADE"}},
	}
	const width, gap = 154, 18
	for i, s := range steps {
		x := 20 + i*(width+gap)
		c.box("box", x, 52, width, 110, s.name, s.lines...)
		if i > 0 {
			c.arrow("way", x-gap+2, 107, x-3, 107)
		}
	}
	c.lines("s", 20, 186, "start", "Conntrack and IPVS remember the decisions about a connection: the same endpoint, source and interface for all of its packets.")
	c.text("h", 20, 240, "start", "Reply")
	replies := []struct {
		name  string
		lines []string
	}{
		{"PREROUTING", []string{"masquerading reversed,", "the connection's mark", "restored"}},
		{"routing", []string{"to the client,", "by the mark", "rp_filter"}},
		{"FORWARD", []string{"IPVS: the source", "becomes the VIP,", "routed again"}},
	}
	for i, s := range replies {
		x := 20 + (len(steps)-1-i)*(width+gap)
		c.box("box", x, 258, width, 90, s.name, s.lines...)
		if i > 0 {
			c.arrow("ok", x+width+gap-2, 303, x+width+3, 303)
		}
	}
	c.arrow("ok", 20+3*(width+gap)-2, 303, 400, 303)
	c.lines("ok", 394, 300, "end", "the client sees the VIP", "that it has called")
	c.lines("s", 20, 385, "start",
		"kube-ipvs writes these rules once per node. A change of a Service changes members of ipsets and IPVS entries, not rules.",
		"Where each rule is written: search for its chain in pkg/plan.")
	return c.String()
}

// architecture shows how a change reaches the kernel from the API server.
func architecture() string {
	c := newCanvas(980, 540, "The parts of kube-ipvs and how a change passes through them")
	c.box("box", 120, 24, 300, 46, "API server", "Services, EndpointSlices, own Node")
	c.box("box", 560, 24, 300, 46, "folder of manifests", "without a cluster")
	c.arrow("way", 270, 70, 400, 106)
	c.arrow("way", 710, 70, 580, 106)
	c.box("box", 340, 108, 300, 46, "pkg/source", "objects, trimmed to what is used")
	c.arrow("way", 490, 154, 490, 186)
	c.box("box", 340, 188, 300, 46, "pkg/proxy", "the loop: what changed, and when to plan it")
	c.arrow("way", 400, 234, 300, 270)
	c.arrow("way", 580, 234, 680, 348)
	c.box("box", 120, 272, 320, 56, "pkg/service, pkg/plan", "pure functions: API object to desired state,", "one part per Service, one for the node")
	c.arrow("way", 440, 300, 560, 348)
	c.box("box", 560, 350, 300, 50, "pkg/reconcile", "differences to the kernel, in a safe order")
	c.area(40, 430, 900, 92, "kernel, each part behind one package: Observe, Diff, Apply")
	for i, name := range []string{"IPVS", "ipset", "iptables", "policy routing", "sysctl", "conntrack"} {
		c.box("box", 60+i*146, 460, 130, 46, name)
	}
	c.arrow("way", 710, 400, 710, 428)
	c.line("ok", ` stroke-dasharray="5 4" marker-end="url(#ok)"`, []int{820, 428, 820, 402})
	c.text("ok", 830, 420, "start", "observed state")
	c.area(40, 345, 300, 68, "beside it, each read-only")
	c.lines("s", 60, 385, "start", "health, metrics, Events; commands: doctor,", "trace, get, diff, status, preflight, sysdump")
	return c.String()
}

// vipClaims shows which ports of a VIP reach the node, if a Service has one port and
// another device has another.
func vipClaims() string {
	c := newCanvas(980, 350, "What reaches the node at a VIP, when it is claimed whole and when it is claimed by port")
	for i, half := range []struct {
		heading, entry string
		other          []string
		kind           string
	}{
		{"address, route: the node takes every port", "local: every port", []string{"no Service has it: refused,", "also if another device serves it"}, "bad"},
		{"auto (default), port: the Service's ports only", "Service ports only", []string{"no Service has it: leaves the node,", "to the device that has the VIP"}, "ok"},
	} {
		x := 20 + i*480
		c.text("h", x+10, 38, "start", half.heading)
		c.area(x, 52, 460, 278, "node; VIP 192.168.1.200, Service on port 80")
		c.box("box", x+20, 90, 150, 60, "pod", "calls :80")
		c.box("box", x+20, 220, 150, 60, "pod", "calls :443")
		c.box("box", x+270, 90, 170, 60, "IPVS", half.entry)
		c.arrow("ok", x+170, 120, x+267, 120)
		c.text("ok", x+355, 170, "middle", "an endpoint answers")
		c.lines(half.kind, x+235, 246, "start", half.other...)
		if half.kind == "bad" {
			c.line(half.kind, "", []int{x + 170, 250, x + 212, 250})
			c.cross(x+220, 250)
		} else {
			c.arrow(half.kind, x+170, 250, x+228, 250)
		}
	}
	return c.String()
}
