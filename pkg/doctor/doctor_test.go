package doctor

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

var (
	vip    = netip.MustParseAddr("10.96.0.10")
	server = ipvs.Key{Protocol: ip.TCP, Addr: vip, Port: 80}
)

// services is the plan's jump for nat PREROUTING and OUTPUT.
const services nat.Rule = `-m comment --comment "kubernetes service portals" -j KUBE-SERVICES`

// healthy returns the facts of a node without findings: eth0 has the default route, eth1
// is an ENI with its own address, and cni0 has pods.
func healthy() *Facts {
	on := func(s string) []routing.Address {
		return []routing.Address{{Prefix: netip.MustParsePrefix(s), Global: true}}
	}
	way := func(table int, dst, link string, local bool) routing.Route {
		return routing.Route{Family: ip.IPv4, Table: table, Dst: netip.MustParsePrefix(dst), Link: link, Local: local}
	}
	n := &trace.Node{
		Family: ip.IPv4,
		Links: []routing.Link{
			{Name: "eth0", Addresses: on("10.1.0.5/24")}, {Name: "eth1", Addresses: on("10.2.0.5/24")},
			{Name: "cni0", Type: "bridge", Addresses: on("10.244.1.1/24")}, {Name: "veth1", Type: "veth", Master: "cni0"},
		},
		Rules: []routing.Rule{
			{Family: ip.IPv4, Priority: 480, Mark: 0x40, Mask: 0x60, Table: 1003},
			{Family: ip.IPv4, Priority: 2000, From: netip.MustParsePrefix("10.2.0.44/32"), Table: 1003},
		},
		Routes: []routing.Route{
			way(254, "0.0.0.0/0", "eth0", false), way(1003, "0.0.0.0/0", "eth1", false), way(255, "10.96.0.10/32", "kube-ipvs0", true),
		},
		Ruleset: nat.Ruleset{nat.NAT: {Chains: map[string][]nat.Rule{
			"PREROUTING": {services}, "OUTPUT": {services},
			"POSTROUTING": {`-m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING`, "-s 10.0.0.0/8 -j MASQUERADE"},
		}}},
		Sets: ipset.State{"KUBE-CLUSTER-IP": {
			Set:     ipset.Set{Name: "KUBE-CLUSTER-IP"},
			Entries: map[ipset.Entry]uint32{{Addr: vip, Port: 80, Protocol: ip.TCP}: 0},
		}},
		IPVS: ipvs.State{server: {}},
		Sysctls: sysctl.State{
			"net/ipv4/ip_forward": "1", "net/ipv4/vs/conntrack": "1", "net/bridge/bridge-nf-call-iptables": "1",
			"net/ipv4/conf/eth1/rp_filter": "1", "net/ipv4/conf/all/src_valid_mark": "1",
		},
	}
	return &Facts{
		Nodes: []*trace.Node{n}, Proxies: map[string][]int{"kube-ipvs": {7}}, Connections: 10, Most: 100,
		Config: plan.Config{Families: []ip.Family{ip.IPv4}, MasqueradeMark: 0x4000},
	}
}

