package inspect

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// objects is a source with one Service.
type objects struct{}

func (objects) Load(_ context.Context, sink source.Sink) error {
	sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
		},
	})
	sink.SetEndpointSlice(&discoveryv1.EndpointSlice{ObjectMeta: sliceOf("web"), Endpoints: []discoveryv1.Endpoint{{
		Addresses: []string{"10.244.1.5"}, NodeName: ptr.To("node1"), TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web-0"},
	}}})
	sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "dns"},
		Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.0.20", ClusterIPs: []string{"10.96.0.20", "fd00::20"},
			Ports: []corev1.ServicePort{{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}, {Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 53}},
		},
	})
	sink.Synced()
	return nil
}

func sliceOf(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}}
}

func key(text string) ipvs.Key {
	at := netip.MustParseAddrPort(text)
	return ipvs.Key{Protocol: ip.TCP, Addr: at.Addr(), Port: at.Port()}
}

var (
	marked = ipvs.Key{FWMark: 0xb, Addr: netip.IPv4Unspecified()}
	sets   = ipset.State{"KUBE-IPVS-LOCAL": {
		Set:     ipset.Set{Name: "KUBE-IPVS-LOCAL", Type: ipset.HashIPPortMark},
		Entries: map[ipset.Entry]uint32{{Addr: netip.MustParseAddr("192.0.2.5"), Port: 30080, Protocol: ip.TCP}: 0xb},
	}}
	servers = ipvs.State{
		key("10.96.0.10:80"): {
			VirtualServer: ipvs.VirtualServer{Scheduler: "rr", Timeout: 10800, Flags: ipvs.FlagPersistent},
			RealServers:   map[netip.AddrPort]ipvs.RealServer{netip.MustParseAddrPort("10.244.1.5:8080"): {Weight: 1}, netip.MustParseAddrPort("10.244.2.5:8080"): {}},
		},
		key("192.0.2.5:30080"): {VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}},
		marked:                 {VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}},
		key("10.9.9.9:25"):     {VirtualServer: ipvs.VirtualServer{Scheduler: "wlc"}},
	}
)

func loaded(t *testing.T) *Names {
	t.Helper()
	names, err := Load(t.Context(), objects{})
	if err != nil {
		t.Fatal(err)
	}
	names.Marks(sets)
	return names
}

func print[R Row](t *testing.T, format string, columns []string, narrow int, rows []R) string {
	t.Helper()
	var b strings.Builder
	if err := Print(&b, format, columns, narrow, rows); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestVirtualServers(t *testing.T) {
	rows := VirtualServers(servers, loaded(t))
	want := `SERVICE            PROTOCOL   ADDRESS                      SCHEDULER   REALSERVERS      AFFINITY
-                  TCP        10.9.9.9:25                  wlc         0                -
default/web:http   TCP        10.96.0.10:80                rr          2 (1 draining)   10800s
default/web:http   TCP        192.0.2.5:30080              rr          0                -
default/web:http   TCP        192.0.2.5:30080 (mark 0xb)   rr          0                -
`
	if diff := cmp.Diff(want, print(t, "table", VirtualServerColumns, 6, rows)); diff != "" {
		t.Error(diff)
	}
	want = `- address: 10.9.9.9:25
  draining: 0
  protocol: TCP
  realServers: 0
  scheduler: wlc
`
	if diff := cmp.Diff(want, print(t, "yaml", nil, 0, rows[:1])); diff != "" {
		t.Error(diff)
	}
	if got := print(t, "json", nil, 0, []VirtualServer(nil)); got != "[]\n" {
		t.Errorf("no rows: %q", got)
	}
}

func TestEndpoints(t *testing.T) {
	counts := func(k ipvs.Key) (map[netip.AddrPort]ipvs.Connections, error) {
		return map[netip.AddrPort]ipvs.Connections{netip.MustParseAddrPort("10.244.1.5:8080"): {Active: 3, Inactive: 1}}, nil
	}
	rows, err := Endpoints(servers, loaded(t), counts)
	if err != nil {
		t.Fatal(err)
	}
	want := `SERVICE            ADDRESS         ENDPOINT          WEIGHT         ACTIVE   INACTIVE   POD             NODE
default/web:http   10.96.0.10:80   10.244.1.5:8080   1              3        1          default/web-0   node1
default/web:http   10.96.0.10:80   10.244.2.5:8080   0 (draining)   0        0          -               -
`
	if diff := cmp.Diff(want, print(t, "wide", EndpointColumns, 6, rows)); diff != "" {
		t.Error(diff)
	}
}

func TestSets(t *testing.T) {
	rows := Sets(sets, loaded(t))
	if want := "NAME              TYPE                   MEMBERS\nKUBE-IPVS-LOCAL   hash:ip,port skbinfo   1\n"; print(t, "table", SetColumns, 3, rows) != want {
		t.Error(print(t, "table", SetColumns, 3, rows))
	}
	want := "ENTRY                 MARK   SERVICE\n192.0.2.5,tcp:30080   0xb    default/web:http\n"
	if diff := cmp.Diff(want, print(t, "table", MemberColumns, 3, rows[0].Members)); diff != "" {
		t.Error(diff)
	}
}

func TestSNATs(t *testing.T) {
	way := func(table int, link string) routing.Route {
		return routing.Route{Family: ip.IPv4, Table: table, Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: link}
	}
	n := &trace.Node{
		Family: ip.IPv4,
		Links: []routing.Link{
			{Name: "eth0", Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("10.1.0.5/24"), Global: true}}}, {Name: "eth1"}, {Name: "eth2"},
		},
		Rules:   []routing.Rule{{Family: ip.IPv4, Priority: 480, Mark: 0x20, Mask: 0x60, Table: 254}},
		Routes:  []routing.Route{way(254, "eth0"), way(1001, "eth1"), way(1002, "eth2")},
		Ruleset: nat.Ruleset{nat.NAT: {Chains: map[string][]nat.Rule{"KUBE-POSTROUTING": {"-o eth1 -j SNAT --to-source 10.2.0.5 --random-fully"}}}},
	}
	want := `INTERFACE   FAMILY   SOURCE     HOW                                  TABLE
eth0        IPv4     10.1.0.5   MASQUERADE, reply routing by mark 0x20/0x60   254
eth1        IPv4     10.2.0.5   SNAT                                 1001
eth2        IPv4     10.1.0.5   MASQUERADE, with eth0's address      1002
`
	got := print(t, "table", SNATColumns, 5, SNATs(n, 480))
	squeeze := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	if diff := cmp.Diff(squeeze(want), squeeze(got)); diff != "" {
		t.Error(diff)
	}
}

