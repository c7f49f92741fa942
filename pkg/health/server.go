package health

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Counter counts responses. Package metrics implements it.
type Counter interface {
	Healthz(ctx context.Context, code int)
	Livez(ctx context.Context, code int)
}

// Server answers /healthz, /livez, /readyz and /status. As the proxy's Observer, it
// receives the results of syncs and comparisons.
//
//   - /livez: whether the proxy keeps up with pending work. Without pending work it
//     succeeds.
//   - /healthz: also whether load balancers should use the node: not before the first
//     sync, unless the kernel serves what an earlier process programmed, and not while
//     the Node is being deleted.
//   - /readyz: also whether the kernel has accepted what was programmed. A rollout
//     stops at a node that is not ready.
type Server struct {
	late     time.Duration
	families []ip.Family
	counter  Counter
	listen   listenFunc

	mu         sync.Mutex
	queued     time.Time // since when work is pending; zero: none
	passed     time.Time
	serving    bool // a sync ended, or the kernel serves what an earlier process programmed
	ineligible bool
	report     Report
}

// NewServer creates a server that reports the proxy as stuck when work has been pending
// for more than two sync periods. The families are those that the proxy serves.
func NewServer(syncPeriod time.Duration, counter Counter, families ...ip.Family) *Server {
	return &Server{late: 2 * syncPeriod, families: families, counter: counter, listen: net.Listen}
}

// Run serves at an address until the context ends; with the zero address it returns at
// once. If the address cannot be bound it retries and reports that once, or returns an
// error with hardFail.
func (s *Server) Run(ctx context.Context, address netip.AddrPort, hardFail bool) error {
	return runAt(ctx, s.listen, address, hardFail, "healthz", s.Handler())
}

// RunProbes is like Run, for ProbeHandler. A port that is in use is never an error.
func (s *Server) RunProbes(ctx context.Context, address netip.AddrPort) error {
	return runAt(ctx, s.listen, address, false, "probes", s.ProbeHandler())
}

// runAt serves a handler at an address until the context ends. It returns at once for
// the zero address.
func runAt(ctx context.Context, listen listenFunc, address netip.AddrPort, hardFail bool, name string, handler http.Handler) error {
	if !address.IsValid() {
		return nil
	}
	logger := klog.FromContext(ctx).WithValues("server", name, "address", address)
	s := site{
		address: address.String(), handler: handler, listen: listen, hardFail: hardFail,
		report: func(err error) {
			if err != nil {
				logger.Error(err, "Cannot serve HTTP, retrying")
			} else {
				logger.Info("Serving HTTP")
			}
		},
	}
	if err := s.run(ctx); err != nil {
		return fmt.Errorf("cannot serve %s on %s: %w", name, address, err)
	}
	return nil
}

// Queued records since when work is pending.
func (s *Server) Queued() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queued.IsZero() {
		s.queued = time.Now()
	}
}

// Idle records that no work is pending any more, although there was no sync.
func (s *Server) Idle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queued = time.Time{}
}

// Serving records that the kernel serves what an earlier process programmed, before the first
// sync.
func (s *Server) Serving() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serving = true
}

// Passed records the end of a sync, even with problems: they are retried, and one
// Service that cannot be programmed must not make load balancers avoid the node.
func (s *Server) Passed(took time.Duration, _, _ int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queued, s.passed, s.serving = time.Time{}, time.Now(), true
	s.report.Syncs++
	s.report.SyncSeconds = took.Seconds()
}

// Node records whether load balancers should use the node: it exists and is not about
// to be removed.
func (s *Server) Node(exists, deleting, excludedFromAutoscaling bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ineligible = !exists || deleting || excludedFromAutoscaling
}

// Failing records state that the kernel refuses or that cannot be read, and that is being
// retried: whether the node's own state is affected, and how many of all Services.
func (s *Server) Failing(node bool, services, all int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.NodeRefused, s.report.ServicesRefused, s.report.Services = node, services, all
}

// Compared records a comparison with the kernel. Differences are repaired and do not
// affect health.
func (s *Server) Compared(_ time.Duration, differences int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.LastComparison = time.Now()
	s.report.LastDifferences = differences
	s.report.Differences += differences
}

// Held records the size of our state in the kernel.
func (s *Server) Held(virtualServers, realServers, draining int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.VirtualServers, s.report.RealServers, s.report.Draining = virtualServers, realServers, draining
}

// Conflicts records the number of virtual servers that several Services want.
func (s *Server) Conflicts(count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.Conflicts = count
}

// Healthy reports whether the proxy keeps up with changes, independent of the Node.
func (s *Server) Healthy() bool {
	return s.current(time.Now()).healthy
}

// state is a snapshot of the server's state.
type state struct {
	now, passed                time.Time
	healthy, eligible, serving bool
}

func (s *Server) current(now time.Time) state {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := !s.queued.IsZero() && now.Sub(s.queued) > s.late
	return state{now: now, passed: s.passed, healthy: !late, eligible: !s.ineligible, serving: s.serving}
}

// Handler serves /healthz, /livez and /readyz, the paths of kube-proxy, for load
// balancers and other clients.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", s.healthz)
	mux.HandleFunc("/livez", s.livez)
	mux.HandleFunc("/readyz", s.readyz)
	return mux
}

// The response bodies have kube-proxy's fields. One loop serves both families, so their status is the
// same.
type (
	livezBody struct {
		LastUpdated time.Time               `json:"lastUpdated"`
		CurrentTime time.Time               `json:"currentTime"`
		Healthy     bool                    `json:"healthy"`          // as /livez, even in /healthz
		Status      map[string]familyStatus `json:"status,omitempty"` // by family, after the first sync
	}
	familyStatus struct {
		LastUpdated time.Time `json:"lastUpdated"`
		Healthy     bool      `json:"healthy"`
	}
	healthzBody struct {
		livezBody
		NodeEligible bool `json:"nodeEligible"`
	}
)

// body returns what both responses have. As in kube-proxy, a healthy proxy counts as up to
// date.
func (s *Server) body(st *state, code int) livezBody {
	body := livezBody{LastUpdated: st.passed, CurrentTime: st.now, Healthy: st.healthy}
	if !st.passed.IsZero() {
		body.Status = map[string]familyStatus{}
		for _, family := range s.families {
			body.Status[family.String()] = familyStatus{st.passed, st.healthy}
		}
	}
	if code == http.StatusOK {
		body.LastUpdated = st.now
	}
	return body
}

func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	st := s.current(time.Now())
	// A node on which nothing has been programmed must get no traffic, even though it is
	// healthy. After a restart the kernel serves: kube-proxy is healthy while it starts.
	code := status(st.healthy && st.eligible && st.serving)
	s.counter.Healthz(r.Context(), code)
	answerJSON(w, code, healthzBody{s.body(&st, code), st.eligible})
}

func (s *Server) livez(w http.ResponseWriter, r *http.Request) {
	st := s.current(time.Now())
	code := status(st.healthy)
	s.counter.Livez(r.Context(), code)
	answerJSON(w, code, s.body(&st, code))
}