func TestExamine(t *testing.T) {
	set := func(key, value string) func(*Facts) {
		return func(f *Facts) { f.Nodes[0].Sysctls[key] = value }
	}
	chain := func(name string, rules ...nat.Rule) func(*Facts) {
		return func(f *Facts) { f.Nodes[0].Ruleset[nat.NAT].Chains[name] = rules }
	}
	for name, c := range map[string]struct {
		change func(*Facts)
		want   string // severity, subject and a part of the finding; "" if none
	}{
		"healthy":    {func(*Facts) {}, ""},
		"kube-proxy": {func(f *Facts) { f.Proxies["kube-proxy"] = []int{9} }, "error kube-proxy: runs beside kube-ipvs (process 9)"},
		"kube-proxy on its port": {func(f *Facts) { f.Answers = []Answer{{10249, "iptables"}, {10256, ""}} },
			"error kube-proxy: answers on port 10249, in mode iptables"},
		"another program on its port": {func(f *Facts) { f.Answers = []Answer{{10256, ""}} }, "warning kube-proxy: another program uses its port 10256"},
		"processes are hidden":        {func(f *Facts) { f.Hidden = true }, "note kube-proxy: its processes are not visible from this Pod"},
		"kube-proxy is seen in spite of that": {func(f *Facts) { f.Hidden, f.Answers = true, []Answer{{10249, "ipvs"}} },
			"error kube-proxy: answers on port 10249, in mode ipvs"},
		"no kube-ipvs":        {func(f *Facts) { delete(f.Proxies, "kube-ipvs") }, "warning kube-ipvs: does not run"},
		"kube-ipvs is hidden": {func(f *Facts) { delete(f.Proxies, "kube-ipvs"); f.Serving = true }, ""},
		"not ready":           {func(f *Facts) { f.Serving, f.Unready = true, []string{"no sync"} }, "warning kube-ipvs: is not ready: no sync"},
		"nftables mode":       {func(f *Facts) { f.Tables = []string{"ip6 kube-proxy"} }, "error kube-proxy: its nftables mode has left a table"},
		"iptables mode":       {chain("KUBE-SVC-ABC"), "error kube-proxy: its iptables mode has left chains such as nat KUBE-SVC-ABC"},
		"iptables mode, only externalTrafficPolicy Local": {chain("KUBE-SVL-ABC"), "error kube-proxy: its iptables mode has left chains such as nat KUBE-SVL-ABC"},
		"iptables mode, only external traffic":            {chain("KUBE-EXT-ABC"), "error kube-proxy: its iptables mode has left chains such as nat KUBE-EXT-ABC"},
		"iptables mode, only source ranges":               {chain("KUBE-FW-ABC"), "error kube-proxy: its iptables mode has left chains such as nat KUBE-FW-ABC"},
		"iptables mode of an earlier version":             {chain("KUBE-XLB-ABC"), "error kube-proxy: its iptables mode has left chains such as nat KUBE-XLB-ABC"},
		"chains of the kubelet":                           {chain("KUBE-FIREWALL"), ""},
		"left in the other back end": {func(f *Facts) {
			f.Others = []OtherRules{{"iptables-legacy", ip.IPv4, nat.Ruleset{nat.NAT: {Chains: map[string][]nat.Rule{"PREROUTING": nil, "KUBE-SVC-ABC": nil}}}}}
		}, "error iptables-legacy: has rules of a service proxy for IPv4, such as the chain nat KUBE-SVC-ABC"},
		"nothing left in the other back end": {func(f *Facts) {
			f.Others = []OtherRules{{"iptables-legacy", ip.IPv4, nat.Ruleset{nat.NAT: {Chains: map[string][]nat.Rule{"PREROUTING": nil, "KUBE-KUBELET-CANARY": nil}}}}}
		}, ""},
		"the other back end cannot be seen": {func(f *Facts) { f.Unseen = true }, "note iptables: the other iptables back end may contain rules"},
		"no REDIRECT": {func(f *Facts) { f.Lacking = map[ip.Family][]string{ip.IPv6: {"REDIRECT"}} },
			"warning IPv6: the kernel lacks the iptables extension REDIRECT; rules that need it are omitted. Lost: ping of VIPs that are claimed by port"},
		"no comment": {func(f *Facts) { f.Lacking = map[ip.Family][]string{ip.IPv4: {"comment"}} },
			"note IPv4: the kernel lacks the iptables extension comment; rules are written without it, and everything is served"},
		"no hash:ip,port,ip": {func(f *Facts) { f.LackingTypes = []ipset.Type{ipset.HashIPPortIP} },
			"warning sets: the kernel has no set type hash:ip,port,ip; rules that match sets of it are omitted. Lost: endpoints that connect to themselves through a Service (KUBE-LOOP-BACK)"},
		"no nf_conntrack_netlink": {func(f *Facts) { f.LacksConntrack = true }, "warning conntrack: the kernel has no nf_conntrack_netlink; a UDP client"},
		"no scheduler": {func(f *Facts) {
			f.Config.Scheduler = "rr"
			for key, s := range f.Nodes[0].IPVS {
				s.Scheduler = "wrr"
				f.Nodes[0].IPVS[key] = s
			}
		}, "warning IPVS: no virtual server uses the configured scheduler rr; the kernel lacks it, and Services are served with wrr"},
		"a chain overwrites the claim mark": {func(f *Facts) { overwriteMark(f, "prerouting", -90, plan.PortVIPs) },
			"warning IPv4: the nftables chain ip cni nodeport (hook prerouting, priority -90) overwrites the packet mark (meta mark set 0x80): where it does so, VIPs that are claimed by port"},
		"a chain overwrites fwmarks": {func(f *Facts) { overwriteMark(f, "input", 0, plan.Local) },
			"note IPv4: the nftables chain ip cni nodeport (hook input, priority 0) overwrites the packet mark (meta mark set 0x80): where it does so, internal clients"},
		"a chain overwrites the mark before ours":  {func(f *Facts) { overwriteMark(f, "prerouting", -300, plan.PortVIPs) }, ""},
		"a chain overwrites a mark that none uses": {func(f *Facts) { overwriteMark(f, "prerouting", -90, plan.NodePorts) }, ""},
		"conntrack is full":                        {func(f *Facts) { f.Connections = 90 }, "error conntrack: 90 of 100 entries"},
		"cannot be read":                           {func(f *Facts) { f.Unread = []error{errors.New("no IPVS")} }, "error kernel: no IPVS"},
		"no forwarding":                            {set("net/ipv4/ip_forward", "0"), "error IPv4: the node does not forward"},
		"vs/conntrack":                             {set("net/ipv4/vs/conntrack", "0"), "error IPVS: conntrack does not track"},
		"br_netfilter":                             {set("net/bridge/bridge-nf-call-iptables", "0"), "warning cni0: frames between its pods"},
		"rp_filter without src_valid_mark": {set("net/ipv4/conf/all/src_valid_mark", "0"),
			"warning eth1: rp_filter is 1"},
		"an ENI without a source": {func(f *Facts) { f.Nodes[0].Links[1].Addresses = nil },
			"warning eth1: has no address: Service traffic of its pods leaves with the source 10.1.0.5, which is eth0's"},
		"flushed rules": {chain("PREROUTING"), "error IPv4: no rule in nat PREROUTING leads to KUBE-SERVICES"},
		"a rule before ours": {chain("PREROUTING", "-s 192.0.2.0/24 -j ACCEPT", services),
			"warning nat PREROUTING: a rule of another program precedes ours: -A PREROUTING -s 192.0.2.0/24 -j ACCEPT"},
		"a rule before ours that decides nothing": {chain("PREROUTING", "-j LOG", services), ""},
		"kubelet's rule in filter OUTPUT": {func(f *Facts) {
			f.Nodes[0].Ruleset[nat.Filter] = nat.Contents{Chains: map[string][]nat.Rule{"OUTPUT": {"-s 192.0.2.0/24 -j ACCEPT", "-j KUBE-FIREWALL"}}}
		}, ""},
		"NodeLocal DNSCache": {func(f *Facts) {
			f.Nodes[0].Links = append(f.Nodes[0].Links, routing.Link{Name: "nodelocaldns", Type: "dummy", Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("10.96.0.10/32")}}})
		}, "note nodelocaldns: has the cluster IP 10.96.0.10, as NodeLocal DNSCache does"},
		"NodeLocal DNSCache, which serves the port": {func(f *Facts) {
			f.Nodes[0].Links = append(f.Nodes[0].Links, routing.Link{Name: "nodelocaldns", Type: "dummy", Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("10.96.0.10/32")}}})
			delete(f.Nodes[0].IPVS, server)
		}, "note nodelocaldns: has the cluster IP 10.96.0.10, as NodeLocal DNSCache does"},
		"a lost virtual server": {func(f *Facts) { delete(f.Nodes[0].IPVS, server) },
			"error drift: TCP 10.96.0.10:80 has no virtual server, although KUBE-CLUSTER-IP lists it"},
		"a lost VIP": {func(f *Facts) { f.Nodes[0].Routes = f.Nodes[0].Routes[:2] }, "error drift: 10.96.0.10 is not local to the node"},
		"foreign virtual server": {func(f *Facts) { f.Nodes[0].IPVS[ipvs.Key{Protocol: ip.UDP, Addr: vip, Port: 53}] = ipvs.Service{} },
			"note IPVS: virtual server UDP 10.96.0.10:53 belongs to no Service"},
		"an interface with a VIP": {func(f *Facts) { f.Nodes[0].Links[0].Addresses[0].Prefix = netip.MustParsePrefix("10.96.0.10/24") },
			"error eth0: has the address 10.96.0.10, which is a Service's cluster IP"},
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy()
			c.change(f)
			var found []string
			for _, x := range Examine(f) {
				if x.Severity == OK {
					continue
				}
				found = append(found, string(x.Severity)+" "+x.About+": "+x.What)
			}
			got := strings.Join(found, "\n")
			if len(found) > 1 || (c.want == "") != (got == "") || !strings.HasPrefix(got, c.want) {
				t.Errorf("found %q, want %q", got, c.want)
			}
			if sick := strings.HasPrefix(c.want, "error"); Sick(Examine(f)) != sick {
				t.Errorf("sick: %v, want %v", !sick, sick)
			}
		})
	}
}

