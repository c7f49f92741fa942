package lab

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
)

// Fabric is the network outside the nodes: one layer-2 segment per subnet, and a router
// between them. It can check sources as a cloud does.
type Fabric struct {
	*Namespace
	checking bool
	ports    []*Port
	// unplugged counts the packets dropped at ports that were unplugged.
	unplugged int
}

// Segment is one subnet of a fabric.
type Segment struct {
	fabric   *Fabric
	bridge   string
	gateways []netip.Prefix
}

// Port is the fabric's end of a host's interface.
type Port struct {
	segment   *Segment
	host      *Namespace
	Interface string
	name      string
	owns      []netip.Prefix
	// spoofed counts the packets that earlier checks dropped.
	spoofed int
}

// Fabric creates a fabric without segments.
func (l *Lab) Fabric(name string) *Fabric {
	l.t.Helper()
	f := &Fabric{Namespace: l.Namespace(name)}
	f.forward()
	f.reversePath("0")
	f.switchPlainly()
	return f
}

// switchPlainly hides switched packets from the router's netfilter, which br_netfilter
// would show them to.
func (f *Fabric) switchPlainly() {
	f.lab.t.Helper()
	for _, name := range []string{"net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"} {
		if _, err := f.readSysctl(name); err == nil {
			f.Sysctl(name, "0")
		}
	}
}

// Segment adds a subnet; the router has the given addresses on it, such as
// "10.12.97.1/24".
func (f *Fabric) Segment(gateways ...string) *Segment {
	f.lab.t.Helper()
	s := &Segment{fabric: f, bridge: f.lab.linkName("br"), gateways: f.lab.prefixes(gateways)}
	f.Namespace.bridge(s.bridge)
	f.Address(s.bridge, gateways...)
	return s
}

// VLAN adds a subnet to the segment whose packets carry a tag; the router has the
// given addresses on it. It returns the name of the router's interface.
func (s *Segment) VLAN(number int, gateways ...string) string {
	f := s.fabric
	f.lab.t.Helper()
	name := f.lab.linkName("vlan")
	f.Link(&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: f.link(s.bridge).Attrs().Index}, VlanId: number})
	f.Address(name, gateways...)
	return name
}

// Gateway adds an address to the segment's router.
func (s *Segment) Gateway(address string) { s.fabric.Address(s.bridge, address) }

// Attach connects a new interface of the host to the segment. The interface gets the
// addresses, and a source check accepts them.
func (s *Segment) Attach(host *Namespace, name string, addresses ...string) *Port {
	f := s.fabric
	f.lab.t.Helper()
	port := &Port{segment: s, host: host, Interface: name, name: f.lab.linkName("port")}
	host.connect(name, f.Namespace, port.name)
	f.lab.must(f.netlink.LinkSetMaster(f.link(port.name), f.link(s.bridge)), "attach %s to %s", host.Name, s.bridge)
	host.Address(name, addresses...)
	for _, prefix := range f.lab.prefixes(addresses) {
		port.owns = append(port.owns, netip.PrefixFrom(prefix.Addr(), prefix.Addr().BitLen()))
	}
	f.ports = append(f.ports, port)
	f.installChecks()
	return port
}

// Own assigns further addresses to the port, as a cloud assigns them to a
// network interface: the fabric delivers them there, whether or not the host
// answers for them, and a source check accepts them.
func (p *Port) Own(addresses ...string) {
	f := p.segment.fabric
	f.lab.t.Helper()
	mac := p.host.MAC(p.Interface)
	for _, prefix := range f.lab.prefixes(addresses) {
		f.Neighbour(p.segment.bridge, prefix.Addr(), mac)
		p.owns = append(p.owns, prefix)
	}
	f.installChecks()
}

// Accept widens the port's source check without delivering anything there.
func (p *Port) Accept(prefixes ...string) {
	f := p.segment.fabric
	f.lab.t.Helper()
	p.owns = append(p.owns, f.lab.prefixes(prefixes)...)
	f.installChecks()
}

