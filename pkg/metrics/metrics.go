// Package metrics counts what the proxy does, under kube-proxy's names where
// kube-proxy has the same thing, so that its dashboards and alerts go on.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/prometheus/slis"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// The prefixes: kube-proxy's, and that of what only this program has.
const (
	theirs = "kubeproxy"
	ours   = "kube_ipvs"
)

// Recorder keeps the metrics. It is an Observer, and counts the answers of
// the health server. All methods may be called at any time from anywhere.
type Recorder struct {
	passDuration    *metrics.Histogram
	passSucceededAt *metrics.Gauge
	queuedAt        *metrics.Gauge
	healthz         *metrics.CounterVec
	livez           *metrics.CounterVec

	serviceChanges   *metrics.Counter
	endpointChanges  *metrics.Counter
	servicesPending  *metrics.Gauge
	endpointsPending *metrics.Gauge
	programming      *metrics.Histogram
	noLocal          *metrics.GaugeVec
	restoreFailures  *metrics.Counter
	forgetDuration   *metrics.Histogram
	forgotten        *metrics.Counter

	stageDuration *metrics.HistogramVec
	refused       *metrics.CounterVec
	interfaces    *metrics.GaugeVec

	planned         *metrics.Counter
	problems        *metrics.Counter
	compareDuration *metrics.Histogram
	driftRepaired   *metrics.Counter
	virtualServers  *metrics.Gauge
	realServers     *metrics.Gauge
	draining        *metrics.Gauge
	cut             *metrics.Counter
	conflicts       *metrics.Gauge
	nodeRefused     *metrics.Gauge
	servicesRefused *metrics.Gauge
}

