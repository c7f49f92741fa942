package plan_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// TestFWMarksRunOut checks that internal clients get the node-local endpoints if an
// address and port has no fwmark.
func TestFWMarksRunOut(t *testing.T) {
	s := load(t, "external-local")
	facts := plan.NewFacts(&s.Config, &s.Node)
	part := plan.ForService(&s.Config, &facts, &s.Services[0])
	for _, in := range part.Internal {
		if got := countRealServers(part, in.Key); got != 1 || len(realServers(in.Endpoints)) != 2 {
			t.Errorf("%s has %d real servers for external clients, want 1, and %d for internal ones, want 2", in.Key, got, len(realServers(in.Endpoints)))
		}
	}
	part = plan.AssignMarks(&s.Config, part, map[ipvs.Key]uint32{part.Internal[0].Key: 1})
	marked := 0
	for _, vs := range part.VirtualServers {
		if vs.Key.FWMark != 0 {
			marked++
		}
	}
	if marked != 1 {
		t.Errorf("%d virtual servers with a fwmark, want 1", marked)
	}
}

func countRealServers(part plan.ServicePlan, key ipvs.Key) int {
	for _, vs := range part.VirtualServers {
		if vs.Key == key {
			return len(realServers(vs.Endpoints))
		}
	}
	return 0
}

// TestSessionAffinityInternal checks that there is no persistence, with which IPVS
// would send packets to the Service's own port number on the pod.
func TestSessionAffinityInternal(t *testing.T) {
	s := load(t, "external-local")
	s.Services[0].AffinitySeconds = 60
	facts := plan.NewFacts(&s.Config, &s.Node)
	part := numbered(&s.Config, plan.ForService(&s.Config, &facts, &s.Services[0]), map[ipvs.Key]uint32{})
	for _, vs := range part.VirtualServers {
		persistent := vs.Flags&ipvs.FlagPersistent != 0
		if persistent == (vs.Key.FWMark != 0) {
			t.Errorf("%s %s flags %#x", vs.Key, vs.Scheduler, vs.Flags)
		}
		if vs.Key.FWMark != 0 && vs.Scheduler != "mh" {
			t.Errorf("%s: scheduler %s ignores the client", vs.Key, vs.Scheduler)
		}
	}
}

func TestLocalMark(t *testing.T) {
	m := plan.LocalMark{Value: 0x9, Mask: 0x3fff}
	if m.Max() != 4095 {
		t.Errorf("highest number %d", m.Max())
	}
	seen := map[uint32]bool{}
	for n := uint32(1); n <= m.Max(); n++ {
		mark := m.Mark(n)
		if mark&0x9 != 0x9 || mark&^0x3fff != 0 || seen[mark] {
			t.Fatalf("mark %#x for %d", mark, n)
		}
		for _, mark := range []uint32{mark, mark | 0x4000} {
			if got, ok := m.Index(mark, 0x4000); got != n || !ok {
				t.Fatalf("mark %#x is number %d, %v, want %d", mark, got, ok, n)
			}
		}
		seen[mark] = true
	}
	for _, mark := range []uint32{0, 0x1, 0x8, 0x9, 0x4000, 0x8009, 0x1000b} {
		if n, ok := m.Index(mark, 0x4000); ok {
			t.Errorf("mark %#x counts as number %d", mark, n)
		}
	}
	if n := (plan.LocalMark{}).Max(); n != 0 {
		t.Errorf("the zero mark has %d numbers", n)
	}
}

// TestOuterLinks: external clients enter through adapters, and through bridges that only extend
// one. Pods and containers may be behind all other bridges, and behind an Ethernet interface of Open
// vSwitch's userspace datapath. Other tunnels lead to other hosts.
func TestOuterLinks(t *testing.T) {
	address := func(prefix string) []routing.Address {
		return []routing.Address{{Prefix: netip.MustParsePrefix(prefix), Global: true}}
	}
	n := &plan.Node{}
	n.Inventory.Links = []routing.Link{
		{Index: 1, Name: "lo", Type: "device", Loopback: true, Addresses: address("127.0.0.1/8")},
		{Index: 2, Name: "eth0", Type: "device", Addresses: address("192.168.0.11/24")},
		{Index: 3, Name: "eth1", Type: "device", Addresses: address("10.1.0.2/32")},
		{Index: 4, Name: "branch", Type: "vlan"},
		{Index: 5, Name: "pod", Type: "veth", Addresses: address("169.254.1.1/32")},
		{Index: 6, Name: "lan", Type: "bridge", Addresses: address("192.168.1.11/24")},
		{Index: 7, Name: "eth2", Type: "device", Master: "lan"},
		{Index: 8, Name: "bond0.5", Type: "vlan", Master: "lan"},
		{Index: 9, Name: "machines", Type: "bridge", Addresses: address("192.168.2.11/24")},
		{Index: 10, Name: "eth3", Type: "device", Master: "machines"},
		{Index: 11, Name: "tap0", Type: "tun", Master: "machines"},
		{Index: 12, Name: "docker0", Type: "bridge", Addresses: address("172.17.0.1/16")},
		{Index: 13, Name: "transit", Type: "bridge"},
		{Index: 14, Name: "eth4", Type: "device", Master: "transit"},
		{Index: 15, Name: "antrea-gw0", Type: "tuntap", MAC: "02:00:00:00:00:0f", Addresses: address("10.244.1.1/24")},
		{Index: 16, Name: "flannel0", Type: "tuntap", Addresses: address("10.244.1.0/32")},
		{Index: 17, Name: "zt0", Type: "tuntap", MAC: "02:00:00:00:00:11", Addresses: address("10.147.17.5/24")},
		{Index: 18, Name: "tun0", Type: "tuntap"},
		{Index: 19, Name: "l2tpeth0", Type: "device", MAC: "02:00:00:00:00:13", Addresses: address("10.9.0.2/30")}, // the kernel names no kind
	}
	n.Inventory.Links = append(n.Inventory.Links,
		routing.Link{Index: 20, Name: "vrrp.51", Type: "macvlan", MAC: "00:00:5e:00:01:33", Addresses: address("192.168.0.200/32")},
		routing.Link{Index: 21, Name: "vrrp.52", Type: "macvlan", MAC: "00:00:5e:00:02:34"},
		routing.Link{Index: 22, Name: "shim", Type: "macvlan", MAC: "02:00:00:00:00:16", Addresses: address("192.168.0.201/32")}) // of pods with macvlan
	n.Inventory.Links = append(n.Inventory.Links,
		routing.Link{Index: 23, Name: "swp1", Type: "device"},
		routing.Link{Index: 24, Name: "idle", Type: "device"},
		routing.Link{Index: 25, Name: "pod1", Type: "veth"})
	n.Inventory.Gateways = []string{"pod1", "swp1"}
	n.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
	if got, want := outer(n), []string{"eth0", "eth1", "lan", "flannel0", "zt0", "tun0", "l2tpeth0", "vrrp.51", "vrrp.52", "swp1"}; !slices.Equal(got, want) {
		t.Errorf("outer interfaces: %q, want %q", got, want)
	}
}

