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

	planned         *metrics.Counter
	problems        *metrics.Counter
	compareDuration *metrics.Histogram
	driftRepaired   *metrics.Counter
	virtualServers  *metrics.Gauge
	realServers     *metrics.Gauge
	draining        *metrics.Gauge
	conflicts       *metrics.Gauge
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
			"How long it took to plan and program the Services that had changed."),
		passSucceededAt: gauge(theirs, "sync_proxy_rules_last_timestamp_seconds",
			"When all the changes at hand were last programmed without a failure."),
		queuedAt: gauge(theirs, "sync_proxy_rules_last_queued_timestamp_seconds",
			"When a change last came that had to be programmed."),
		healthz: counterByCode("proxy_healthz_total", "Answers of /healthz, by HTTP status."),
		livez:   counterByCode("proxy_livez_total", "Answers of /livez, by HTTP status."),

		planned: counter("planned_services_total",
			"Services planned, once for each time that one was planned again."),
		problems: counter("problems_total",
			"Failures to program something into the kernel, each of which is tried again."),
		compareDuration: histogram(ours, "compare_duration_seconds",
			"How long it took to read from the kernel all that was programmed."),
		driftRepaired: counter("drift_repaired_total",
			"Differences found between the kernel and the plan, which are repaired."),
		virtualServers: gauge(ours, "virtual_servers", "IPVS virtual servers programmed."),
		realServers:    gauge(ours, "real_servers", "IPVS real servers programmed, draining ones included."),
		draining: gauge(ours, "draining_real_servers",
			"IPVS real servers that take no new connections and wait for the end of those they have."),
		conflicts: gauge(ours, "conflicts", "IPVS virtual servers that a Service claims and an older Service has."),
	}
}

func (r *Recorder) all() []metrics.Registerable {
	return []metrics.Registerable{
		r.passDuration, r.passSucceededAt, r.queuedAt, r.healthz, r.livez,
		r.planned, r.problems, r.compareDuration, r.driftRepaired,
		r.virtualServers, r.realServers, r.draining, r.conflicts,
	}
}

// Queued notes the time of a change.
func (r *Recorder) Queued() { r.queuedAt.Set(now()) }

// Passed notes what a pass took and came to.
func (r *Recorder) Passed(took time.Duration, services, problems int) {
	r.passDuration.Observe(took.Seconds())
	r.planned.Add(float64(services))
	r.problems.Add(float64(problems))
	if problems == 0 {
		r.passSucceededAt.Set(now())
	}
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

// Conflicts notes how much is claimed in vain.
func (r *Recorder) Conflicts(count int) { r.conflicts.Set(float64(count)) }

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
		// As kube-proxy's: 1 ms to 16 s.
		Buckets: metrics.ExponentialBuckets(0.001, 2, 15),
	})
}

func gauge(prefix, name, help string) *metrics.Gauge {
	return metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem: prefix, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
	})
}

func counter(name, help string) *metrics.Counter {
	return metrics.NewCounter(&metrics.CounterOpts{
		Subsystem: ours, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
	})
}

func counterByCode(name, help string) *metrics.CounterVec {
	return metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem: theirs, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
	}, []string{"code"})
}
