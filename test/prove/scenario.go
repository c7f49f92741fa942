//go:build prove

// Package prove checks what stands in the kernel for every packet that rules can
// distinguish. Rules compare: membership of a set, equality, interface, state, bits
// of a mark. So for one configuration there are finitely many classes of packets,
// and each is followed by package trace's evaluator and judged by an oracle that
// knows the Service API and none of our rules. docs/proof.md says what that proves.
package prove

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Scenario is a configuration, a node and Services.
type Scenario struct {
	Name     string
	Config   plan.Config
	Node     plan.Node
	Services []service.Service
	Routes   []routing.Route // of others, besides default routes
}

// settings is the document of kind Scenario in a file. Package plan's golden files
// have the same, and some fields that do not matter here.
type settings struct {
	Families          []string
	Scheduler         string
	MasqueradeAll     bool
	Kernel            [2]int
	DetectLocal       plan.DetectLocalMode
	ClusterCIDRs      []string
	Interface         string
	NodePortAddresses []string
	Exclude           []string
	Modes             []plan.SNATMode
	Claims            []plan.ClaimMode // of external and load balancer IPs
	Sources           map[string][]string
	Network           string
}

// LoadDir reads the scenarios of a directory, one for each SNAT mode and each way to
// claim VIPs that a file lists.
func LoadDir(dir string) ([]*Scenario, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no scenarios in %s: %w", dir, err)
	}
	var out []*Scenario
	for _, file := range files {
		list, err := load(file)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		out = append(out, list...)
	}
	return out, nil
}

func load(file string) ([]*Scenario, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	s := &Scenario{Name: strings.TrimSuffix(filepath.Base(file), ".yaml"), Config: DefaultConfig()}
	set := settings{}
	objects := map[types.NamespacedName][]*discoveryv1.EndpointSlice{}
	var services []*corev1.Service
	for _, doc := range strings.Split(string(text), "\n---\n") {
		var meta struct{ Kind string }
		if err := yaml.Unmarshal([]byte(doc), &meta); err != nil {
			return nil, err
		}
		switch meta.Kind {
		case "Scenario":
			err = yaml.Unmarshal([]byte(doc), &set)
		case "Node":
			var n corev1.Node
			err = yaml.Unmarshal([]byte(doc), &n)
			s.setNode(&n)
		case "Service":
			svc := &corev1.Service{}
			err = yaml.Unmarshal([]byte(doc), svc)
			services = append(services, svc)
		case "EndpointSlice":
			slice := &discoveryv1.EndpointSlice{}
			err = yaml.Unmarshal([]byte(doc), slice)
			if owner, ours := service.Owner(slice); ours {
				objects[owner] = append(objects[owner], slice)
			}
		}
		if err != nil {
			return nil, err
		}
	}
	for _, svc := range services {
		built, err := service.Build(svc, objects[types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}])
		if err != nil {
			return nil, err
		}
		s.Services = append(s.Services, built)
	}
	s.configure(&set)
	return s.variants(&set), nil
}

func (s *Scenario) variants(set *settings) []*Scenario {
	out := []*Scenario{s}
	if len(set.Modes) > 0 {
		out = nil
	}
	for _, mode := range set.Modes {
		variant := *s
		variant.Name += " " + string(mode)
		variant.Config.SNAT.Mode = mode
		out = append(out, &variant)
	}
	for _, one := range slices.Clone(out) {
		for _, claim := range set.Claims {
			variant := *one
			variant.Name += " claim " + string(claim)
			variant.Config.VIPs.LoadBalancers, variant.Config.VIPs.ExternalIPs = claim, claim
			out = append(out, &variant)
		}
	}
	return out
}

