package main

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/utils/ptr"
)

// family is what there is of IPv4, or of IPv6.
type family struct {
	prefix netip.Prefix
	// source is the address that clients have here: none of the nodes' network, so that
	// it can be told from theirs.
	source netip.Addr
	// last is the address that was given last. The next one is another, lest a Service
	// that is gone be taken for a new one.
	last netip.Addr
}

func (f *family) name() v1.IPFamily {
	if f.prefix.Addr().Is4() {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}

// cloud has nothing but load balancers, and the controller asks for nothing else.
type cloud struct {
	cloudprovider.Interface
	ctx context.Context

	mu        sync.Mutex
	families  []*family
	balancers map[types.UID]*balancer
}

func newCloud(ctx context.Context, families []*family) *cloud {
	return &cloud{ctx: ctx, families: families, balancers: map[types.UID]*balancer{}}
}

func (c *cloud) Initialize(cloudprovider.ControllerClientBuilder, <-chan struct{}) {}
func (c *cloud) ProviderName() string                                              { return "lab" }
func (c *cloud) HasClusterID() bool                                                { return true }
func (c *cloud) LoadBalancer() (cloudprovider.LoadBalancer, bool)                  { return c, true }

func (c *cloud) GetLoadBalancerName(_ context.Context, _ string, service *v1.Service) string {
	return string(service.UID)
}

func (c *cloud) GetLoadBalancer(_ context.Context, _ string, service *v1.Service) (*v1.LoadBalancerStatus, bool, error) {
	b := c.balancer(service.UID)
	if b == nil {
		return nil, false, nil
	}
	return b.status(), true, nil
}

func (c *cloud) EnsureLoadBalancer(_ context.Context, _ string, service *v1.Service, nodes []*v1.Node) (*v1.LoadBalancerStatus, error) {
	b, err := c.ensure(service)
	if err != nil {
		return nil, err
	}
	b.set(service, nodes)
	return b.status(), nil
}

func (c *cloud) UpdateLoadBalancer(_ context.Context, _ string, service *v1.Service, nodes []*v1.Node) error {
	b := c.balancer(service.UID)
	if b == nil {
		return fmt.Errorf("%s/%s has no load balancer", service.Namespace, service.Name)
	}
	b.set(service, nodes)
	return nil
}

func (c *cloud) EnsureLoadBalancerDeleted(_ context.Context, _ string, service *v1.Service) error {
	b := c.balancer(service.UID)
	if b == nil {
		return nil
	}
	if err := b.stop(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.balancers, service.UID)
	return nil
}

func (c *cloud) balancer(uid types.UID) *balancer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.balancers[uid]
}

// ensure is the Service's balancer, with an address of each of its families.
func (c *cloud) ensure(service *v1.Service) (*balancer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.balancers[service.UID]
	if b == nil {
		b = startBalancer(c.ctx)
		c.balancers[service.UID] = b
	}
	for _, name := range service.Spec.IPFamilies {
		if b.has(name) {
			continue
		}
		address, source, err := c.nextAddress(name)
		if err != nil {
			return nil, fmt.Errorf("%s/%s: %w", service.Namespace, service.Name, err)
		}
		b.add(name, address, source)
	}
	return b, nil
}

// nextAddress is one that was never given.
func (c *cloud) nextAddress(name v1.IPFamily) (address, source netip.Addr, err error) {
	for _, f := range c.families {
		if f.name() != name {
			continue
		}
		if next := f.last.Next(); f.prefix.Contains(next) {
			f.last = next
			return next, f.source, nil
		}
		return address, source, fmt.Errorf("all addresses of %s were given", f.prefix)
	}
	return address, source, fmt.Errorf("no addresses of %s", name)
}

// ingress is what the status says of an address.
func ingress(address netip.Addr) v1.LoadBalancerIngress {
	return v1.LoadBalancerIngress{IP: address.String(), IPMode: ptr.To(v1.LoadBalancerIPModeVIP)}
}