// Unplug removes the interface from its host.
func (p *Port) Unplug() {
	f := p.segment.fabric
	f.lab.t.Helper()
	f.unplugged += p.Spoofed()
	f.ports = slices.DeleteFunc(f.ports, func(other *Port) bool { return other == p })
	f.lab.must(f.netlink.LinkDel(f.link(p.name)), "unplug %s of %s", p.Interface, p.host.Name)
	f.installChecks()
}

// SetMTU limits the packets of both ends, as the routers of a real link agree on an MTU.
// With only one end, packets that are too large for it would be lost silently.
func (p *Port) SetMTU(mtu int) {
	p.segment.fabric.Exec("ip", "link", "set", "dev", p.name, "mtu", strconv.Itoa(mtu))
	p.host.Exec("ip", "link", "set", "dev", p.Interface, "mtu", strconv.Itoa(mtu))
}

// Lose drops a share, such as "1%", of the packets to and from the interface.
func (p *Port) Lose(share string) {
	p.segment.fabric.Exec("tc", "qdisc", "replace", "dev", p.name, "root", "netem", "loss", share)
	p.host.Exec("tc", "qdisc", "replace", "dev", p.Interface, "root", "netem", "loss", share)
}

// Lost returns the number of packets lost by Lose, in both directions.
func (p *Port) Lost() int {
	f := p.segment.fabric
	f.lab.t.Helper()
	sum := 0
	for _, text := range []string{f.Exec("tc", "-s", "qdisc", "show", "dev", p.name), p.host.Exec("tc", "-s", "qdisc", "show", "dev", p.Interface)} {
		if match := lostPackets.FindStringSubmatch(text); match != nil {
			n, err := strconv.Atoi(match[1])
			f.lab.must(err, "lost packets")
			sum += n
		}
	}
	return sum
}

var lostPackets = regexp.MustCompile(`\(dropped (\d+),`)

// CheckSources makes the fabric drop, and count, packets whose source address does not
// belong to their interface.
func (f *Fabric) CheckSources() {
	f.lab.t.Helper()
	f.checking = true
	f.Exec("nft", "add", "table", "netdev", "sources")
	f.installChecks()
}

// installChecks replaces the checks, and keeps the counts of the old ones.
func (f *Fabric) installChecks() {
	if !f.checking {
		return
	}
	f.lab.t.Helper()
	dropped := f.dropped()
	for _, port := range f.ports {
		port.spoofed += dropped[port.name]
	}
	var rules strings.Builder
	rules.WriteString("delete table netdev sources\ntable netdev sources {\n")
	for _, port := range f.ports {
		port.writeCheck(&rules)
	}
	rules.WriteString("}\n")
	f.Feed(rules.String(), "nft", "-f", "-")
}

// writeCheck writes the port's chain. IPv6 link-local and unspecified sources are for
// neighbor discovery; ARP belongs to neither family.
func (p *Port) writeCheck(rules *strings.Builder) {
	v4, v6 := []string{"0.0.0.0"}, []string{"::", "fe80::/10"}
	for _, prefix := range p.owns {
		if prefix.Addr().Is4() {
			v4 = append(v4, prefix.Masked().String())
		} else {
			v6 = append(v6, prefix.Masked().String())
		}
	}
	fmt.Fprintf(rules, `	chain %[1]s {
		type filter hook ingress device "%[1]s" priority 0;
		ip saddr != { %[2]s } counter drop
		ip6 saddr != { %[3]s } counter drop
	}
`, p.name, strings.Join(v4, ", "), strings.Join(v6, ", "))
}

var droppedPackets = regexp.MustCompile(`chain (\S+) \{|counter packets (\d+) `)

// dropped returns, for each port, the number of packets that the current checks dropped.
func (f *Fabric) dropped() map[string]int {
	f.lab.t.Helper()
	dropped, chain := map[string]int{}, ""
	for _, match := range droppedPackets.FindAllStringSubmatch(f.Exec("nft", "list", "table", "netdev", "sources"), -1) {
		if match[1] != "" {
			chain = match[1]
			continue
		}
		packets, err := strconv.Atoi(match[2])
		f.lab.must(err, "dropped packets")
		dropped[chain] += packets
	}
	return dropped
}

