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
)

// Counter is told of every answer. Package metrics has it.
type Counter interface {
	Healthz(ctx context.Context, code int)
	Livez(ctx context.Context, code int)
}

// Server answers /healthz, /livez, /readyz and /status. It learns how the proxy
// fares as its Observer.
//
//   - /livez: whether the proxy keeps up with what there is to program. Until the
//     server is told anything, nothing is wrong.
//   - /healthz: also whether load balancers should use the node: not before the first
//     sync, and not while the Node is being deleted.
//   - /readyz: also whether the kernel has accepted what was programmed. A rollout
//     stops at a node that is not ready.
type Server struct {
	late    time.Duration
	counter Counter
	listen  listenFunc

	mu         sync.Mutex
	queued     time.Time // since when there is work; zero: there is none
	passed     time.Time
	ineligible bool
	report     Report
}

// NewServer makes a server that takes work for stuck that has waited longer
// than two sync periods.
func NewServer(syncPeriod time.Duration, counter Counter) *Server {
	return &Server{late: 2 * syncPeriod, counter: counter, listen: net.Listen}
}

// Run serves at an address until the context ends; with the zero address it
// returns at once. An address that cannot be had is reported once and tried
// until it can, or is an error with hardFail.
func (s *Server) Run(ctx context.Context, address netip.AddrPort, hardFail bool) error {
	return runAt(ctx, s.listen, address, hardFail, "healthz", s.Handler())
}

// RunProbes is Run for ProbeHandler. A port that is taken is never an error.
func (s *Server) RunProbes(ctx context.Context, address netip.AddrPort) error {
	return runAt(ctx, s.listen, address, false, "probes", s.ProbeHandler())
}

// runAt serves the named handler at an address until the context ends; with
// the zero address there is nothing to serve.
func runAt(ctx context.Context, listen listenFunc, address netip.AddrPort, hardFail bool, name string, handler http.Handler) error {
	if !address.IsValid() {
		return nil
	}
	logger := klog.FromContext(ctx).WithValues("server", name, "address", address)
	s := site{
		address: address.String(), handler: handler, listen: listen, hardFail: hardFail,
		report: func(err error) {
			if err != nil {
				logger.Error(err, "Cannot serve HTTP, trying again")
			} else {
				logger.Info("Serving HTTP after all")
			}
		},
	}
	if err := s.run(ctx); err != nil {
		return fmt.Errorf("cannot serve %s on %s: %w", name, address, err)
	}
	return nil
}

// Queued notes since when there is work.
func (s *Server) Queued() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queued.IsZero() {
		s.queued = time.Now()
	}
}

// Passed notes the end of a sync. One with problems counts too: they are retried,
// and one Service that cannot be programmed must not take the node from all others.
func (s *Server) Passed(took time.Duration, _, _ int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queued, s.passed = time.Time{}, time.Now()
	s.report.Syncs++
	s.report.SyncSeconds = took.Seconds()
}

// Node notes whether load balancers should use the node: it exists and is not
// about to go.
func (s *Server) Node(exists, deleting, excludedFromAutoscaling bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ineligible = !exists || deleting || excludedFromAutoscaling
}

// Failing notes what the kernel refuses, or could not be read, and is being retried:
// something of the node's part, and how many of all Services.
func (s *Server) Failing(node bool, services, all int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.NodeRefused, s.report.ServicesRefused, s.report.Services = node, services, all
}

// Compared notes a comparison with the kernel. Differences are repaired, and do not
// matter to health.
func (s *Server) Compared(_ time.Duration, differences int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.LastComparison = time.Now()
	s.report.LastDifferences = differences
	s.report.Differences += differences
}

// Held notes what the kernel holds.
func (s *Server) Held(virtualServers, realServers, draining int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.VirtualServers, s.report.RealServers, s.report.Draining = virtualServers, realServers, draining
}

// Conflicts notes virtual servers that more than one Service claims.
func (s *Server) Conflicts(count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.Conflicts = count
}

// Healthy tells whether the proxy keeps up, whatever the Node says.
func (s *Server) Healthy() bool {
	return s.look(time.Now()).healthy
}

// state is the server's at one time.
type state struct {
	now, passed       time.Time
	healthy, eligible bool
}

func (s *Server) look(now time.Time) state {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := !s.queued.IsZero() && now.Sub(s.queued) > s.late
	return state{now: now, passed: s.passed, healthy: !late, eligible: !s.ineligible}
}

// Handler serves /healthz, /livez and /readyz: the paths that kube-proxy has, for load
// balancers and everyone who asked kube-proxy before.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", s.healthz)
	mux.HandleFunc("/livez", s.livez)
	mux.HandleFunc("/readyz", s.readyz)
	return mux
}

// The bodies of the answers, which have the shape of kube-proxy's.
type (
	livezBody struct {
		LastUpdated time.Time `json:"lastUpdated"`
		CurrentTime time.Time `json:"currentTime"`
	}
	healthzBody struct {
		livezBody
		NodeEligible bool `json:"nodeEligible"`
	}
)

// times are those of an answer. To kube-proxy, who is well is up to date.
func (s state) times(code int) livezBody {
	if code == http.StatusOK {
		return livezBody{LastUpdated: s.now, CurrentTime: s.now}
	}
	return livezBody{LastUpdated: s.passed, CurrentTime: s.now}
}

func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	st := s.look(time.Now())
	// A node that has not programmed anything yet is no place to send traffic
	// to, though nothing is wrong with it.
	code := status(st.healthy && st.eligible && !st.passed.IsZero())
	s.counter.Healthz(r.Context(), code)
	answerJSON(w, code, healthzBody{st.times(code), st.eligible})
}

func (s *Server) livez(w http.ResponseWriter, r *http.Request) {
	st := s.look(time.Now())
	code := status(st.healthy)
	s.counter.Livez(r.Context(), code)
	answerJSON(w, code, st.times(code))
}