// DefaultConfig is the program's default configuration.
func DefaultConfig() plan.Config {
	return plan.Config{
		NodeName:       "node-1",
		Families:       []ip.Family{ip.IPv4},
		Scheduler:      "rr",
		MasqueradeMark: 0x4000,
		SNAT:           plan.SNAT{Mode: plan.SNATAuto, Mark: 0x3060, Priority: 480},
		LocalMark:      plan.LocalMark{Value: 0x9, Mask: 0x3fff},
		VIPs:           plan.VIPs{ClusterIPs: plan.ClaimAddress, LoadBalancers: plan.ClaimAuto, ExternalIPs: plan.ClaimAuto, Ping: true, Mark: 0x4, Table: 80080, Priority: 98},
	}
}

func (s *Scenario) configure(in *settings) {
	c := &s.Config
	if len(in.Families) > 0 {
		c.Families = nil
	}
	for _, f := range in.Families {
		c.Families = append(c.Families, map[string]ip.Family{"IPv4": ip.IPv4, "IPv6": ip.IPv6}[f])
	}
	if in.Scheduler != "" {
		c.Scheduler = in.Scheduler
	}
	c.MasqueradeAll = in.MasqueradeAll
	c.LocalTraffic = plan.LocalTraffic{Mode: in.DetectLocal, CIDRs: prefixes(in.ClusterCIDRs), Interface: in.Interface}
	if slices.Equal(in.NodePortAddresses, []string{"primary"}) {
		c.NodePortAddresses.Primary = true
	} else {
		c.NodePortAddresses.Prefixes = prefixes(in.NodePortAddresses)
	}
	c.ExcludeCIDRs = prefixes(in.Exclude)
	c.SNAT.Sources = map[string][]netip.Addr{}
	for link, list := range in.Sources {
		for _, a := range list {
			c.SNAT.Sources[link] = append(c.SNAT.Sources[link], netip.MustParseAddr(a))
		}
	}
	s.Node.Kernel = plan.Version{Major: in.Kernel[0], Minor: in.Kernel[1]}
	s.Node.BridgeNetfilter = plan.BridgeShown
	for _, line := range strings.Split(strings.TrimSpace(in.Network), "\n") {
		if words := strings.Fields(line); len(words) > 0 {
			s.addNetwork(words)
		}
	}
	s.addPodRoutes()
	s.completeNetwork()
}

// addPodRoutes leads to endpoints of this node for which the file has no route.
func (s *Scenario) addPodRoutes() {
	for _, svc := range s.Services {
		for _, p := range svc.Ports {
			for _, e := range p.Endpoints {
				a := e.Addr.Addr()
				has := func(r routing.Route) bool { return r.Table == mainTable && r.Dst.Contains(a) }
				if e.Node != s.Config.NodeName || slices.ContainsFunc(s.Routes, has) || s.carries(a) {
					continue
				}
				s.Routes = append(s.Routes, routing.Route{
					Family: ip.Of(a), Table: mainTable, Dst: netip.PrefixFrom(a, a.BitLen()), Link: fmt.Sprintf("veth%d", len(s.Routes)),
				})
			}
		}
	}
}

// carries reports whether an address is one of an interface's, or of the subnet of a
// bridge.
func (s *Scenario) carries(a netip.Addr) bool {
	return slices.ContainsFunc(s.Node.Inventory.Links, func(l routing.Link) bool {
		return slices.ContainsFunc(l.Addresses, func(b routing.Address) bool {
			return b.Prefix.Addr() == a || l.Type == "bridge" && b.Prefix.Contains(a)
		})
	})
}