// TestLabel: a node port belongs to a Service only on the node's addresses, and an
// unserved address has no Service.
func TestLabel(t *testing.T) {
	node := &trace.Node{Family: ip.IPv4, Routes: []routing.Route{{Table: 255, Dst: netip.MustParsePrefix("192.0.2.5/32"), Local: true}}}
	names := loaded(t)
	for to, want := range map[string]string{
		"10.96.0.10:80": "default/web:http", "192.0.2.5:30080": "default/web:http", "198.51.100.9:30080": "", "192.0.2.5:80": "",
	} {
		q := trace.Question{Protocol: ip.TCP, To: netip.MustParseAddrPort(to)}
		x := trace.Explanation{Verdict: trace.Verdict{Outcome: trace.Refused}}
		names.Label(&x, q, node)
		if x.Service != want {
			t.Errorf("%s is %q, want %q", to, x.Service, want)
		}
	}
	x := trace.Explanation{
		Verdict:     trace.Verdict{Outcome: trace.Answered},
		RealServers: []trace.ServerPath{{RealServer: "10.244.1.5:8080", Weight: 1}, {RealServer: "10.244.2.5:8080", Weight: 1}},
	}
	names.Label(&x, trace.Question{Protocol: ip.TCP, To: netip.MustParseAddrPort("10.96.0.10:80")}, node)
	var text strings.Builder
	if err := x.Write(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"\n  Service            default/web:http\n", "\nto the real server 10.244.1.5:8080, pod default/web-0 on node1, weight 1\n",
		"\nto the real server 10.244.2.5:8080, weight 1\n",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is not in\n%s", want, text.String())
		}
	}
	x = trace.Explanation{Verdict: trace.Verdict{Outcome: trace.Unserved}}
	names.Label(&x, trace.Question{Protocol: ip.TCP, To: netip.MustParseAddrPort("10.96.0.10:80")}, node)
	if x.Service != "" {
		t.Errorf("what is not served is %s's", x.Service)
	}
}

// A source that does not answer yields an error and no names; no source yields no names.
func TestLoad(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if names, err := Load(ctx, silent{}); err == nil || names.Service(key("10.96.0.10:80")) != "" {
		t.Error("no error from a source that has not delivered")
	}
	names, err := Load(t.Context(), nil)
	if err != nil || names.Service(key("10.96.0.10:80")) != "" {
		t.Errorf("%v, %v", names, err)
	}
}

type silent struct{}

