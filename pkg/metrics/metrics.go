// Package metrics holds the proxy's metrics. Metrics that kube-proxy has too have the
// same names, so that dashboards and alerts keep working.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/prometheus/slis"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Prefixes of kube-proxy's metrics and of our own.
const (
	theirs = "kubeproxy"
	ours   = "kube_ipvs"
)

// Recorder holds the metrics. It is a proxy.Observer, and counts the responses of the health
// server. All methods may be called concurrently.
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

	failing atomic.Bool // the kernel refuses something
}

// New creates the metrics and registers them with register, which is
// legacyregistry.Register in the program. The error lists those that could not be
// registered.
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
		// One sync serves both families, so there is no label ip_family.
		passDuration: histogram(theirs, "sync_proxy_rules_duration_seconds",
			"Duration of a sync: planning and programming changed Services."),
		passSucceededAt: gauge(theirs, "sync_proxy_rules_last_timestamp_seconds",
			"Unix time of the last sync, or comparison with the kernel, without failures."),
		queuedAt: gauge(theirs, "sync_proxy_rules_last_queued_timestamp_seconds",
			"Unix time of the last change that was queued for programming."),
		healthz: counterByCode("proxy_healthz_total", "Responses of /healthz, by HTTP status."),
		livez:   counterByCode("proxy_livez_total", "Responses of /livez, by HTTP status."),

		serviceChanges: counter(theirs, "sync_proxy_rules_service_changes_total",
			"Changes of Services received."),
		endpointChanges: counter(theirs, "sync_proxy_rules_endpoint_changes_total",
			"Changes of EndpointSlices received."),
		servicesPending: gauge(theirs, "sync_proxy_rules_service_changes_pending",
			"Changes of Services pending for the next sync."),
		endpointsPending: gauge(theirs, "sync_proxy_rules_endpoint_changes_pending",
			"Changes of EndpointSlices pending for the next sync."),
		programming: metrics.NewHistogram(&metrics.HistogramOpts{
			Subsystem: theirs, Name: "network_programming_duration_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from the change of a Pod or Service, as recorded by the EndpointSlice controller, until this node had programmed its endpoints.",
			Buckets: programmingBuckets(),
		}),
		noLocal: gaugeBy(theirs, "sync_proxy_rules_no_local_endpoints_total",
			"Services with traffic policy Local that have endpoints, but none on this node.", "traffic_policy"),
		restoreFailures: counter(theirs, "sync_proxy_rules_iptables_restore_failures_total",
			"Calls of iptables-restore that failed completely or partially."),
		forgetDuration: histogram(theirs, "conntrack_reconciler_sync_duration_seconds",
			"Duration of deleting conntrack entries of stale UDP flows."),
		forgotten: counter(theirs, "conntrack_reconciler_deleted_entries_total",
			"Deleted conntrack entries of stale UDP flows."),

		stageDuration: metrics.NewHistogramVec(&metrics.HistogramOpts{
			Subsystem: ours, Name: "stage_duration_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Duration of the stages of a sync: plan, and each write to a part of the kernel (ipvs, ipset, iptables, nftables, routing, sysctl, conntrack).",
			Buckets: secondsBuckets(),
		}, []string{"stage"}),
		refused: metrics.NewCounterVec(&metrics.CounterOpts{
			Subsystem: ours, Name: "kernel_errors_total", StabilityLevel: metrics.ALPHA,
			Help: "Changes refused by the kernel, by part of the kernel and operation.",
		}, []string{"part", "operation"}),
		interfaces: gaugeBy(ours, "interface_info",
			"1 for each secondary interface, with the mode (see --snat-mode) and the SNAT source of its pods' traffic, if any.",
			"interface", "ip_family", "snat_mode", "snat_source"),

		planned: counter(ours, "planned_services_total",
			"Planned Services, counted each time."),
		problems: counter(ours, "problems_total",
			"Failures to program the kernel. All are retried."),
		compareDuration: histogram(ours, "compare_duration_seconds",
			"Duration of reading the kernel for a comparison with the desired state, of all its parts or of those that are due."),
		driftRepaired: counter(ours, "drift_repaired_total",
			"Differences between the kernel and the desired state that were found and repaired."),
		virtualServers: gauge(ours, "virtual_servers", "Programmed IPVS virtual servers."),
		realServers:    gauge(ours, "real_servers", "Programmed IPVS real servers, including draining ones."),
		draining: gauge(ours, "draining_real_servers",
			"IPVS real servers with weight 0 that still have connections, or wait for their deletion."),
		cut: counter(ours, "drain_cut_connections_total",
			"Connections reset because their endpoint was removed and did not answer for --drain-deadline, or because its node became unreachable."),
		conflicts: gauge(ours, "conflicts", "IPVS virtual servers that more than one Service wants; one of these is served."),
		nodeRefused: gauge(ours, "node_refused",
			"1 while the kernel refuses some of the node's own state, such as rules, or cannot be read. The node is then not ready."),
		servicesRefused: gauge(ours, "services_refused",
			"Services with at least one change that the kernel refuses. All are retried."),
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

