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
		{"ping is dropped", nil, packetTo("ICMP", "pod", "10.96.1.10:0", "the node's own", "dropped"), false},
		{"outside, Local", local(), packetTo("TCP", "outside", "203.0.113.1:80", "10.244.2.2:8080 as itself", "dropped"), true},
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
		{"claimed and forwarded", balancer(), packetTo("TCP", "pod", "203.0.113.1:80", "refused", "forwarded"), false},
		{"claimed for the other family", balancerOf("6"), packetTo("TCP", "pod", "203.0.113.1:80", "refused", "forwarded"), true},
		{"node port's number, masqueraded", nil, packetTo("TCP", "pod", "10.96.1.10:30000", "10.244.1.2:8080 masqueraded", "10.244.1.2:8080 as itself"), true},
		{"node port's number, another endpoint", nil, packetTo("TCP", "pod", "10.96.1.10:30000", "10.244.1.2:8080 masqueraded", "10.244.1.3:8080 as itself"), false},
		{"Local, a real server less", local(), realServer("203.0.113.1:80", "-m -w 1", ""), false},
		{"disputed", copies("ready", "not ready"), realServer("10.96.1.10:80", "-m -w 1", ""), true},
		{"disputed, of other hints", copies("ready", "ready", "a"), realServer("10.96.1.10:80", "-m -w 1", ""), true},
		{"disputed while terminating", copies("terminating", "terminated"), realServer("10.96.1.10:80", "", "-m -w 1"), true},
		{"disputed, as a virtual server", copies("ready", "not ready"), Diff{Fact{Kind: "virtual server", Protocol: "TCP", At: netip.MustParseAddrPort("10.96.1.10:80")}, "", "-s rr"}, false},
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

func local() []Change {
	changes := balancer()
	changes[0].Service.ExternalLocal = true
	return changes
}

func realServer(at, kubeProxy, ours string) Diff {
	return Diff{Fact{Kind: "real server", Protocol: "TCP", At: netip.MustParseAddrPort(at)}, kubeProxy, ours}
}

func packetTo(protocol, from, at, kubeProxy, ours string) Diff {
	return Diff{Fact{Kind: "packet", Protocol: protocol, Name: from, At: netip.MustParseAddrPort(at)}, kubeProxy, ours}
}
