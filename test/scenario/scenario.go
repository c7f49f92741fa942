// Package scenario reads the scenarios that the tests of the plan share: a configuration,
// a node's network and Services, as a file of YAML documents. The golden files of
// pkg/plan and the classes of packets of test/prove come from them.
package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
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

// Scenario is a configuration, a node and Services: a document of kind Scenario, with
// the configuration and the node's network, followed by API objects.
type Scenario struct {
	Config    plan.Config
	Node      plan.Node
	AboutNode bool             // the golden file contains the node's plan
	Modes     []plan.SNATMode  // at least one
	Claims    []plan.ClaimMode // other ways to claim external and load balancer IPs
	Routes    []routing.Route  // routes other than default routes, for the evaluation of packets
	Services  []service.Service
}

// Settings is the document of kind Scenario. Omitted fields have kube-proxy's defaults;
// the node is node-1.
type Settings struct {
	Kind              string
	Node              bool // the golden file contains the node's plan
	Families          []string
	Scheduler         string
	MasqueradeAll     bool
	StrictARP         bool
	Kernel            [2]int // version; empty: unknown
	DetectLocal       plan.DetectLocalMode
	ClusterCIDRs      []string
	Interface         string
	NodePortAddresses []string // CIDRs, or "primary"
	Exclude           []string
	Modes             []plan.SNATMode
	Claims            []plan.ClaimMode
	Sources           map[string][]string
	Gateways          map[string][]string
	Network           string // see AddNetwork
}