// Spoofed returns the number of packets that the source check has dropped so far, at all
// ports, including unplugged ones.
func (f *Fabric) Spoofed() int {
	f.lab.t.Helper()
	sum := f.unplugged
	for _, packets := range f.dropped() {
		sum += packets
	}
	for _, port := range f.ports {
		sum += port.spoofed
	}
	return sum
}

// Spoofed returns the number of packets that the source check has dropped at this port so
// far.
func (p *Port) Spoofed() int {
	f := p.segment.fabric
	f.lab.t.Helper()
	return p.spoofed + f.dropped()[p.name]
}

// Client creates a host outside the cluster: one interface, eth0, and default routes
// through the segment's router.
func (s *Segment) Client(name string, addresses ...string) *Namespace {
	lab := s.fabric.lab
	lab.t.Helper()
	client := lab.Namespace(name)
	s.Attach(client, "eth0", addresses...)
	s.DefaultRoute(client, "eth0")
	return client
}

// DefaultRoute adds default routes through the segment's router, for the families in
// which the interface has an address of the subnet.
func (s *Segment) DefaultRoute(host *Namespace, name string) {
	s.fabric.lab.t.Helper()
	addresses, err := whole(func() ([]netlink.Addr, error) {
		return host.netlink.AddrList(host.link(name), netlink.FAMILY_ALL)
	})
	s.fabric.lab.must(err, "%s: addresses of %s", host.Name, name)
	for _, gateway := range s.gateways {
		inSubnet := func(a netlink.Addr) bool { return ipNet(gateway.Masked()).Contains(a.IP) }
		if slices.ContainsFunc(addresses, inSubnet) {
			host.Route(fmt.Sprintf("default via %s dev %s", gateway.Addr(), name))
		}
	}
}

// Uplink connects the fabric to the lab's root namespace, so that every host
// with a default route reaches the API server there or beyond.
func (f *Fabric) Uplink() {
	lab := f.lab
	lab.t.Helper()
	up, down := lab.uplinkAddresses()
	name := lab.linkName(lab.prefix + "up")
	f.connect("uplink", lab.root, name)
	f.Address("uplink", down.String()+"/30")
	lab.root.Address(name, up.String()+"/30")
	f.Route("default via " + up.String())
	lab.root.Sysctl("net.ipv4.ip_forward", "1")
	f.Exec("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-o", "uplink", "-j", "MASQUERADE")
	rule := []string{"POSTROUTING", "-s", down.String(), "!", "-o", name, "-j", "MASQUERADE"}
	lab.root.Exec("iptables", append([]string{"-w", "-t", "nat", "-A"}, rule...)...)
	f.closers = append(f.closers, func() { lab.closeUplink(name, rule) })
}

// uplinkAddresses are the ends of the uplink: a different pair for each lab of
// the process, as a test may have several.
func (l *Lab) uplinkAddresses() (up, down netip.Addr) {
	base := l.number * 4
	third, fourth := byte(base>>8), byte(base)
	return netip.AddrFrom4([4]byte{100, 127, third, fourth + 1}), netip.AddrFrom4([4]byte{100, 127, third, fourth + 2})
}

// closeUplink removes the uplink from the root namespace. The kernel would remove it with
// the fabric's namespace, but only some time later.
func (l *Lab) closeUplink(name string, rule []string) {
	if _, err := l.root.TryExec("iptables", append([]string{"-w", "-t", "nat", "-D"}, rule...)...); err != nil {
		l.t.Log(err)
	}
	link, err := l.root.netlink.LinkByName(name)
	if err == nil {
		err = l.root.netlink.LinkDel(link)
	}
	if err != nil {
		l.t.Logf("lab: remove %s: %v", name, err)
	}
}

// forward makes the namespace a router.
func (n *Namespace) forward() {
	n.lab.t.Helper()
	n.Sysctl("net.ipv4.ip_forward", "1")
	n.Sysctl("net.ipv6.conf.all.forwarding", "1")
}

// reversePath sets rp_filter for all interfaces, including future ones.
func (n *Namespace) reversePath(mode string) {
	n.lab.t.Helper()
	n.Sysctl("net.ipv4.conf.all.rp_filter", mode)
	n.Sysctl("net.ipv4.conf.default.rp_filter", mode)
}