// Queued records the time of a change.
func (r *Recorder) Queued() { r.queuedAt.Set(now()) }

// Idle does nothing: the metrics record when work was queued and done.
func (r *Recorder) Idle() {}

// Passed records the duration and result of a sync.
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

// Failing records what the kernel refuses.
func (r *Recorder) Failing(node bool, services, _ int) {
	r.nodeRefused.Set(0)
	if node {
		r.nodeRefused.Set(1)
	}
	r.servicesRefused.Set(float64(services))
	r.failing.Store(node || services > 0)
}

// Compared records the duration and result of a comparison. It counts as a sync without
// failures, unless something is refused: kube-proxy syncs periodically, so alerts expect a
// recent time even if nothing changes.
func (r *Recorder) Compared(took time.Duration, differences int) {
	if !r.failing.Load() {
		r.passSucceededAt.Set(now())
	}
	r.compareDuration.Observe(took.Seconds())
	r.driftRepaired.Add(float64(differences))
}

// Serving is ignored: no metric shows it.
func (r *Recorder) Serving() {}

// Held records the size of the kernel's state.
func (r *Recorder) Held(virtualServers, realServers, draining int) {
	r.virtualServers.Set(float64(virtualServers))
	r.realServers.Set(float64(realServers))
	r.draining.Set(float64(draining))
}

// Cut counts connections that were reset at the drain deadline, or with an unreachable
// node.
func (r *Recorder) Cut(connections int) { r.cut.Add(float64(connections)) }

// Restored counts state that another program deleted and that was added again at once.
func (r *Recorder) Restored(count int) { r.driftRepaired.Add(float64(count)) }

// Conflicts records the number of virtual servers that several Services want.
func (r *Recorder) Conflicts(count int) { r.conflicts.Set(float64(count)) }

// Changes counts received changes, which are pending until the next sync ends.
func (r *Recorder) Changes(services, endpoints int) {
	r.serviceChanges.Add(float64(services))
	r.endpointChanges.Add(float64(endpoints))
	r.servicesPending.Add(float64(services))
	r.endpointsPending.Add(float64(endpoints))
}

// Planned records the duration of planning.
func (r *Recorder) Planned(took time.Duration) {
	r.stageDuration.WithLabelValues("plan").Observe(took.Seconds())
}

// Programmed records the programming latency of a change of endpoints.
func (r *Recorder) Programmed(latency time.Duration) { r.programming.Observe(latency.Seconds()) }

// NoLocalEndpoints records the number of Services without endpoints on this node.
func (r *Recorder) NoLocalEndpoints(internal, external int) {
	r.noLocal.WithLabelValues("internal").Set(float64(internal))
	r.noLocal.WithLabelValues("external").Set(float64(external))
}

// Interfaces replaces the recorded secondary interfaces.
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

// Wrote records the duration of writing one part of the kernel.
func (r *Recorder) Wrote(part string, took time.Duration, refused int) {
	r.stageDuration.WithLabelValues(part).Observe(took.Seconds())
	switch {
	case part == "conntrack":
		r.forgetDuration.Observe(took.Seconds())
	case part == "iptables" && refused > 0:
		r.restoreFailures.Inc()
	}
}

// Refused counts a refused change.
func (r *Recorder) Refused(part, operation string) {
	r.refused.WithLabelValues(part, operation).Inc()
}

// Forgot counts deleted conntrack entries.
func (r *Recorder) Forgot(flows int) { r.forgotten.Add(float64(flows)) }

// Node does nothing: no metric depends on the Node.
func (r *Recorder) Node(_, _, _ bool) {}

// Healthz counts a response of /healthz, also as a service level indicator.
func (r *Recorder) Healthz(ctx context.Context, code int) { answered(ctx, r.healthz, "healthz", code) }

// Livez counts a response of /livez, also as a service level indicator.
func (r *Recorder) Livez(ctx context.Context, code int) { answered(ctx, r.livez, "livez", code) }

func answered(ctx context.Context, counter *metrics.CounterVec, check string, code int) {
	counter.WithLabelValues(strconv.Itoa(code)).Inc()
	status := slis.Success
	if code != http.StatusOK {
		status = slis.Error
	}
	// The error is always nil.
	_ = slis.ObserveHealthcheck(ctx, "proxy", check, status)
}

// now returns the time in Prometheus' format.
func now() float64 { return float64(time.Now().UnixNano()) / float64(time.Second) }

func histogram(prefix, name, help string) *metrics.Histogram {
	return metrics.NewHistogram(&metrics.HistogramOpts{
		Subsystem: prefix, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
		Buckets: secondsBuckets(),
	})
}

// secondsBuckets are kube-proxy's: 1 ms to 16 s.
func secondsBuckets() []float64 { return metrics.ExponentialBuckets(0.001, 2, 15) }

// programmingBuckets are those of Kubernetes' service level objective: seconds up to a
// minute, then up to five minutes.
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