func TestProcesses(t *testing.T) {
	proc := t.TempDir()
	for pid, name := range map[string]string{"12": "kube-proxy", "13": "kube-ipvs", "14": "kube-ipvs", "15": "sh"} {
		if err := os.Mkdir(filepath.Join(proc, pid), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, pid, "comm"), []byte(name+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string][]int{"kube-proxy": {12}, "kube-ipvs": {14}}
	if diff := cmp.Diff(want, processes(proc, 13)); diff != "" {
		t.Error(diff)
	}
}

func TestWrite(t *testing.T) {
	var b strings.Builder
	err := Write(&b, []Finding{{Error, "eth0", "is wrong", "mend it"}, {Note, "IPVS", "is there", ""}})
	want := "error    eth0: is wrong\n           mend it\nnote     IPVS: is there\n"
	if diff := cmp.Diff(want, b.String()); err != nil || diff != "" {
		t.Error(err, diff)
	}
}

// TestHealthy: every check reports OK.
func TestHealthy(t *testing.T) {
	found := Examine(healthy())
	if len(found) != len(checks) {
		t.Errorf("%d lines for %d checks", len(found), len(checks))
	}
	for i, f := range found {
		if f.Severity != OK || f.About != checks[i].about {
			t.Errorf("%+v", f)
		}
	}
	// If the kernel cannot be read at all, no check may report OK.
	for _, f := range Examine(&Facts{Unread: []error{errors.New("no IPVS")}}) {
		if f.Severity == OK {
			t.Errorf("%+v", f)
		}
	}
}

// TestAnswers: kube-proxy is recognized by its ports even if processes are hidden, and
// this program is not mistaken for it.
func TestAnswers(t *testing.T) {
	port := func(handler http.HandlerFunc) int {
		s := httptest.NewServer(handler)
		t.Cleanup(s.Close)
		return s.Listener.Addr().(*net.TCPAddr).Port
	}
	proxy := port(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "iptables\n") })
	ours := port(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", health.ServerName)
		_, _ = io.WriteString(w, "ipvs")
	})
	other := port(http.NotFound)
	want := []Answer{{proxy, "iptables"}, {other, ""}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := l.Addr().(*net.TCPAddr).Port
	l.Close()
	if diff := cmp.Diff(want, answers(t.Context(), []int{proxy, ours, other, free})); diff != "" {
		t.Error(diff)
	}
	// A port that is bound and answers too late: the node is busy.
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	late := busy.Addr().(*net.TCPAddr).Port
	for _, tc := range []struct {
		name        string
		ports, pids []int
		want        string
	}{
		{"it answers", []int{free, proxy}, []int{7}, "iptables"},
		{"one port answers late", []int{late, proxy}, nil, "iptables"},
		{"it answers late", []int{late, free}, nil, UnknownMode},
		{"its process does not listen yet", []int{free}, []int{7}, UnknownMode},
		{"no kube-proxy", []int{ours, other, free}, nil, ""},
	} {
		if got := modeOf(t.Context(), tc.ports, tc.pids); got != tc.want {
			t.Errorf("%s: mode %q, want %q", tc.name, got, tc.want)
		}
	}
}