// New makes the metrics and registers them, with legacyregistry.Register in
// the program. The error names each that could not be, such as one of which
// the registry has the name already.
func New(register func(metrics.Registerable) error) (*Recorder, error) {
	var errs []error
	r := newRecorder()
	for _, m := range r.all() {
		if err := register(m); err != nil {
			errs = append(errs, fmt.Errorf("metric %s: %w", m.FQName(), err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return r, nil
}

func newRecorder() *Recorder {
	return &Recorder{
		// One pass serves both families, so that there is no label ip_family.
		passDuration: histogram(theirs, "sync_proxy_rules_duration_seconds",
			"Duration of a sync: planning and programming the Services that have changed."),
		passSucceededAt: gauge(theirs, "sync_proxy_rules_last_timestamp_seconds",
			"Unix time of the last sync in which nothing failed."),
		queuedAt: gauge(theirs, "sync_proxy_rules_last_queued_timestamp_seconds",
			"Unix time of the last change that had to be programmed."),
		healthz: counterByCode("proxy_healthz_total", "Answers of /healthz, by HTTP status."),
		livez:   counterByCode("proxy_livez_total", "Answers of /livez, by HTTP status."),

		serviceChanges: counter(theirs, "sync_proxy_rules_service_changes_total",
			"Changes of Services received."),
		endpointChanges: counter(theirs, "sync_proxy_rules_endpoint_changes_total",
			"Changes of EndpointSlices received."),
		servicesPending: gauge(theirs, "sync_proxy_rules_service_changes_pending",
			"Changes of Services that wait for the next sync."),
		endpointsPending: gauge(theirs, "sync_proxy_rules_endpoint_changes_pending",
			"Changes of EndpointSlices that wait for the next sync."),
		programming: metrics.NewHistogram(&metrics.HistogramOpts{
			Subsystem: theirs, Name: "network_programming_duration_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from the change of a Pod or Service, as the EndpointSlice controller saw it, until this node had programmed its endpoints.",
			Buckets: programmingBuckets(),
		}),
		noLocal: gaugeBy(theirs, "sync_proxy_rules_no_local_endpoints_total",
			"Services with the traffic policy Local that have endpoints, but none on this node.", "traffic_policy"),
		restoreFailures: counter(theirs, "sync_proxy_rules_iptables_restore_failures_total",
			"Calls of iptables-restore that failed, in whole or in part."),
		forgetDuration: histogram(theirs, "conntrack_reconciler_sync_duration_seconds",
			"Duration of deleting the entries of stale UDP flows from connection tracking."),
		forgotten: counter(theirs, "conntrack_reconciler_deleted_entries_total",
			"Entries of stale UDP flows deleted from connection tracking."),

		stageDuration: metrics.NewHistogramVec(&metrics.HistogramOpts{
			Subsystem: ours, Name: "stage_duration_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Duration of the stages of a sync: plan, and each write to a part of the kernel (ipvs, ipset, iptables, nftables, routing, sysctl, conntrack).",
			Buckets: secondsBuckets(),
		}, []string{"stage"}),
		refused: metrics.NewCounterVec(&metrics.CounterOpts{
			Subsystem: ours, Name: "kernel_errors_total", StabilityLevel: metrics.ALPHA,
			Help: "Changes that the kernel refused, by its part and the operation.",
		}, []string{"part", "operation"}),
		interfaces: gaugeBy(ours, "interface_info",
			"1 for each secondary interface: the mode that keeps request and reply of its pods on one interface, and the SNAT source, if there is one.",
			"interface", "ip_family", "snat_mode", "snat_source"),

		planned: counter(ours, "planned_services_total",
			"Services planned; each time counts."),
		problems: counter(ours, "problems_total",
			"Failures to program the kernel. Each is retried."),
		compareDuration: histogram(ours, "compare_duration_seconds",
			"Duration of reading the kernel for a full comparison with the plan."),
		driftRepaired: counter(ours, "drift_repaired_total",
			"Differences found between the kernel and the plan, and repaired."),
		virtualServers: gauge(ours, "virtual_servers", "IPVS virtual servers programmed."),
		realServers:    gauge(ours, "real_servers", "IPVS real servers programmed, draining ones included."),
		draining: gauge(ours, "draining_real_servers",
			"IPVS real servers with weight 0, whose connections have not ended yet."),
		cut: counter(ours, "drain_cut_connections_total",
			"Connections reset at --drain-deadline after their endpoint was removed, or because its node was lost."),
		conflicts: gauge(ours, "conflicts", "IPVS virtual servers that more than one Service claims; one of them is served."),
		nodeRefused: gauge(ours, "node_refused",
			"1 while the kernel refuses something of the node's part, such as its rules, or cannot be read. The node is then not ready."),
		servicesRefused: gauge(ours, "services_refused",
			"Services with at least one change that the kernel refuses. Each is retried."),
	}
}

func (r *Recorder) all() []metrics.Registerable {
	return []metrics.Registerable{
		r.passDuration, r.passSucceededAt, r.queuedAt, r.healthz, r.livez,
		r.serviceChanges, r.endpointChanges, r.servicesPending, r.endpointsPending,
		r.programming, r.noLocal, r.restoreFailures, r.forgetDuration, r.forgotten,
		r.stageDuration, r.refused, r.interfaces,
		r.planned, r.problems, r.compareDuration, r.driftRepaired,
		r.virtualServers, r.realServers, r.draining, r.cut, r.conflicts,
		r.nodeRefused, r.servicesRefused,
	}
}

// Queued notes the time of a change.
func (r *Recorder) Queued() { r.queuedAt.Set(now()) }

// Passed notes what a pass took and came to.
func (r *Recorder) Passed(took time.Duration, services, problems int) {
	r.passDuration.Observe(took.Seconds())
	r.servicesPending.Set(0)
	r.endpointsPending.Set(0)
	r.planned.Add(float64(services))
	r.problems.Add(float64(problems))
	if problems == 0 {
		r.passSucceededAt.Set(now())
	}
}

// Failing notes what the kernel refuses.
func (r *Recorder) Failing(node bool, services, _ int) {
	r.nodeRefused.Set(0)
	if node {
		r.nodeRefused.Set(1)
	}
	r.servicesRefused.Set(float64(services))
}

// Compared notes what a comparison took and came to.
func (r *Recorder) Compared(took time.Duration, differences int) {
	r.compareDuration.Observe(took.Seconds())
	r.driftRepaired.Add(float64(differences))
}

// Held notes what there is.
func (r *Recorder) Held(virtualServers, realServers, draining int) {
	r.virtualServers.Set(float64(virtualServers))
	r.realServers.Set(float64(realServers))
	r.draining.Set(float64(draining))
}

// Cut counts connections that were cut at the deadline for draining, or with a node.
func (r *Recorder) Cut(connections int) { r.cut.Add(float64(connections)) }

// Restored counts what was deleted by another program and added again at once.
func (r *Recorder) Restored(count int) { r.driftRepaired.Add(float64(count)) }

// Conflicts notes how much is claimed in vain.
func (r *Recorder) Conflicts(count int) { r.conflicts.Set(float64(count)) }

// Changes counts what came, which waits until the next pass has ended.
func (r *Recorder) Changes(services, endpoints int) {
	r.serviceChanges.Add(float64(services))
	r.endpointChanges.Add(float64(endpoints))
	r.servicesPending.Add(float64(services))
	r.endpointsPending.Add(float64(endpoints))
}

// Planned notes how long a pass has planned.
func (r *Recorder) Planned(took time.Duration) {
	r.stageDuration.WithLabelValues("plan").Observe(took.Seconds())
}

// Programmed notes how long a change of endpoints took to come into the kernel.
func (r *Recorder) Programmed(latency time.Duration) { r.programming.Observe(latency.Seconds()) }

// NoLocalEndpoints notes for how many Services this node has no endpoint.
func (r *Recorder) NoLocalEndpoints(internal, external int) {
	r.noLocal.WithLabelValues("internal").Set(float64(internal))
	r.noLocal.WithLabelValues("external").Set(float64(external))
}

// Interfaces shows secondary interfaces in the place of those before.
func (r *Recorder) Interfaces(modes []plan.InterfaceMode) {
	r.interfaces.Reset()
	for _, m := range modes {
		source := ""
		if m.Source.IsValid() {
			source = m.Source.String()
		}
		r.interfaces.WithLabelValues(m.Link, m.Family.String(), string(m.Mode), source).Set(1)
	}
}

// Wrote notes how long a part of the kernel took to be written.
func (r *Recorder) Wrote(part string, took time.Duration, refused int) {
	r.stageDuration.WithLabelValues(part).Observe(took.Seconds())
	switch {
	case part == "conntrack":
		r.forgetDuration.Observe(took.Seconds())
	case part == "iptables" && refused > 0:
		r.restoreFailures.Inc()
	}
}

// Refused counts a change that was refused.
func (r *Recorder) Refused(part, operation string) {
	r.refused.WithLabelValues(part, operation).Inc()
}

// Forgot counts entries deleted from conntrack.
func (r *Recorder) Forgot(flows int) { r.forgotten.Add(float64(flows)) }

// Node does nothing: what the Node says is no business of these metrics.
func (r *Recorder) Node(_, _, _ bool) {}

// Healthz counts an answer of /healthz, among the service level indicators
// too.
func (r *Recorder) Healthz(ctx context.Context, code int) { answered(ctx, r.healthz, "healthz", code) }

// Livez counts an answer of /livez, among the service level indicators too.
func (r *Recorder) Livez(ctx context.Context, code int) { answered(ctx, r.livez, "livez", code) }

func answered(ctx context.Context, counter *metrics.CounterVec, check string, code int) {
	counter.WithLabelValues(strconv.Itoa(code)).Inc()
	status := slis.Success
	if code != http.StatusOK {
		status = slis.Error
	}
	// It has an error to return and never does.
	_ = slis.ObserveHealthcheck(ctx, "proxy", check, status)
}

// now is the time as Prometheus has it.
func now() float64 { return float64(time.Now().UnixNano()) / float64(time.Second) }

func histogram(prefix, name, help string) *metrics.Histogram {
	return metrics.NewHistogram(&metrics.HistogramOpts{
		Subsystem: prefix, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
		Buckets: secondsBuckets(),
	})
}

// secondsBuckets are kube-proxy's: 1 ms to 16 s.
func secondsBuckets() []float64 { return metrics.ExponentialBuckets(0.001, 2, 15) }

// programmingBuckets are those that the service level objective of Kubernetes is
// measured with: to a minute second by second, and to five minutes.
func programmingBuckets() []float64 {
	return metrics.MergeBuckets(metrics.LinearBuckets(0.25, 0.25, 2), metrics.LinearBuckets(1, 1, 59),
		metrics.LinearBuckets(60, 5, 12), metrics.LinearBuckets(120, 30, 7))
}

func gauge(prefix, name, help string) *metrics.Gauge {
	return metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem: prefix, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
	})
}

func gaugeBy(prefix, name, help string, labels ...string) *metrics.GaugeVec {
	return metrics.NewGaugeVec(&metrics.GaugeOpts{
		Subsystem: prefix, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
	}, labels)
}

func counter(prefix, name, help string) *metrics.Counter {
	return metrics.NewCounter(&metrics.CounterOpts{
		Subsystem: prefix, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
	})
}

func counterByCode(name, help string) *metrics.CounterVec {
	return metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem: theirs, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
	}, []string{"code"})
}