func prefixes(list []string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range list {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func (s *Scenario) setNode(n *corev1.Node) {
	s.Node.Zone = n.Labels[corev1.LabelTopologyZone]
	s.Node.PodCIDRs = prefixes(n.Spec.PodCIDRs)
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil {
			s.Node.Addresses = append(s.Node.Addresses, addr)
		}
	}
}

// addNetwork reads one line about the node's network, in words like ip(8)'s:
//
//	link eth0 10.12.97.49/24
//	default dev eth0 via 10.12.97.1 [src 10.12.97.49] [table 1003]
//	route 10.244.1.0/24 dev cni0 [table 101]
//	attached 10.12.200.44/32 dev vlan1 table 101
//	rule 2000 from 10.12.192.44 [to 10.0.0.0/8] [iif eth1] lookup 1003
func (s *Scenario) addNetwork(words []string) {
	inv := &s.Node.Inventory
	switch words[0] {
	case "link":
		inv.Links = append(inv.Links, newLink(len(inv.Links)+1, words[1], words[2:]...))
	case "default":
		inv.Defaults = append(inv.Defaults, parseRoute(words[1:]))
	case "route":
		r := parseRoute(words[2:])
		r.Dst = netip.MustParsePrefix(words[1])
		r.Family = ip.Of(r.Dst.Addr())
		s.Routes = append(s.Routes, r)
	case "attached": // the routes that the proxy knows pods by, see routing.Inventory
		r := parseRoute(words[2:])
		r.Dst = netip.MustParsePrefix(words[1])
		r.Family = ip.Of(r.Dst.Addr())
		inv.Attached, s.Routes = append(inv.Attached, r), append(s.Routes, r)
	case "rule":
		inv.Rules = append(inv.Rules, parseRule(words[1], words[2:]))
	}
}

// newLink takes an interface's type from its name.
func newLink(index int, name string, addresses ...string) routing.Link {
	l := routing.Link{Index: index, Name: name, Up: true, Loopback: name == "lo", Type: "veth"}
	switch {
	case strings.HasPrefix(name, "eth"), name == "lo":
		l.Type = "device"
	case strings.HasPrefix(name, "cni"):
		l.Type = "bridge"
	case strings.HasPrefix(name, "vlan"):
		l.Type = "vlan"
	}
	for _, a := range addresses {
		p := netip.MustParsePrefix(a)
		l.Addresses = append(l.Addresses, routing.Address{
			Prefix: p, Global: !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast(),
		})
	}
	return l
}

// completeNetwork adds the interfaces that only routes name, which are pods'.
func (s *Scenario) completeNetwork() {
	inv := &s.Node.Inventory
	for _, r := range slices.Concat(s.Routes, inv.Defaults) {
		if !slices.ContainsFunc(inv.Links, func(l routing.Link) bool { return l.Name == r.Link }) {
			inv.Links = append(inv.Links, newLink(len(inv.Links)+1, r.Link))
		}
	}
}

func parseRoute(words []string) routing.Route {
	r := routing.Route{Family: ip.IPv4, Table: 254}
	for key, value := range pairs(words) {
		switch key {
		case "dev":
			r.Link = value
		case "via":
			r.Via = netip.MustParseAddr(value)
			r.Family = ip.Of(r.Via)
		case "src":
			r.Src = netip.MustParseAddr(value)
		case "table":
			r.Table = number(value)
		}
	}
	r.Dst = netip.PrefixFrom(r.Family.Unspecified(), 0)
	return r
}

func parseRule(priority string, words []string) routing.Rule {
	r := routing.Rule{Priority: number(priority), Family: ip.IPv4}
	for key, value := range pairs(words) {
		switch key {
		case "from":
			if value != "all" {
				r.From = hostOrPrefix(value)
				r.Family = ip.Of(r.From.Addr())
			}
		case "to":
			r.To = hostOrPrefix(value)
			r.Family = ip.Of(r.To.Addr())
		case "iif":
			r.IIf = value
		case "lookup":
			r.Table = number(value)
		case "fwmark":
			_, _ = fmt.Sscanf(value, "%v/%v", &r.Mark, &r.Mask)
		}
	}
	return r
}

func pairs(words []string) map[string]string {
	out := map[string]string{}
	for pair := range slices.Chunk(words, 2) {
		out[pair[0]] = pair[1]
	}
	return out
}

func hostOrPrefix(s string) netip.Prefix {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen())
	}
	return netip.MustParsePrefix(s)
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err)
	}
	return n
}
