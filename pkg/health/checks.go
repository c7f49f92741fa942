package health

import (
	"context"
	"fmt"
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

// HealthChecks serves the health check node ports of Services: 200 if the Service has
// ready endpoints on this node and the proxy is healthy, else 503. Set and Delete may be
// called concurrently, and do not wait for the network.
type HealthChecks struct {
	context context.Context // until Close
	cancel  context.CancelFunc
	healthy func() bool
	refused func(types.NamespacedName, string, error)
	listen  listenFunc
	serving sync.WaitGroup

	mu     sync.Mutex
	checks map[types.NamespacedName]plan.HealthCheck
	ports  map[uint16]*port
}

// port is a port that is served, or is being closed.
type port struct {
	owners    []types.NamespacedName // Services that want it; it answers for the first
	addresses []netip.Addr
	close     context.CancelFunc
	closed    chan struct{} // closed when the port is free again
}

// NewHealthChecks serves until the context ends or Close is called. healthy reports whether
// the proxy is healthy, as Server.Healthy does. refused is called once for each address and
// port of a Service that cannot be bound, with the error of the first attempt, and for a port
// that another Service has; it may be called concurrently.
func NewHealthChecks(ctx context.Context, healthy func() bool, refused func(name types.NamespacedName, address string, err error)) *HealthChecks {
	ctx, cancel := context.WithCancel(ctx)
	return &HealthChecks{
		context: ctx, cancel: cancel,
		healthy: healthy, refused: refused, listen: net.Listen,
		checks: map[types.NamespacedName]plan.HealthCheck{},
		ports:  map[uint16]*port{},
	}
}

// Set serves a Service's port, instead of its previous port and addresses. A port that cannot
// be bound is reported once and retried. If two Services have the same port, it answers for the
// first one until that releases it.
func (h *HealthChecks) Set(name types.NamespacedName, check plan.HealthCheck) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.checks[name]
	h.checks[name] = check
	if check.Port != before.Port {
		h.release(before.Port, name)
		h.acquire(check.Port, name)
	}
	h.follow(check.Port)
}

// Delete stops serving a Service's port, if it has one.
func (h *HealthChecks) Delete(name types.NamespacedName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.release(h.checks[name].Port, name)
	delete(h.checks, name)
}

// Close stops everything and returns when all ports are free.
func (h *HealthChecks) Close() {
	h.mu.Lock()
	h.cancel()
	h.mu.Unlock()
	h.serving.Wait()
}

// acquire adds a Service to a port's owners. It is called under the lock, as are release, follow
// and open.
func (h *HealthChecks) acquire(number uint16, name types.NamespacedName) {
	if number == 0 || h.context.Err() != nil {
		return
	}
	p := h.ports[number]
	if p == nil || len(p.owners) == 0 {
		p = h.open(number, listenAddresses(h.checks[name]), p)
	}
	p.owners = append(p.owners, name)
	if winner := p.owners[0]; winner != name {
		klog.FromContext(h.context).Info("Two Services have the same health check node port, serving the first one",
			"port", number, "service", name, "winner", winner)
		h.serving.Go(func() {
			h.refused(name, ":"+strconv.Itoa(int(number)), fmt.Errorf("the Service %s has this healthCheckNodePort", winner))
		})
	}
}

func (h *HealthChecks) release(number uint16, name types.NamespacedName) {
	p := h.ports[number]
	if p == nil {
		return
	}
	p.owners = slices.DeleteFunc(p.owners, func(n types.NamespacedName) bool { return n == name })
	if len(p.owners) == 0 {
		p.close()
	}
	h.follow(number)
}

// follow serves a port on the addresses of the Service that it answers for, if it is served on
// others.
func (h *HealthChecks) follow(number uint16) {
	p := h.ports[number]
	if p == nil || len(p.owners) == 0 || h.context.Err() != nil {
		return
	}
	if want := listenAddresses(h.checks[p.owners[0]]); !slices.Equal(p.addresses, want) {
		p.close()
		h.open(number, want, p).owners = p.owners
	}
}

// listenAddresses returns the addresses that serve a check.
func listenAddresses(check plan.HealthCheck) []netip.Addr {
	if check.Restricted {
		return check.Addresses
	}
	// Go listens on both families on this address.
	return []netip.Addr{netip.IPv4Unspecified()}
}

// open serves a port as soon as its previous listener is closed.
func (h *HealthChecks) open(number uint16, addresses []netip.Addr, before *port) *port {
	ctx, cancel := context.WithCancel(h.context)
	p := &port{addresses: addresses, close: cancel, closed: make(chan struct{})}
	h.ports[number] = p
	h.serving.Go(func() {
		defer h.forget(number, p)
		if before != nil {
			<-before.closed
		}
		h.serve(ctx, number, addresses)
	})
	return p
}

// forget drops a port that is no longer served, unless a Service has acquired it again.
func (h *HealthChecks) forget(number uint16, p *port) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p.close()
	close(p.closed)
	if h.ports[number] == p {
		delete(h.ports, number)
	}
}

// serve serves a port on every address, if there are any, until the context ends.
func (h *HealthChecks) serve(ctx context.Context, number uint16, addresses []netip.Addr) {
	var sites sync.WaitGroup
	for _, a := range addresses {
		s := site{
			address: netip.AddrPortFrom(a, number).String(),
			handler: h.handler(number),
			listen:  h.listen,
		}
		s.report = func(err error) { h.report(number, s.address, err) }
		sites.Go(func() { _ = s.run(ctx) }) // returns an error only with hardFail
	}
	sites.Wait()
	<-ctx.Done()
}

func (h *HealthChecks) report(number uint16, address string, err error) {
	name, _ := h.current(number)
	logger := klog.FromContext(h.context).WithValues("service", name, "address", address)
	if err != nil {
		logger.Error(err, "Cannot serve the health check node port of a Service, retrying")
		h.refused(name, address, err)
		return
	}
	logger.Info("Serving the health check node port")
}

// current returns the Service that a port answers for and its number of ready endpoints on
// this node, or zero values while the port is being closed.
func (h *HealthChecks) current(number uint16) (name types.NamespacedName, local int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.ports[number]
	if p == nil || len(p.owners) == 0 {
		return name, 0
	}
	return p.owners[0], h.checks[p.owners[0]].ReadyHere
}

// The response body has kube-proxy's format.
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

// weightHeader lets a load balancer distribute connections by the number of endpoints
// instead of evenly among nodes.
const weightHeader = "X-Load-Balancing-Endpoint-Weight"

func (h *HealthChecks) handler(number uint16) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		name, local := h.current(number)
		healthy := h.healthy()
		w.Header().Set(weightHeader, strconv.Itoa(local))
		answerJSON(w, status(local > 0 && healthy), checkBody{
			Service:             serviceBody{name.Namespace, name.Name},
			LocalEndpoints:      local,
			ServiceProxyHealthy: healthy,
		})
	}
}