// overwriteMark adds a chain of nftables that overwrites the packet mark, and a member to a set of
// ours.
func overwriteMark(f *Facts, hook string, priority int, uses plan.SetName) {
	mark := map[string]any{"meta": map[string]any{"key": "mark"}}
	n := f.Nodes[0]
	n.Native = &nft.Ruleset{Base: []*nft.Chain{{
		ID: nft.ID{Family: "ip", Table: "cni", Name: "nodeport"}, Hook: hook, Priority: priority,
		Rules: []*nft.Rule{{Text: "meta mark set 0x80", Expr: []map[string]any{{"mangle": map[string]any{"key": mark, "value": uint64(128)}}}}},
	}}}
	n.Sets[uses.In(ip.IPv4)] = ipset.Contents{Entries: map[ipset.Entry]uint32{{Addr: netip.MustParseAddr("203.0.113.1")}: 0}}
}

// TestRulesBeforeOurs: the hint says whether kube-ipvs moves its rule before another program's.
func TestRulesBeforeOurs(t *testing.T) {
	f := healthy()
	f.Config.VIPs.LoadBalancers = plan.ClaimPort
	const inserted = nat.Rule("-s 192.0.2.0/24 -j ACCEPT")
	tables := nat.Ruleset{}
	for _, j := range jumps(f, f.Nodes[0]) {
		if tables[j.Chain.Table].Chains == nil {
			tables[j.Chain.Table] = nat.Contents{Chains: map[string][]nat.Rule{}}
		}
		chains := tables[j.Chain.Table].Chains
		if chains[j.Chain.Name] == nil && j.Chain.Name == "PREROUTING" {
			chains[j.Chain.Name] = []nat.Rule{inserted}
		}
		chains[j.Chain.Name] = append(chains[j.Chain.Name], j.Rule)
	}
	f.Nodes[0].Ruleset = tables
	hints := map[string]string{}
	for _, x := range rules(f) {
		hints[x.About], _, _ = strings.Cut(x.Fix, " its rule")
	}
	want := map[string]string{"nat PREROUTING": "kube-ipvs leaves", "mangle PREROUTING": "kube-ipvs moves", "raw PREROUTING": "kube-ipvs moves"}
	if diff := cmp.Diff(want, hints); diff != "" {
		t.Error(diff)
	}
}
