package metrics

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// ServiceName is a port of a Service.
type ServiceName struct{ Namespace, Name, Port, Protocol string }

func (a ServiceName) compare(b ServiceName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name),
		strings.Compare(a.Port, b.Port), strings.Compare(a.Protocol, b.Protocol))
}

// Traffic is the collector of --service-metrics: connections, packets and bytes of each
// Service port, from the kernel's counters, summed over the Service's addresses. The sum
// keeps what was counted on addresses that the Service no longer has: a counter that goes
// down means to Prometheus that all of it was counted again. Traffic reads the kernel on a
// scrape, at most once per trafficPeriod.
type Traffic struct {
	metrics.BaseStableCollector

	limit int
	read  func() (map[ipvs.Key]ipvs.Stats, error)
	names func([]ipvs.Key) (map[ipvs.Key]ServiceName, error)

	connections, packets, bytes, leftOut *metrics.Desc

	mu     sync.Mutex // guards the fields below
	readAt time.Time
	last   map[ipvs.Key]ipvs.Stats
	totals map[ServiceName]ipvs.Stats
}

// trafficPeriod limits the cost of scrapes: reading tens of thousands of virtual
// servers takes tenths of a second.
const trafficPeriod = 5 * time.Second

// NewTraffic creates the collector for at most limit ports of Services, in order of
// namespace and name. names returns the Services of virtual servers; virtual servers
// without a Service are skipped.
func NewTraffic(limit int, read func() (map[ipvs.Key]ipvs.Stats, error), names func([]ipvs.Key) (map[ipvs.Key]ServiceName, error)) *Traffic {
	t := &Traffic{limit: limit, read: read, names: names}
	for into, d := range map[**metrics.Desc]description{&t.connections: connections, &t.packets: packets, &t.bytes: bytes, &t.leftOut: leftOut} {
		*into = metrics.NewDesc(d.name, d.help, d.labels, nil, metrics.ALPHA, "")
	}
	return t
}

// description describes a metric of this file for the reference.
type description struct {
	name, kind, help string
	labels           []string
}

var (
	servicePort = []string{"namespace", "service", "port", "protocol"}
	direction   = append(slices.Clone(servicePort), "direction")

	connections = description{ours + "_service_connections_total", "counter", "Connections to the Service's port on this node, as counted by IPVS. Needs --service-metrics.", servicePort}
	packets     = description{ours + "_service_packets_total", "counter", "Packets of connections to the Service's port on this node; direction is in (from clients) or out. Needs --service-metrics.", direction}
	bytes       = description{ours + "_service_bytes_total", "counter", "Bytes of connections to the Service's port on this node; direction is in (from clients) or out. Needs --service-metrics.", direction}
	leftOut     = description{ours + "_service_metrics_left_out", "gauge", "Service ports without these metrics because --service-metrics is exceeded.", nil}
)

// DescribeWithStability returns the descriptions.
func (t *Traffic) DescribeWithStability(out chan<- *metrics.Desc) {
	for _, d := range []*metrics.Desc{t.connections, t.packets, t.bytes, t.leftOut} {
		out <- d
	}
}

// CollectWithStability reads the kernel. It may be called concurrently: Prometheus servers scrape
// when they like.
func (t *Traffic) CollectWithStability(out chan<- metrics.Metric) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := time.Now(); now.Sub(t.readAt) >= trafficPeriod {
		t.readAt = now
		t.renew()
	}
	names := slices.SortedFunc(maps.Keys(t.totals), ServiceName.compare)
	shown := names[:min(t.limit, len(names))]
	for _, n := range shown {
		s := t.totals[n]
		send := func(d *metrics.Desc, value uint64, direction ...string) {
			labels := append([]string{n.Namespace, n.Name, n.Port, n.Protocol}, direction...)
			out <- metrics.NewLazyConstMetric(d, metrics.CounterValue, float64(value), labels...)
		}
		send(t.connections, s.Connections)
		send(t.packets, s.PacketsIn, "in")
		send(t.packets, s.PacketsOut, "out")
		send(t.bytes, s.BytesIn, "in")
		send(t.bytes, s.BytesOut, "out")
	}
	out <- metrics.NewLazyConstMetric(t.leftOut, metrics.GaugeValue, float64(len(names)-len(shown)))
}

// renew keeps the previous reading if reading fails.
func (t *Traffic) renew() {
	stats, err := t.read()
	var names map[ipvs.Key]ServiceName
	if err == nil {
		names, err = t.names(slices.Collect(maps.Keys(stats)))
	}
	if err != nil {
		klog.Background().Error(err, "Cannot read the counters for --service-metrics")
		return
	}
	totals := make(map[ServiceName]ipvs.Stats, len(names))
	for key, name := range names {
		sum, ok := totals[name]
		if !ok {
			sum = t.totals[name]
		}
		totals[name] = plus(sum, since(t.last[key], stats[key]))
	}
	t.last, t.totals = stats, totals
}

// since returns what a virtual server has counted since the last reading. If the kernel has
// a new virtual server, that is everything.
func since(last, now ipvs.Stats) ipvs.Stats {
	if now.Connections < last.Connections || now.PacketsIn < last.PacketsIn || now.PacketsOut < last.PacketsOut || now.BytesIn < last.BytesIn || now.BytesOut < last.BytesOut {
		return now
	}
	return ipvs.Stats{
		Connections: now.Connections - last.Connections,
		PacketsIn:   now.PacketsIn - last.PacketsIn, PacketsOut: now.PacketsOut - last.PacketsOut,
		BytesIn: now.BytesIn - last.BytesIn, BytesOut: now.BytesOut - last.BytesOut,
	}
}

func plus(a, b ipvs.Stats) ipvs.Stats {
	return ipvs.Stats{
		Connections: a.Connections + b.Connections,
		PacketsIn:   a.PacketsIn + b.PacketsIn, PacketsOut: a.PacketsOut + b.PacketsOut,
		BytesIn: a.BytesIn + b.BytesIn, BytesOut: a.BytesOut + b.BytesOut,
	}
}
