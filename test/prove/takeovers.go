//go:build prove

package prove

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// A predecessor is the program whose state the kernel has when the process starts.
type predecessor struct {
	name string
	// leave turns the state of a process of this version and configuration into that of the
	// predecessor.
	leave func(*Product) error
}

var predecessors = []predecessor{
	{"another version", anotherVersion},
	{"kube-proxy", kubeProxyState},
}

// anotherVersion changes the text of each rule of ours. The rules do the same, but the process
// cannot know that.
func anotherVersion(p *Product) error {
	for _, f := range p.scenario.Config.Families {
		var b strings.Builder
		for line := range strings.Lines(p.NAT[f].Save()) {
			if strings.HasPrefix(line, "-A KUBE-") {
				line = strings.Replace(line, " -j ", " -m comment --comment \"of another version\" -j ", 1)
			}
			if strings.HasPrefix(line, "-A KUBE-") || strings.HasPrefix(line, ":KUBE-") || strings.HasPrefix(line, "*") || line == "COMMIT\n" {
				b.WriteString(line)
			}
		}
		if err := p.NAT[f].Restore(b.String()); err != nil {
			return err
		}
	}
	return nil
}

// kubeProxyState replaces the kernel by one that only kube-proxy has programmed.
func kubeProxyState(p *Product) error {
	p.Kernel = NewKernel(p.scenario)
	p.Sysctl.Set("net/ipv4/vs/conntrack", "1")
	p.Sysctl.Set("net/ipv4/ip_forward", "1")
	failed := p.Routing.Do(routing.Change{Op: routing.AddLink})
	for _, f := range p.scenario.Config.Families {
		n, err := KubeProxy(p.scenario, f)
		if err != nil {
			return err
		}
		if err := p.takeSets(n); err != nil {
			return err
		}
		var servers []ipvs.Change
		for key, s := range n.IPVS {
			servers = append(servers, ipvs.Change{Op: ipvs.AddVirtualServer, Key: key, VirtualServer: s.VirtualServer})
			for dest, r := range s.RealServers {
				servers = append(servers, ipvs.Change{Op: ipvs.AddRealServer, Key: key, Dest: dest, RealServer: r})
			}
		}
		for _, f := range p.IPVS.Apply(servers) {
			return f
		}
		for _, r := range n.Routes {
			if r.Link == routing.DummyLink {
				failed = append(failed, p.Routing.Do(routing.Change{Op: routing.AddAddress, Address: r.Dst.Addr()})...)
			}
		}
		if err := p.NAT[f].Restore(kubeProxyRules(n)); err != nil {
			return err
		}
	}
	for _, f := range failed {
		return f
	}
	return nil
}

// takeSets creates kube-proxy's sets of a family.
func (p *Product) takeSets(n *trace.Node) error {
	var changes []ipset.Change
	kinds := plan.Sets(n.Family)
	for name, s := range n.Sets {
		i := slices.IndexFunc(kinds, func(k ipset.Set) bool { return k.Name == peerNames[name].In(n.Family) })
		if i < 0 {
			return fmt.Errorf("no set %s", name)
		}
		changes = append(changes, ipset.Change{Op: ipset.CreateSet, Set: kinds[i]})
		for e := range s.Entries {
			changes = append(changes, ipset.Change{Op: ipset.AddEntry, Set: kinds[i], Entry: e})
		}
	}
	slices.SortStableFunc(changes, func(a, b ipset.Change) int { return int(a.Op) - int(b.Op) })
	for _, f := range p.IPSet.Apply(changes) {
		return f
	}
	return nil
}

// peerNames are the names that kube-proxy's sets have in the kernel.
var peerNames = map[string]plan.SetName{
	"LOOP-BACK": plan.LoopBack, "CLUSTER-IP": plan.ClusterIP, "EXTERNAL-IP": plan.ExternalIP, "EXTERNAL-IP-LOCAL": plan.ExternalIPLocal,
	"LOAD-BALANCER": plan.LoadBalancer, "LOAD-BALANCER-LOCAL": plan.LoadBalancerLocal, "LOAD-BALANCER-FW": plan.LoadBalancerFW,
	"SOURCE-CIDR": plan.SourceCIDR, "SOURCE-IP": plan.SourceIP,
	"NODE-PORT-TCP": plan.NodePortTCP, "NODE-PORT-LOCAL-TCP": plan.NodePortLocalTCP,
	"NODE-PORT-UDP": plan.NodePortUDP, "NODE-PORT-LOCAL-UDP": plan.NodePortLocalUDP,
	"NODE-PORT-SCTP": plan.NodePortSCTP, "NODE-PORT-LOCAL-SCTP": plan.NodePortLocalSCTP,
	"HEALTH-CHECK": plan.HealthCheckPort, "IPVS-IPS": plan.VIPAddresses,
}