// TestOuterLinksInVRF: table nat sees packets on the interface, other chains see them on the VRF
// device.
func TestOuterLinksInVRF(t *testing.T) {
	address := func(prefix string) []routing.Address {
		return []routing.Address{{Prefix: netip.MustParsePrefix(prefix), Global: true}}
	}
	n := &plan.Node{}
	n.Inventory.Links = []routing.Link{
		{Index: 2, Name: "eth0", Type: "device", Addresses: address("192.168.0.11/24")},
		{Index: 3, Name: "blue", Type: "vrf"},
		{Index: 4, Name: "eth1", Type: "device", Master: "blue", Addresses: address("192.168.1.11/24")},
		{Index: 5, Name: "pods", Type: "vrf"},
		{Index: 6, Name: "veth1", Type: "veth", Master: "pods", Addresses: address("10.244.1.1/32")},
		{Index: 7, Name: "eth2", Type: "device", Master: "bond0", Addresses: address("192.168.2.11/24")},
	}
	if got, want := outer(n), []string{"eth0", "blue", "eth1"}; !slices.Equal(got, want) {
		t.Errorf("outer interfaces: %q, want %q", got, want)
	}
}

// outer returns the interfaces by which external clients enter a node that does not know its pods.
func outer(n *plan.Node) []string {
	cfg := defaultConfig()
	cfg.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectNone}
	var out []string
	for _, r := range plan.ForNode(&cfg, n).NAT.Chains[nat.Chain{Family: ip.IPv4, Table: nat.Filter, Name: "KUBE-IPVS-INSIDE"}] {
		out = append(out, nat.Arguments(r, "-i")...)
	}
	return out
}

// TestOuterKinds: clients enter by an interface of any kind that neither leads to pods nor receives no
// packets, also if it has no address, as a tunnel often has. A kind that is not known is a tunnel: there
// are many kinds of these, and new ones.
func TestOuterKinds(t *testing.T) {
	for kind, want := range map[string]bool{
		"vxlan": true, "geneve": true, "ipip": true, "ip6tnl": true, "sit": true, "gre": true, "ip6gre": true, "wireguard": true, "tuntap": true,
		"xfrm": true, "vti": true, "vti6": true, "gretap": true, "ip6gretap": true, "erspan": true, "ip6erspan": true, "ppp": true, "bareudp": true,
		"gtp": true, "ovpn": true, "wwan": true, "of the future": true,

		"device": false, "bond": false, "team": false, "vlan": false, // reached by their address
		"veth": false, "netkit": false, "bridge": false, "openvswitch": false, "ipvlan": false, "ipvtap": false, "macvlan": false, "macvtap": false, "vrf": false,
		"dummy": false, "ifb": false, "nlmon": false, "can": false, "vcan": false, "vxcan": false,
	} {
		n := &plan.Node{}
		n.Inventory.Links = []routing.Link{{Index: 1, Name: "link1", Type: kind}}
		if got := slices.Contains(outer(n), "link1"); got != want {
			t.Errorf("%s: outer is %t, want %t", kind, got, want)
		}
		n.Inventory.Links[0].Master = "br0"
		if slices.Contains(outer(n), "link1") {
			t.Errorf("%s: a port of a bridge is outer", kind)
		}
	}
}

// TestClusterCIDROfAllAddresses: such a range does not tell pods from other clients, and iptables
// does not store a match for it.
func TestClusterCIDROfAllAddresses(t *testing.T) {
	cfg := defaultConfig()
	cfg.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}}
	for chain, rules := range plan.ForNode(&cfg, &plan.Node{}).NAT.Chains {
		for _, r := range rules {
			if strings.Contains(string(r), "/0 ") {
				t.Errorf("%v: %s", chain, r)
			}
		}
	}
}
