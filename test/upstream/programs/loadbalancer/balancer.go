package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
)

// balancer is a Service's: a route for each of its addresses, to the nodes that are
// healthy.
type balancer struct {
	cancel  context.CancelFunc
	changed chan struct{}
	ended   chan struct{}

	mu     sync.Mutex
	routes []*route
	nodes  []*v1.Node
	// port and path are where nodes say whether they want the Service's packets.
	port   int
	path   string
	sticky bool
}

// route leads to an address by way of nodes.
type route struct {
	family          v1.IPFamily
	address, source netip.Addr
	via             []netip.Addr
}

// A node that says no gets no more packets after a second. One that says nothing is
// given longer: emulated, it may be busy.
const (
	checkEvery = time.Second
	patience   = 10 * time.Second
)

func startBalancer(ctx context.Context) *balancer {
	ctx, cancel := context.WithCancel(ctx)
	b := &balancer{cancel: cancel, changed: make(chan struct{}, 1), ended: make(chan struct{})}
	go b.follow(ctx)
	return b
}

// follow keeps the routes as the health of the nodes is.
func (b *balancer) follow(ctx context.Context) {
	defer close(b.ended)
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		if err := b.check(ctx); err != nil && ctx.Err() == nil {
			log.Print(err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-b.changed:
		}
	}
}

// stop ends it, and its routes.
func (b *balancer) stop() error {
	b.cancel()
	<-b.ended
	var errs []error
	for _, r := range b.routes {
		errs = append(errs, r.lead(nil))
	}
	return errors.Join(errs...)
}

// nodeHealthPort is where kube-proxy, by default, tells a balancer whether it serves
// a node's Services of policy Cluster (KEP-3836).
const nodeHealthPort = 10256

func (b *balancer) set(service *v1.Service, nodes []*v1.Node) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.nodes, b.port, b.path = nodes, nodeHealthPort, "/healthz"
	if port := service.Spec.HealthCheckNodePort; port != 0 {
		b.port, b.path = int(port), "/"
	}
	b.sticky = service.Spec.SessionAffinity == v1.ServiceAffinityClientIP
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

func (b *balancer) add(name v1.IPFamily, address, source netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.routes = append(b.routes, &route{family: name, address: address, source: source})
}

func (b *balancer) has(name v1.IPFamily) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.routes, func(r *route) bool { return r.family == name })
}

func (b *balancer) status() *v1.LoadBalancerStatus {
	b.mu.Lock()
	defer b.mu.Unlock()
	status := &v1.LoadBalancerStatus{}
	for _, r := range b.routes {
		status.Ingress = append(status.Ingress, ingress(r.address))
	}
	return status
}

// check asks all nodes, and leads the routes to those that are healthy. The routes
// themselves are of this goroutine only.
func (b *balancer) check(ctx context.Context) error {
	b.mu.Lock()
	nodes, routes, port, path, sticky := b.nodes, slices.Clone(b.routes), b.port, b.path, b.sticky
	b.mu.Unlock()
	healthy := healthyOf(ctx, nodes, port, path)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var errs []error
	for _, r := range routes {
		via := addresses(healthy, r.family)
		if sticky {
			via = same(r.via, via)
		}
		errs = append(errs, r.lead(via))
	}
	return errors.Join(errs...)
}

// same is the one node that all packets of a sticky Service go to: that of before, as
// long as it is there. All clients have one address here, so that no more than one
// node is ever chosen by it.
func same(before, now []netip.Addr) []netip.Addr {
	for _, address := range now {
		if slices.Contains(before, address) {
			return []netip.Addr{address}
		}
	}
	return now[:min(1, len(now))]
}

// checkClient asks anew each time, as balancers do.
var checkClient = &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}

// healthyOf are the nodes that answer 200, in the order of their names.
func healthyOf(ctx context.Context, nodes []*v1.Node, port int, path string) (healthy []*v1.Node) {
	answers := make([]bool, len(nodes))
	var asked sync.WaitGroup
	for i, node := range nodes {
		asked.Go(func() { answers[i] = isHealthy(ctx, node, port, path) })
	}
	asked.Wait()
	for i, node := range nodes {
		if answers[i] {
			healthy = append(healthy, node)
		}
	}
	slices.SortFunc(healthy, func(a, b *v1.Node) int { return strings.Compare(a.Name, b.Name) })
	return healthy
}

func isHealthy(ctx context.Context, node *v1.Node, port int, path string) bool {
	all := append(addresses([]*v1.Node{node}, v1.IPv4Protocol), addresses([]*v1.Node{node}, v1.IPv6Protocol)...)
	if len(all) == 0 {
		return false
	}
	url := "http://" + net.JoinHostPort(all[0].String(), strconv.Itoa(port)) + path
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	answer, err := checkClient.Do(request)
	if err != nil {
		return false
	}
	defer answer.Body.Close()
	return answer.StatusCode == http.StatusOK
}

// addresses are the nodes' InternalIPs of a family, one of each node.
func addresses(nodes []*v1.Node, name v1.IPFamily) (list []netip.Addr) {
	for _, node := range nodes {
		for _, a := range node.Status.Addresses {
			address, err := netip.ParseAddr(a.Address)
			if err == nil && a.Type == v1.NodeInternalIP && address.Is4() == (name == v1.IPv4Protocol) {
				list = append(list, address)
				break
			}
		}
	}
	return list
}

// lead has the kernel send packets for the address by way of nodes. With none there is
// no route but that of the whole range, which drops them.
func (r *route) lead(via []netip.Addr) error {
	if slices.Equal(via, r.via) {
		return nil
	}
	args := []string{"route", "del", r.address.String()}
	if len(via) > 0 {
		args = []string{"route", "replace", r.address.String(), "src", r.source.String()}
		for _, node := range via {
			args = append(args, "nexthop", "via", node.String())
		}
	}
	if r.family == v1.IPv6Protocol {
		args = append([]string{"-6"}, args...)
	}
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %v: %w: %s", args, err, out)
	}
	log.Printf("%s by way of %v", r.address, via)
	r.via = via
	return nil
}
