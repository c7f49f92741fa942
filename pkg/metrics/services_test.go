package metrics

import (
	"errors"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"k8s.io/component-base/metrics"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// TestTraffic sums a Service's virtual servers, omits those without a Service and those
// beyond the limit, and keeps the last reading if a new one fails.
func TestTraffic(t *testing.T) {
	key := func(at string) ipvs.Key {
		a := netip.MustParseAddrPort(at)
		return ipvs.Key{Protocol: ip.TCP, Addr: a.Addr(), Port: a.Port()}
	}
	failing := false
	read := func() (map[ipvs.Key]ipvs.Stats, error) {
		if failing {
			return nil, errors.New("no")
		}
		return map[ipvs.Key]ipvs.Stats{
			key("10.96.0.1:80"):  {Connections: 2, PacketsIn: 10, PacketsOut: 9, BytesIn: 1000, BytesOut: 5 << 32},
			key("192.0.2.1:80"):  {Connections: 1, PacketsIn: 1, PacketsOut: 1, BytesIn: 1, BytesOut: 1},
			key("10.96.0.2:80"):  {Connections: 7},
			key("10.99.0.9:443"): {Connections: 9},
		}, nil
	}
	names := func([]ipvs.Key) (map[ipvs.Key]ServiceName, error) {
		a, b := ServiceName{"default", "a", "http", "TCP"}, ServiceName{"default", "b", "http", "TCP"}
		return map[ipvs.Key]ServiceName{key("10.96.0.1:80"): a, key("192.0.2.1:80"): a, key("10.96.0.2:80"): b}, nil
	}
	registry := metrics.NewKubeRegistry()
	traffic := NewTraffic(1, read, names)
	registry.CustomMustRegister(traffic)
	for range 2 {
		text := scrape(t, registry)
		for _, want := range []string{
			`kube_ipvs_service_connections_total{namespace="default",port="http",protocol="TCP",service="a"} 3`,
			`kube_ipvs_service_packets_total{direction="in",namespace="default",port="http",protocol="TCP",service="a"} 11`,
			`kube_ipvs_service_packets_total{direction="out",namespace="default",port="http",protocol="TCP",service="a"} 10`,
			`kube_ipvs_service_bytes_total{direction="in",namespace="default",port="http",protocol="TCP",service="a"} 1001`,
			`kube_ipvs_service_bytes_total{direction="out",namespace="default",port="http",protocol="TCP",service="a"} 2.1474836481e+10`,
			`kube_ipvs_service_metrics_left_out 1`,
		} {
			if !strings.Contains(text, want+"\n") {
				t.Errorf("%s is not in\n%s", want, text)
			}
		}
		if strings.Contains(text, `service="b"`) {
			t.Errorf("more Services than the limit:\n%s", text)
		}
		failing = true
		traffic.readAt = traffic.readAt.Add(-trafficPeriod)
	}
}

// TestTrafficNeverGoesBack: a virtual server that is removed, or replaced, and virtual servers
// whose names cannot be read lower no counter.
func TestTrafficNeverGoesBack(t *testing.T) {
	key := func(at string) ipvs.Key {
		a := netip.MustParseAddrPort(at)
		return ipvs.Key{Protocol: ip.TCP, Addr: a.Addr(), Port: a.Port()}
	}
	a, b := key("10.0.0.1:30080"), key("10.0.0.2:30080")
	counts := map[ipvs.Key]ipvs.Stats{a: {Connections: 1000}, b: {Connections: 10}}
	var unnamed error
	registry := metrics.NewKubeRegistry()
	traffic := NewTraffic(1, func() (map[ipvs.Key]ipvs.Stats, error) { return maps.Clone(counts), nil },
		func(keys []ipvs.Key) (map[ipvs.Key]ServiceName, error) {
			out := map[ipvs.Key]ServiceName{}
			for _, k := range keys {
				out[k] = ServiceName{"default", "a", "http", "TCP"}
			}
			return out, unnamed
		})
	registry.CustomMustRegister(traffic)
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"at the start", func() {}, "1010"},
		{"a node address is removed", func() { delete(counts, b) }, "1010"},
		{"more connections", func() { counts[a] = ipvs.Stats{Connections: 1005} }, "1015"},
		{"no names", func() { unnamed, counts[a] = errors.New("no"), ipvs.Stats{Connections: 1006} }, "1015"},
		{"names again", func() { unnamed = nil }, "1016"},
		{"the virtual server is replaced", func() { counts[a] = ipvs.Stats{Connections: 3} }, "1019"},
		{"the address is back", func() { counts[b] = ipvs.Stats{Connections: 1} }, "1020"},
	} {
		step.do()
		traffic.readAt = traffic.readAt.Add(-trafficPeriod)
		if text, want := scrape(t, registry), `kube_ipvs_service_connections_total{namespace="default",port="http",protocol="TCP",service="a"} `+step.want+"\n"; !strings.Contains(text, want) {
			t.Errorf("%s: %s is not in\n%s", step.what, want, text)
		}
	}
}