// Load reads a file. Unknown kinds and fields are errors.
func Load(file string) (*Scenario, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := reader{slices: map[types.NamespacedName][]*discoveryv1.EndpointSlice{}}
	for _, doc := range strings.Split(string(text), "\n---\n") {
		if err := r.read([]byte(doc)); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	for _, svc := range r.services {
		built, err := service.Build(svc, r.slices[types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		r.Services = append(r.Services, built)
	}
	return &r.Scenario, nil
}

// reader collects the documents of a file.
type reader struct {
	Scenario
	services []*corev1.Service
	slices   map[types.NamespacedName][]*discoveryv1.EndpointSlice
}

func (r *reader) read(doc []byte) error {
	var meta struct{ Kind string }
	if err := yaml.Unmarshal(doc, &meta); err != nil {
		return err
	}
	switch meta.Kind {
	case "Scenario":
		in := Settings{}
		if err := yaml.UnmarshalStrict(doc, &in); err != nil {
			return err
		}
		r.Configure(&in)
	case "Node":
		n := corev1.Node{}
		if err := yaml.UnmarshalStrict(doc, &n); err != nil {
			return err
		}
		r.setNode(&n)
	case "Service":
		svc := &corev1.Service{}
		if err := yaml.UnmarshalStrict(doc, svc); err != nil {
			return err
		}
		r.services = append(r.services, svc)
	case "EndpointSlice":
		slice := &discoveryv1.EndpointSlice{}
		if err := yaml.UnmarshalStrict(doc, slice); err != nil {
			return err
		}
		svc, ours := service.ServiceOf(slice)
		if !ours {
			return errors.New("a slice without a Service: " + slice.Name)
		}
		r.slices[svc] = append(r.slices[svc], slice)
	default:
		return fmt.Errorf("unknown kind %q", meta.Kind)
	}
	return nil
}

// DefaultConfig returns the program's default configuration.
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

// Configure applies settings to the default configuration and adds the network.
func (s *Scenario) Configure(in *Settings) {
	c := DefaultConfig()
	if len(in.Families) > 0 {
		c.Families = nil
	}
	for _, f := range in.Families {
		c.Families = append(c.Families, map[string]ip.Family{"IPv4": ip.IPv4, "IPv6": ip.IPv6}[f])
	}
	if in.Scheduler != "" {
		c.Scheduler = in.Scheduler
	}
	c.MasqueradeAll, c.StrictARP = in.MasqueradeAll, in.StrictARP
	c.LocalTraffic = plan.LocalTraffic{Mode: in.DetectLocal, CIDRs: Prefixes(in.ClusterCIDRs), Interface: in.Interface}
	if slices.Equal(in.NodePortAddresses, []string{"primary"}) {
		c.NodePortAddresses.Primary = true
	} else {
		c.NodePortAddresses.Prefixes = Prefixes(in.NodePortAddresses)
	}
	c.ExcludeCIDRs = Prefixes(in.Exclude)
	c.SNAT.Sources, c.SNAT.Gateways = byInterface(in.Sources), byInterface(in.Gateways)
	s.AboutNode = in.Node
	s.Modes, s.Claims = in.Modes, in.Claims
	if len(s.Modes) == 0 {
		s.Modes = []plan.SNATMode{plan.SNATAuto}
	}
	s.Config = c
	s.Node.Kernel = plan.Version{Major: in.Kernel[0], Minor: in.Kernel[1]}
	for _, line := range strings.Split(strings.TrimSpace(in.Network), "\n") {
		if words := strings.Fields(line); len(words) > 0 {
			s.AddNetwork(words)
		}
	}
	s.addDirect()
}

// addDirect adds what the Inventory keeps of the routes of the main table: those over links that have
// a default route in another table.
func (s *Scenario) addDirect() {
	inv := &s.Node.Inventory
	for _, r := range s.Routes {
		if r.Table == routing.TableMain && slices.ContainsFunc(inv.Defaults, func(d routing.Route) bool {
			return d.Table != routing.TableMain && d.Link == r.Link && d.Family == r.Family
		}) {
			inv.Direct = append(inv.Direct, r)
		}
	}
}

func byInterface(texts map[string][]string) map[string][]netip.Addr {
	out := map[string][]netip.Addr{}
	for link, list := range texts {
		for _, a := range list {
			out[link] = append(out[link], netip.MustParseAddr(a))
		}
	}
	return out
}

// Prefixes parses CIDRs.
func Prefixes(list []string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range list {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func (s *Scenario) setNode(n *corev1.Node) {
	s.Node.Zone = n.Labels[corev1.LabelTopologyZone]
	s.Node.PodCIDRs = Prefixes(n.Spec.PodCIDRs)
	for _, a := range n.Status.Addresses {
		s.Node.Addresses = append(s.Node.Addresses, netip.MustParseAddr(a.Address))
	}
}

// AddNetwork parses one line about the node's network, in words like those of ip(8):
//
//	link eth0 10.12.97.49/24
//	default dev eth0 via 10.12.97.1 [src 10.12.97.49] [table 1003]
//	route 10.244.1.0/24 dev cni0
//	attached 10.12.200.44/32 dev vlan1 table 101
//	rule 2000 from 10.12.192.44 [to 10.0.0.0/8] [iif vlan1] lookup 1003
func (s *Scenario) AddNetwork(words []string) {
	inv := &s.Node.Inventory
	switch words[0] {
	case "link":
		inv.Links = append(inv.Links, NewLink(len(inv.Links)+1, words[1], words[2:]...))
	case "default":
		inv.Defaults = append(inv.Defaults, parseRoute(words[1:]))
	case "route":
		r := parseRoute(words[2:])
		r.Dst = netip.MustParsePrefix(words[1])
		r.Family = ip.Of(r.Dst.Addr())
		s.Routes = append(s.Routes, r)
	case "attached":
		r := parseRoute(words[2:])
		r.Dst = netip.MustParsePrefix(words[1])
		r.Family = ip.Of(r.Dst.Addr())
		inv.Attached = append(inv.Attached, r)
	case "rule":
		inv.Rules = append(inv.Rules, parseRule(words[1], words[2:]))
	default:
		panic("unknown line of a network: " + strings.Join(words, " "))
	}
}

// NewLink returns an interface. Its name determines its type.
func NewLink(index int, name string, addresses ...string) routing.Link {
	l := routing.Link{Index: index, Name: name, Up: true, Loopback: name == "lo", Type: "veth"}
	switch {
	case strings.HasPrefix(name, "eth"), name == "lo":
		l.Type = "device"
	case strings.HasPrefix(name, "cni"):
		l.Type = "bridge"
	case strings.HasPrefix(name, "vlan"):
		l.Type = "vlan"
	case strings.HasPrefix(name, "xfrm"):
		l.Type = "xfrm"
	}
	for _, a := range addresses {
		p := netip.MustParsePrefix(a)
		l.Addresses = append(l.Addresses, routing.Address{
			Prefix: p, Global: !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast(),
		})
	}
	return l
}

func parseRoute(words []string) routing.Route {
	r := routing.Route{Family: ip.IPv4, Table: routing.TableMain}
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
		default:
			panic("unknown word of a route: " + key)
		}
	}
	r.Dst = netip.PrefixFrom(r.Family.Unspecified(), 0)
	return r
}

func parseRule(priority string, words []string) routing.Rule {
	r := routing.Rule{Family: ip.IPv4, Priority: number(priority)}
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
			var err error
			if _, err = fmt.Sscanf(value, "%v/%v", &r.Mark, &r.Mask); err != nil {
				panic(err)
			}
			r.Family = ip.IPv4
		default:
			panic("unknown word of a rule: " + key)
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
