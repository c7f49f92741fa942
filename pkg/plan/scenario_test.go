package plan_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// scenario is a file of testdata: a document of kind Scenario, with the configuration
// and the node's network, followed by API objects.
type scenario struct {
	config    plan.Config
	node      plan.Node
	aboutNode bool            // the golden files have the node's part
	modes     []plan.SNATMode // a golden file for each
	routes    []routing.Route // of the main table; only packets need them
	services  []service.Service
}

// settings is the document of kind Scenario. Omitted fields have kube-proxy's defaults;
// the node is node-1.
type settings struct {
	Kind              string
	Node              bool // the golden files have the node's part
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
	Sources           map[string][]string
	Network           string // see parseNetwork
}

func load(t testing.TB, name string) *scenario {
	t.Helper()
	file, err := os.ReadFile(filepath.Join("testdata", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	s := &scenario{}
	objects := map[types.NamespacedName][]*discoveryv1.EndpointSlice{}
	var services []*corev1.Service
	for _, doc := range strings.Split(string(file), "\n---\n") {
		switch kind := kindOf(t, doc); kind {
		case "Scenario":
			s.configure(decode[settings](t, doc))
		case "Node":
			s.setNode(decode[corev1.Node](t, doc))
		case "Service":
			services = append(services, decode[corev1.Service](t, doc))
		case "EndpointSlice":
			slice := decode[discoveryv1.EndpointSlice](t, doc)
			owner, ours := service.Owner(slice)
			if !ours {
				t.Fatalf("%s: slice %s has no owner", name, slice.Name)
			}
			objects[owner] = append(objects[owner], slice)
		default:
			t.Fatalf("%s: unknown kind %q", name, kind)
		}
	}
	for _, svc := range services {
		built, err := service.Build(svc, objects[types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}])
		if err != nil {
			t.Fatal(err)
		}
		s.services = append(s.services, built)
	}
	return s
}

func kindOf(t testing.TB, doc string) string {
	t.Helper()
	var meta struct{ Kind string }
	if err := yaml.Unmarshal([]byte(doc), &meta); err != nil {
		t.Fatal(err)
	}
	return meta.Kind
}

func decode[T any](t testing.TB, doc string) *T {
	t.Helper()
	out := new(T)
	if err := yaml.UnmarshalStrict([]byte(doc), out); err != nil {
		t.Fatal(err)
	}
	return out
}

func defaultConfig() plan.Config {
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

func (s *scenario) configure(in *settings) {
	c := defaultConfig()
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
	s.aboutNode = in.Node
	s.modes = in.Modes
	if len(s.modes) == 0 {
		s.modes = []plan.SNATMode{plan.SNATAuto}
	}
	s.config = c
	s.node.Kernel = plan.Version{Major: in.Kernel[0], Minor: in.Kernel[1]}
	for _, line := range strings.Split(strings.TrimSpace(in.Network), "\n") {
		s.addNetwork(strings.Fields(line))
	}
}

func prefixes(list []string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range list {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func (s *scenario) setNode(n *corev1.Node) {
	s.node.Zone = n.Labels[corev1.LabelTopologyZone]
	s.node.PodCIDRs = prefixes(n.Spec.PodCIDRs)
	for _, a := range n.Status.Addresses {
		s.node.Addresses = append(s.node.Addresses, netip.MustParseAddr(a.Address))
	}
}

// addNetwork parses one line about the node's network, in words like those of ip(8):
//
//	link eth0 10.12.97.49/24
//	default dev eth0 via 10.12.97.1 [src 10.12.97.49] [table 1003]
//	route 10.244.1.0/24 dev cni0
//	attached 10.12.200.44/32 dev vlan1 table 101
//	rule 2000 from 10.12.192.44 [to 10.0.0.0/8] [iif vlan1] lookup 1003
func (s *scenario) addNetwork(words []string) {
	inv := &s.node.Inventory
	switch words[0] {
	case "link":
		inv.Links = append(inv.Links, parseLink(len(inv.Links)+1, words[1], words[2:]))
	case "default":
		inv.Defaults = append(inv.Defaults, parseRoute(words[1:]))
	case "route":
		r := parseRoute(words[2:])
		r.Dst = netip.MustParsePrefix(words[1])
		s.routes = append(s.routes, r)
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

func parseLink(index int, name string, addresses []string) routing.Link {
	l := routing.Link{Index: index, Name: name, Up: true, Loopback: name == "lo"}
	if strings.HasPrefix(name, "cni") {
		l.Type = "bridge"
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
			r.From = hostOrPrefix(value)
			r.Family = ip.Of(r.From.Addr())
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
