package conformance

import (
	"flag"
	"net/netip"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table into docs/differences.md")

// The page ends with the current table.
func TestTableInDocs(t *testing.T) {
	const path = "../../docs/differences.md"
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text, shown, _ := strings.Cut(string(page), tableHead)
	if *update {
		if err := os.WriteFile(path, []byte(text+Table()), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if tableHead+shown != Table() {
		t.Error("docs/differences.md does not end with the table: run go test ./test/conformance -update")
	}
}

// Each entry allows the difference that it describes, and no similar one.
func TestDifferences(t *testing.T) {
	for _, tc := range []struct {
		name  string
		world []Change
		diff  Diff
		want  bool
	}{
		{"a real server more", nil, realServer("10.96.1.10:80", "", "-m -w 1"), false},
		{"ping", nil, packetTo("ICMP", "pod", "10.96.1.10:0", "refused", "the node's own"), true},
		{"ping is forwarded", balancer(), packetTo("ICMP", "outside", "10.96.1.10:0", "refused", "forwarded"), false},
		{"ping of a pod to an external address", balancer(), packetTo("ICMP", "pod", "203.0.113.1:0", "refused", "forwarded"), true},
		{"ping of a pod to a cluster IP", balancer(), packetTo("ICMP", "pod", "10.96.1.10:0", "refused", "forwarded"), false},
		{"ping is dropped instead of refused", nil, packetTo("ICMP", "outside", "203.0.113.1:0", "refused", "dropped"), false},
		{"ping is dropped", nil, packetTo("ICMP", "pod", "10.96.1.10:0", "the node's own", "dropped"), false},
		{"outside, Local", local(), packetTo("TCP", "outside", "203.0.113.1:80", "10.244.2.2:8080 as itself", "dropped"), true},
		{"outside, Local, endpoint here, dropped", endpointHere(local(), "ready"), packetTo("TCP", "outside", "203.0.113.1:80", "10.244.1.2:8080 as itself", "dropped"), false},
		{"outside, Local, draining endpoint here, dropped", endpointHere(local(), "terminating"), packetTo("TCP", "outside", "203.0.113.1:80", "10.244.1.2:8080 as itself", "dropped"), false},
		{"outside, Local, endpoint here is not ready, dropped", endpointHere(local(), "not ready"), packetTo("TCP", "outside", "203.0.113.1:80", "10.244.2.2:8080 as itself", "dropped"), true},
		{"internal Local, refused", internalLocal(), packetTo("TCP", "pod", "10.96.1.10:80", "10.244.2.2:8080 as itself", "refused"), true},
		{"internal Local, endpoint here, refused", endpointHere(internalLocal(), "ready"), packetTo("TCP", "pod", "10.96.1.10:80", "10.244.1.2:8080 as itself", "refused"), false},
		{"internal Local, without another node's real server", internalLocal(), realServerOf("10.244.2.2:8080", "10.96.1.10:80", "-m -w 1", ""), true},
		{"internal Local, without this node's real server", internalLocal(), realServer("10.96.1.10:80", "-m -w 1", ""), false},
		{"internal Local, endpoint here, without another node's real server", endpointHere(internalLocal(), "ready"), realServerOf("10.244.2.2:8080", "10.96.1.10:80", "-m -w 1", ""), false},
		{"outside, Cluster", balancer(), packetTo("TCP", "outside", "203.0.113.1:80", "10.244.2.2:8080 masqueraded", "dropped"), false},
		{"outside, Local, masqueraded", local(), packetTo("TCP", "outside", "203.0.113.1:80", "10.244.1.2:8080 as itself", "10.244.1.2:8080 masqueraded"), false},
		{"inside, Local", local(), packetTo("TCP", "pod", "203.0.113.1:80", "10.244.1.2:8080 as itself", "10.244.1.2:8080 as itself, 10.244.2.2:8080 as itself"), true},
		{"inside, Local, masqueraded", local(), packetTo("TCP", "pod", "203.0.113.1:80", "10.244.1.2:8080 as itself", "10.244.1.2:8080 masqueraded"), false},
		{"inside, Local, an endpoint", local(), packetTo("TCP", "endpoint", "203.0.113.1:80", "10.244.1.2:8080 masqueraded", "10.244.1.2:8080 masqueraded, 10.244.2.2:8080 as itself"), true},
		{"inside, Local, an endpoint masqueraded", local(), packetTo("TCP", "endpoint", "203.0.113.1:80", "10.244.1.2:8080 masqueraded", "10.244.1.2:8080 masqueraded, 10.244.2.2:8080 masqueraded"), false},
		{"inside, Local, another node's pod", local(), packetTo("TCP", "other pod", "203.0.113.1:80", "10.244.2.2:8080 as itself", "10.244.2.2:8080 masqueraded"), false},
		{"Local, another node's pod, no endpoint here", local(), packetTo("TCP", "other pod", "203.0.113.1:80", "10.244.2.2:8080 as itself", "dropped"), true},
		{"inside, Local, dropped", local(), packetTo("TCP", "pod", "203.0.113.1:80", "10.244.1.2:8080 as itself", "dropped"), false},
		{"inside, Local, refused", local(), packetTo("TCP", "node", "203.0.113.1:80", "10.244.1.2:8080 as itself", "refused"), false},
		{"inside, Local, another node's pod as itself", local(), packetTo("TCP", "other pod", "203.0.113.1:80", "10.244.2.2:8080 masqueraded", "10.244.2.2:8080 as itself"), false},
		{"inside, Local, the node", local(), packetTo("TCP", "node", "203.0.113.1:80", "10.244.2.2:8080 as itself", "10.244.2.2:8080 masqueraded"), true},
		{"inside, Local, the node as itself", local(), packetTo("TCP", "node", "203.0.113.1:80", "10.244.2.2:8080 masqueraded", "10.244.2.2:8080 as itself"), false},
		{"inside, Local, cluster IP", local(), packetTo("TCP", "pod", "10.96.1.10:80", "10.244.1.2:8080 as itself", "10.244.1.2:8080 masqueraded"), false},
		{"not claimed", balancer(), packetTo("TCP", "pod", "203.0.113.1:81", "refused", "forwarded"), true},
		{"not claimed, dropped", balancer(), packetTo("TCP", "pod", "203.0.113.1:81", "refused", "dropped"), true},
		{"not claimed, dropped from outside", balancer(), packetTo("TCP", "outside", "203.0.113.1:81", "refused", "dropped"), false},
		{"not claimed, forwarded from outside", balancer(), packetTo("TCP", "outside", "203.0.113.1:81", "refused", "forwarded"), false},
		{"not claimed, of a cluster IP", balancer(), packetTo("TCP", "pod", "10.96.1.10:81", "refused", "forwarded"), false},
		{"claimed and forwarded", balancer(), packetTo("TCP", "pod", "203.0.113.1:80", "refused", "forwarded"), false},
		{"claimed for the other family", balancerOf("6"), packetTo("TCP", "pod", "203.0.113.1:80", "refused", "forwarded"), true},
		{"node port's number, masqueraded", nil, packetTo("TCP", "pod", "10.96.1.10:30000", "10.244.1.2:8080 masqueraded", "10.244.1.2:8080 as itself"), true},
		{"node port's number, another endpoint", nil, packetTo("TCP", "pod", "10.96.1.10:30000", "10.244.1.2:8080 masqueraded", "10.244.1.3:8080 as itself"), false},
		{"Local, a real server less", local(), realServer("203.0.113.1:80", "-m -w 1", ""), false},
		{"disputed", copies("ready", "not ready"), realServer("10.96.1.10:80", "-m -w 1", ""), true},
		{"disputed, of other hints", copies("ready", "ready", "a"), realServer("10.96.1.10:80", "-m -w 1", ""), true},
		{"disputed while terminating", copies("terminating", "terminated"), realServer("10.96.1.10:80", "", "-m -w 1"), true},
		{"disputed, as a virtual server", copies("ready", "not ready"), Diff{Fact{Kind: "virtual server", Protocol: "TCP", At: netip.MustParseAddrPort("10.96.1.10:80")}, "", "-s rr"}, false},
		{"shared, the owner's endpoint", shared(), realServer("10.96.1.10:80", "", "-m -w 1"), true},
		{"shared, the other's endpoint", shared(), Diff{Fact{Kind: "real server", Protocol: "TCP", At: netip.MustParseAddrPort("10.96.1.10:80"), Name: "10.244.2.2:8080"}, "", "-m -w 1"}, false},
		{"shared, without the other's endpoint", shared(), Diff{Fact{Kind: "real server", Protocol: "TCP", At: netip.MustParseAddrPort("10.96.1.10:80"), Name: "10.244.2.2:8080"}, "-m -w 1", ""}, true},
		{"shared, without the owner's endpoint", shared(), realServer("10.96.1.10:80", "-m -w 1", ""), false},
		{"shared, no virtual server", shared(), Diff{Fact{Kind: "virtual server", Protocol: "TCP", At: netip.MustParseAddrPort("10.96.1.10:80")}, "-s rr", ""}, false},
		{"shared, the other's affinity", shared(), Diff{Fact{Kind: "virtual server", Protocol: "TCP", At: netip.MustParseAddrPort("10.96.1.10:80")}, "-s rr", "-s rr -p 60"}, false},
		{"shared, a packet to the owner", shared(), packetTo("TCP", "pod", "10.96.1.10:80", "10.244.2.2:8080 masqueraded", "10.244.1.2:8080 as itself"), true},
		{"shared, a packet to the other", shared(), packetTo("TCP", "pod", "10.96.1.10:80", "10.244.1.2:8080 as itself", "10.244.2.2:8080 as itself"), false},
		{"shared, refused", shared(), packetTo("TCP", "pod", "10.96.1.10:80", "10.244.1.2:8080 as itself", "refused"), false},
		{"shared, forwarded", shared(), packetTo("TCP", "pod", "10.96.1.10:80", "10.244.1.2:8080 as itself", "forwarded"), false},
		{"shared, not in the other's set", shared(), memberOf("KUBE-EXTERNAL-IP", "listed", ""), true},
		{"shared, in the other's set", shared(), memberOf("KUBE-EXTERNAL-IP", "", "listed"), false},
		{"shared, not in the owner's set", shared(), memberOf("KUBE-CLUSTER-IP", "listed", ""), false},
		{"twice, an endpoint less", twice(), Diff{Fact{Kind: "real server", Protocol: "TCP", At: netip.MustParseAddrPort("203.0.113.1:80"), Name: "10.244.1.2:8080"}, "-m -w 1", ""}, false},
		{"twice, in one set", twice(), Diff{Fact{Kind: "member", Name: "KUBE-LOAD-BALANCER", Protocol: "TCP", At: netip.MustParseAddrPort("203.0.113.1:80")}, "listed", ""}, true},
		{"ranges without the node", ranges("100.64.0.0/16"), packetTo("TCP", "node", "203.0.113.1:80", "10.244.1.2:8080 as itself", "dropped"), true},
		{"ranges without the node, answered", ranges("100.64.0.0/16"), packetTo("TCP", "node", "203.0.113.1:80", "dropped", "10.244.1.2:8080 as itself"), false},
		{"ranges with the node", ranges("192.168.50.0/24"), packetTo("TCP", "node", "203.0.113.1:80", "dropped", "10.244.1.2:8080 as itself"), true},
		{"ranges with the node, dropped", ranges("192.168.50.0/24"), packetTo("TCP", "node", "203.0.113.1:80", "10.244.1.2:8080 as itself", "dropped"), false},
		{"ranges with the node, refused", endpointHere(ranges("192.168.50.0/24"), "ready"), packetTo("TCP", "node", "203.0.113.1:80", "dropped", "refused"), false},
		{"ranges with the node, refused without endpoints", ranges("192.168.50.0/24"), packetTo("TCP", "node", "203.0.113.1:80", "dropped", "refused"), true},
		{"ranges with the node, its address", ranges("192.168.50.0/24"), sourceOf("192.168.50.11", "", "listed"), true},
		{"ranges with the node, its address on the bridge", ranges("192.168.50.0/24"), sourceOf("10.244.1.1", "", "listed"), true},
		{"ranges with the node, not the VIP", ranges("192.168.50.0/24"), sourceOf("203.0.113.1", "listed", ""), false},
		{"ranges with the node, another host", ranges("192.168.50.0/24"), sourceOf("192.168.50.12", "", "listed"), false},
		{"ranges without the node, its address", ranges("100.64.0.0/16"), sourceOf("192.168.50.11", "", "listed"), false},
		{"one of two terminates", copies("terminating", "not ready"), realServer("10.96.1.10:80", "-m -w 1", ""), false},
		{"twice the same", copies("ready", "unset"), realServer("10.96.1.10:80", "-m -w 1", ""), false},
	} {
		w := NewWorld()
		for _, c := range tc.world {
			w.Apply(c)
		}
		if got := Allowed(w, tc.diff) != nil; got != tc.want {
			t.Errorf("%s: allowed %t, want %t", tc.name, got, tc.want)
		}
	}
}

func balancer() []Change { return balancerOf("4") }

func balancerOf(families string) []Change {
	return []Change{{Service: &Service{
		Type: "LoadBalancer", Families: families, Ports: []Port{{"web", 80}}, Ingress: []Ingress{{"203.0.113.1", "VIP"}},
	}}}
}

// copies returns changes that put one endpoint into two slices, with zone hints in the
// second.
func copies(one, other string, hints ...string) []Change {
	ports := []SlicePort{{"web", 8080}}
	return append(balancer(),
		Change{Slice: &Slice{Number: 0, Family: "4", Ports: ports, Endpoints: []Endpoint{{State: one}}}},
		Change{Slice: &Slice{Number: 1, Family: "4", Ports: ports, Endpoints: []Endpoint{{State: other, Zones: hints}}}})
}

// shared returns changes after which another Service names the first one's cluster IP as
// its external IP. Each has an endpoint of its own.
func shared() []Change {
	ports := []SlicePort{{"web", 8080}}
	return append(balancer(),
		Change{Service: &Service{Slot: 1, Type: "ClusterIP", Families: "4", Ports: []Port{{"web", 80}}, ExternalIPs: []string{"10.96.1.10"}, AffinitySeconds: 60}},
		Change{Slice: &Slice{Slot: 0, Family: "4", Ports: ports, Endpoints: []Endpoint{{Host: 0, State: "ready"}}}},
		Change{Slice: &Slice{Slot: 1, Family: "4", Ports: ports, Endpoints: []Endpoint{{Host: 1, State: "ready"}}}})
}

// twice returns changes after which a Service names its load balancer IP as external IP too.
func twice() []Change {
	changes := shared()
	changes[0].Service.ExternalIPs = []string{"203.0.113.1"}
	return changes
}

func ranges(list ...string) []Change {
	changes := balancer()
	changes[0].Service.SourceRanges = list
	return changes
}

func memberOf(set, kubeProxy, ours string) Diff {
	return Diff{Fact{Kind: "member", Name: set, Protocol: "TCP", At: netip.MustParseAddrPort("10.96.1.10:80")}, kubeProxy, ours}
}

func local() []Change {
	changes := balancer()
	changes[0].Service.ExternalLocal = true
	return changes
}

// internalLocal returns changes after which a Service has internalTrafficPolicy Local and is
// exposed.
func internalLocal() []Change {
	changes := balancer()
	changes[0].Service.InternalLocal = true
	return changes
}

// endpointHere adds a slice with one endpoint on this node.
func endpointHere(changes []Change, state string) []Change {
	return append(changes, Change{Slice: &Slice{Family: "4", Ports: []SlicePort{{"web", 8080}}, Endpoints: []Endpoint{{State: state}}}})
}

// sourceOf returns a difference of the set that allows the node's own packets.
func sourceOf(source, kubeProxy, ours string) Diff {
	return Diff{Fact{
		Kind: "member", Name: "KUBE-LOAD-BALANCER-SOURCE-IP", Protocol: "TCP", At: netip.MustParseAddrPort("203.0.113.1:80"), Member: "203.0.113.1,tcp:80," + source,
	}, kubeProxy, ours}
}

func realServer(at, kubeProxy, ours string) Diff {
	return realServerOf("10.244.1.2:8080", at, kubeProxy, ours)
}

func realServerOf(to, at, kubeProxy, ours string) Diff {
	return Diff{Fact{Kind: "real server", Protocol: "TCP", At: netip.MustParseAddrPort(at), Name: to}, kubeProxy, ours}
}

func packetTo(protocol, from, at, kubeProxy, ours string) Diff {
	return Diff{Fact{Kind: "packet", Protocol: protocol, Name: from, At: netip.MustParseAddrPort(at)}, kubeProxy, ours}
}