// kubeProxyRules returns kube-proxy's rules as an input of iptables-restore. kube-proxy writes
// no rule of table nat, and none of the source ranges, whose set is empty.
func kubeProxyRules(n *trace.Node) string {
	var b strings.Builder
	for _, table := range slices.Sorted(maps.Keys(n.Ruleset)) {
		chains := n.Ruleset[table].Chains
		names := slices.Sorted(maps.Keys(chains))
		fmt.Fprintf(&b, "*%s\n", table)
		for _, name := range names {
			if strings.HasPrefix(name, "KUBE-") {
				fmt.Fprintf(&b, ":%s - [0:0]\n", name)
			}
		}
		for _, name := range names {
			for _, r := range chains[name] {
				set := append(nat.Arguments(r, "--match-set"), "")[0]
				if set != "" && len(n.Sets[set].Entries) == 0 && name != "KUBE-IPVS-FILTER" && set != "HEALTH-CHECK" {
					continue
				}
				rule := string(r)
				if set != "" {
					rule = strings.Replace(rule, "--match-set "+set+" ", "--match-set "+peerNames[set].In(n.Family)+" ", 1)
				}
				fmt.Fprintf(&b, "-A %s %s\n", name, rule)
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

// added returns an Update that adds a Service with an endpoint on this node and one on another.
// Its first address is a cluster IP.
func added(name string, more func(*service.Service)) Update {
	return Update{Name: "a Service is added: " + name, Apply: func(s *Scenario) bool {
		svc := service.Service{Name: types.NamespacedName{Namespace: "default", Name: "added"}}
		port := service.Port{Name: "http", Protocol: ip.TCP, Port: 8081}
		for i, text := range s.endpointsHereAndThere() {
			port.Endpoints = append(port.Endpoints, service.Endpoint{
				Addr: netip.MustParseAddrPort(text), Node: []string{s.Config.NodeName, "node-9"}[i], Ready: true, Serving: true,
			})
		}
		if len(port.Endpoints) == 0 {
			return false
		}
		svc.ClusterIPs = []netip.Addr{netip.MustParseAddr("172.31.255.81")}
		svc.Ports = []service.Port{port}
		more(&svc)
		s.Services = append(s.Services, svc)
		return true
	}}
}

// endpointsHereAndThere returns the addresses of an endpoint on this node that another Service
// has, and of one on another node.
func (s *Scenario) endpointsHereAndThere() []string {
	for _, svc := range s.Services {
		for _, p := range svc.Ports {
			for _, e := range p.Endpoints {
				if e.Node == s.Config.NodeName && ip.Of(e.Addr.Addr()) == ip.IPv4 {
					return []string{netip.AddrPortFrom(e.Addr.Addr(), 8089).String(), "10.253.9.9:8089"}
				}
			}
		}
	}
	return nil
}

// nodePort gives the port of a Service a node port.
func nodePort(s *service.Service) { s.Ports[0].NodePort = 30981 }

// balanced gives a Service a load balancer's IP.
func balanced(s *service.Service) {
	s.LoadBalancers = []netip.Addr{netip.MustParseAddr("203.0.113.81")}
}

// Additions add a Service of each kind.
var Additions = []Update{
	added("cluster IP", func(*service.Service) {}),
	added("internalTrafficPolicy Local", func(s *service.Service) { s.InternalLocal = true }),
	added("node port", nodePort),
	added("node port of UDP", func(s *service.Service) { nodePort(s); s.Ports[0].Protocol = ip.UDP }),
	added("node port of SCTP", func(s *service.Service) { nodePort(s); s.Ports[0].Protocol = ip.SCTP }),
	added("node port, externalTrafficPolicy Local", func(s *service.Service) { nodePort(s); s.ExternalLocal = true }),
	added("external IP", func(s *service.Service) { s.ExternalIPs = []netip.Addr{netip.MustParseAddr("198.51.100.81")} }),
	added("external IP, externalTrafficPolicy Local", func(s *service.Service) {
		s.ExternalIPs, s.ExternalLocal = []netip.Addr{netip.MustParseAddr("198.51.100.81")}, true
	}),
	added("load balancer", balanced),
	added("load balancer, externalTrafficPolicy Local", func(s *service.Service) { balanced(s); s.ExternalLocal = true }),
	added("load balancer, externalTrafficPolicy Local, no endpoint on this node", func(s *service.Service) {
		balanced(s)
		s.ExternalLocal, s.Ports[0].Endpoints = true, s.Ports[0].Endpoints[1:]
	}),
	added("load balancer with source ranges", func(s *service.Service) {
		balanced(s)
		s.SourceRanges = scenario.Prefixes([]string{"198.18.0.0/15"})
	}),
	added("load balancer with source ranges that allow the node", func(s *service.Service) {
		balanced(s)
		s.SourceRanges = scenario.Prefixes([]string{"198.18.0.0/15", "192.0.2.0/24"})
	}),
	added("load balancer without endpoints", func(s *service.Service) { balanced(s); s.Ports[0].Endpoints = nil }),
}

// Takeovers are the updates that take effect while no process runs, between a predecessor and
// its successor. They are applied to the scenario "restarts".
func Takeovers() []Update {
	var out []Update
	for _, p := range predecessors {
		unchanged := Update{Name: "nothing changes", Apply: func(*Scenario) bool { return true }}
		for _, u := range slices.Concat([]Update{unchanged}, Additions, Updates) {
			out = append(out, Update{Name: fmt.Sprintf("restart after %s: %s", p.name, u.Name), Apply: u.Apply, Reverse: u.Reverse, Restart: true, leave: p.leave})
		}
	}
	for _, r := range []Update{claiming(plan.ClaimPort), reconfigure("masquerade all", func(c *plan.Config) bool { c.MasqueradeAll = true; return true })} {
		for _, u := range Additions {
			out = append(out, Update{Name: r.Name + ", " + u.Name, Restart: true, Apply: func(s *Scenario) bool { return r.Apply(s) && u.Apply(s) }})
		}
	}
	return out
}