func (silent) Load(ctx context.Context, _ source.Sink) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestResolve(t *testing.T) {
	names := loaded(t)
	for _, c := range []struct {
		to     string
		family ip.Family
		want   string // or a part of the error
	}{
		{"svc/default/web", ip.IPv4, "10.96.0.10:80 TCP"},
		{"svc/web", ip.IPv4, "10.96.0.10:80 TCP"},
		{"svc/web:http", ip.IPv4, "10.96.0.10:80 TCP"},
		{"svc/web:80", ip.IPv4, "10.96.0.10:80 TCP"},
		{"svc/kube-system/dns:dns", ip.IPv6, "[fd00::20]:53 UDP"},
		{"svc/kube-system/dns:tcp", ip.IPv4, "10.96.0.20:53 TCP"},
		{"svc/kube-system/dns", ip.IPv4, "name one of dns:53/UDP, tcp:53/TCP"},
		{"svc/web:https", ip.IPv4, "has no port https, but http:80/TCP"},
		{"svc/web", ip.IPv6, "has no IPv6 cluster IP"},
		{"svc/other/web", ip.IPv4, "no Service other/web"},
	} {
		at, protocol, err := names.Resolve(c.to, c.family)
		got := fmt.Sprint(at, " ", protocol)
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, c.want) {
			t.Errorf("%s: %s, want %s", c.to, got, c.want)
		}
	}
	if a, ok := names.PodAddress("default/web-0", ip.IPv4); !ok || a.String() != "10.244.1.5" {
		t.Errorf("default/web-0 is %s, %t", a, ok)
	}
	if a, ok := names.PodAddress("default/web-0", ip.IPv6); ok {
		t.Errorf("default/web-0 is %s", a)
	}
	if got := names.Services(); len(got) != 2 || got[0].Name.Name != "web" {
		t.Errorf("%+v", got)
	}
}

// TestDrawings: both formats contain everything that the text does, and are complete
// documents.
func TestDrawings(t *testing.T) {
	x := trace.Explanation{
		Request: "TCP 10.0.0.1:40000 > 10.96.0.10:80", Service: "default/web", EntersBy: "veth1",
		Steps: []trace.Step{{Where: "mangle PREROUTING", What: `mark "0x4" <here> & #1`}},
		RealServers: []trace.ServerPath{
			{RealServer: "10.244.1.5:80", Pod: "default/web-0", Weight: 1, LeavesBy: "eth0", SeenSource: "10.0.0.1", Verdict: trace.Verdict{Outcome: trace.Answered}},
			{RealServer: "10.244.1.6:80", Weight: 1, Verdict: trace.Verdict{Outcome: trace.Dropped, Reason: strings.Repeat("a long reason ", 20)}},
		},
		Verdict: trace.Verdict{Outcome: trace.Dropped, Reason: "by 10.244.1.6:80"},
	}
	var svg, mermaid strings.Builder
	if err := errors.Join(WriteSVG(&svg, x), WriteMermaid(&mermaid, x)); err != nil {
		t.Fatal(err)
	}
	decoder := xml.NewDecoder(strings.NewReader(svg.String()))
	boxes := 0
	for {
		token, err := decoder.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg.String())
		}
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "rect" {
			boxes++
		}
	}
	if boxes != 4 {
		t.Errorf("%d boxes, want the request, two real servers and the verdict", boxes)
	}
	for _, want := range []string{"10.96.0.10:80", "Service default/web", "mark &#34;0x4&#34; &lt;here&gt; &amp; #1", "pod default/web-0", "#cf222e"} {
		if !strings.Contains(svg.String(), want) {
			t.Errorf("%q is not in\n%s", want, svg.String())
		}
	}
	for _, want := range []string{"flowchart TD\n", "request --> server2 --> verdict\n", "mark &quot;0x4&quot; &lt;here&gt; &amp; #35;1", "style server2 stroke:#c00", "style verdict stroke:#c00"} {
		if !strings.Contains(mermaid.String(), want) {
			t.Errorf("%q is not in\n%s", want, mermaid.String())
		}
	}
	if strings.Contains(mermaid.String(), "style server1") {
		t.Error("an answered connection is drawn as a fault")
	}
}

// TestPodsOfOneAddress: pods on the host network share the node's address.
func TestPodsOfOneAddress(t *testing.T) {
	names := newNames()
	s := sink{Names: names, slices: map[types.NamespacedName][]*discoveryv1.EndpointSlice{}}
	for name, port := range map[string]int32{"exporter": 9100, "agent": 9200} {
		s.SetEndpointSlice(&discoveryv1.EndpointSlice{
			ObjectMeta: sliceOf(name), Ports: []discoveryv1.EndpointPort{{Port: ptr.To(port)}},
			Endpoints: []discoveryv1.Endpoint{{
				Addresses: []string{"10.0.0.1"}, NodeName: ptr.To("node1"), TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: name + "-0"},
			}},
		})
	}
	for at, want := range map[string]Pod{
		"10.0.0.1:9100": {"default/exporter-0", "node1"}, "10.0.0.1:9200": {"default/agent-0", "node1"}, "10.0.0.1:80": {"", "node1"},
	} {
		if got := names.podAt(netip.MustParseAddrPort(at)); got != want {
			t.Errorf("%s is %+v, want %+v", at, got, want)
		}
	}
	for _, name := range []string{"default/exporter-0", "default/agent-0"} {
		if a, ok := names.PodAddress(name, ip.IPv4); !ok || a.String() != "10.0.0.1" {
			t.Errorf("%s has %s, %v", name, a, ok)
		}
	}
}
