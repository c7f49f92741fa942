package health

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// HealthChecks serves the Services' health check node ports: 200 where the
// Service has endpoints ready on this node and the proxy is healthy, else 503.
// Set and Delete may be called from anywhere and return at once.
type HealthChecks struct {
	context   context.Context // until Close
	cancel    context.CancelFunc
	addresses []netip.Addr
	healthy   func() bool
	listen    listenFunc
	serving   sync.WaitGroup

	mu     sync.Mutex
	checks map[types.NamespacedName]plan.HealthCheck
	ports  map[uint16]*port
}

// port is one that is served, or that was until a moment ago.
type port struct {
	claims []types.NamespacedName // who wants it; it answers for the first
	close  context.CancelFunc
	closed chan struct{} // when it is free again
}

// NewHealthChecks serves on the addresses given, or on all if there are none,
// until the context ends or Close is called. The function tells whether the
// proxy is healthy, as Server.Healthy does.
func NewHealthChecks(ctx context.Context, addresses []netip.Addr, healthy func() bool) *HealthChecks {
	if len(addresses) == 0 {
		// To Go this is every address of both families, where there are two.
		addresses = []netip.Addr{netip.IPv4Unspecified()}
	}
	ctx, cancel := context.WithCancel(ctx)
	return &HealthChecks{
		context: ctx, cancel: cancel,
		addresses: addresses, healthy: healthy, listen: net.Listen,
		checks: map[types.NamespacedName]plan.HealthCheck{},
		ports:  map[uint16]*port{},
	}
}

// Set has a Service's port served, instead of the port that it had before. A
// port that cannot be had is reported once and tried until it can. Of two
// Services with one port, the first to come keeps it while it wants it.
func (h *HealthChecks) Set(name types.NamespacedName, check plan.HealthCheck) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.checks[name].Port
	h.checks[name] = check
	if check.Port != before {
		h.release(before, name)
		h.claim(check.Port, name)
	}
}

// Delete has a Service's port served no longer, if it had one.
func (h *HealthChecks) Delete(name types.NamespacedName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.release(h.checks[name].Port, name)
	delete(h.checks, name)
}

// Close ends all, and returns when all ports are free again.
func (h *HealthChecks) Close() {
	h.mu.Lock()
	h.cancel()
	h.mu.Unlock()
	h.serving.Wait()
}

// claim is called under the lock, as are release and open.
func (h *HealthChecks) claim(number uint16, name types.NamespacedName) {
	if number == 0 || h.context.Err() != nil {
		return
	}
	p := h.ports[number]
	if p == nil || len(p.claims) == 0 {
		p = h.open(number, p)
	}
	p.claims = append(p.claims, name)
	if len(p.claims) > 1 {
		klog.FromContext(h.context).Info("Two Services claim one health check node port, the first one has it",
			"port", number, "service", name, "winner", p.claims[0])
	}
}

func (h *HealthChecks) release(number uint16, name types.NamespacedName) {
	p := h.ports[number]
	if p == nil {
		return
	}
	p.claims = slices.DeleteFunc(p.claims, func(n types.NamespacedName) bool { return n == name })
	if len(p.claims) == 0 {
		p.close()
	}
}

// open serves a port as soon as whoever had it before has left it.
func (h *HealthChecks) open(number uint16, before *port) *port {
	ctx, cancel := context.WithCancel(h.context)
	p := &port{close: cancel, closed: make(chan struct{})}
	h.ports[number] = p
	h.serving.Go(func() {
		defer h.forget(number, p)
		if before != nil {
			<-before.closed
		}
		h.serve(ctx, number)
	})
	return p
}

// forget drops a port that is served no longer, unless it was claimed anew.
func (h *HealthChecks) forget(number uint16, p *port) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p.close()
	close(p.closed)
	if h.ports[number] == p {
		delete(h.ports, number)
	}
}

// serve serves a port on every address until the context ends.
func (h *HealthChecks) serve(ctx context.Context, number uint16) {
	var sites sync.WaitGroup
	for _, a := range h.addresses {
		s := site{
			address: netip.AddrPortFrom(a, number).String(),
			handler: h.handler(number),
			listen:  h.listen,
		}
		s.report = func(err error) { h.report(number, s.address, err) }
		sites.Go(func() { _ = s.run(ctx) }) // an error comes only from hardFail
	}
	sites.Wait()
}

func (h *HealthChecks) report(number uint16, address string, err error) {
	name, _ := h.look(number)
	logger := klog.FromContext(h.context).WithValues("service", name, "address", address)
	if err != nil {
		logger.Error(err, "Cannot serve the health check node port of a Service, trying again")
		return
	}
	logger.Info("Serving the health check node port after all")
}

// look tells for whom a port answers, and how many endpoints are ready here;
// nobody and none while it is being closed.
func (h *HealthChecks) look(number uint16) (name types.NamespacedName, local int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.ports[number]
	if p == nil || len(p.claims) == 0 {
		return name, 0
	}
	return p.claims[0], h.checks[p.claims[0]].Local
}

// The body of an answer, which has the shape of kube-proxy's.
type (
	checkBody struct {
		Service             serviceBody `json:"service"`
		LocalEndpoints      int         `json:"localEndpoints"`
		ServiceProxyHealthy bool        `json:"serviceProxyHealthy"`
	}
	serviceBody struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	}
)

// weightHeader lets a load balancer share connections out by the number of
// endpoints, rather than evenly among nodes.
const weightHeader = "X-Load-Balancing-Endpoint-Weight"

func (h *HealthChecks) handler(number uint16) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		name, local := h.look(number)
		healthy := h.healthy()
		w.Header().Set(weightHeader, strconv.Itoa(local))
		answerJSON(w, status(local > 0 && healthy), checkBody{
			Service:             serviceBody{name.Namespace, name.Name},
			LocalEndpoints:      local,
			ServiceProxyHealthy: healthy,
		})
	}
}
