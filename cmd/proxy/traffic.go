package main

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/metrics"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// serviceNames maps virtual servers to their Services for --service-metrics. It sits
// between the source and the proxy.
type serviceNames struct {
	source.Source
	sets func() (ipset.State, error) // the sets of service proxies

	mu    sync.Mutex
	ports map[types.NamespacedName][]address
	names map[address][]metrics.ServiceName // that want the address; the first one counts
}

// address is where a Service is reached. A node port has no IP address.
type address struct {
	protocol ip.Protocol
	addr     netip.Addr
	port     uint16
}

func newServiceNames(of source.Source) *serviceNames {
	return &serviceNames{Source: of, sets: trace.Sets, ports: map[types.NamespacedName][]address{}, names: map[address][]metrics.ServiceName{}}
}

// Run forwards what the source delivers.
func (n *serviceNames) Run(ctx context.Context, sink source.Sink) error {
	return n.Source.Run(ctx, namingSink{sink, n})
}

type namingSink struct {
	source.Sink
	of *serviceNames
}

func (s namingSink) SetService(svc *corev1.Service) {
	model, _ := service.Build(svc, nil) // the proxy reports unusable fields
	s.of.set(&model)
	s.Sink.SetService(svc)
}

func (s namingSink) DeleteService(name types.NamespacedName) {
	s.of.mu.Lock()
	s.of.forget(name)
	s.of.mu.Unlock()
	s.Sink.DeleteService(name)
}

// set replaces the addresses of a Service. Those that it keeps stay its own, even if another
// Service wants them too.
func (n *serviceNames) set(s *service.Service) {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := n.ports[s.Name]
	delete(n.ports, s.Name)
	for _, p := range s.Ports {
		name := metrics.ServiceName{Namespace: s.Name.Namespace, Name: s.Name.Name, Port: p.Name, Protocol: p.Protocol.String()}
		for _, list := range [][]netip.Addr{s.ClusterIPs, s.ExternalIPs, s.LoadBalancers} {
			for _, a := range list {
				n.want(s.Name, address{p.Protocol, a, p.Port}, name)
			}
		}
		if p.NodePort != 0 {
			n.want(s.Name, address{p.Protocol, netip.Addr{}, p.NodePort}, name)
		}
	}
	for _, a := range before {
		if !slices.Contains(n.ports[s.Name], a) {
			n.release(s.Name, a)
		}
	}
}

func (n *serviceNames) want(of types.NamespacedName, a address, name metrics.ServiceName) {
	wanting := n.names[a]
	if i := slices.IndexFunc(wanting, isOf(of)); i >= 0 {
		wanting[i] = name
	} else {
		n.names[a] = append(wanting, name)
	}
	if !slices.Contains(n.ports[of], a) {
		n.ports[of] = append(n.ports[of], a)
	}
}

// release removes a Service from an address. The next Service that wants the address gets it.
func (n *serviceNames) release(of types.NamespacedName, a address) {
	n.names[a] = slices.DeleteFunc(n.names[a], isOf(of))
	if len(n.names[a]) == 0 {
		delete(n.names, a)
	}
}

func isOf(name types.NamespacedName) func(metrics.ServiceName) bool {
	return func(s metrics.ServiceName) bool { return s.Namespace == name.Namespace && s.Name == name.Name }
}

func (n *serviceNames) forget(name types.NamespacedName) {
	for _, a := range n.ports[name] {
		n.release(name, a)
	}
	delete(n.ports, name)
}

// find returns the Services of virtual servers. Those with a mark belong to an address
// and port that a set lists with it.
func (n *serviceNames) find(keys []ipvs.Key) (map[ipvs.Key]metrics.ServiceName, error) {
	var marks map[ipvs.Key]address
	if slices.ContainsFunc(keys, func(key ipvs.Key) bool { return key.FWMark != 0 }) {
		var err error
		if marks, err = n.marked(); err != nil {
			return nil, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make(map[ipvs.Key]metrics.ServiceName, len(keys))
	for _, key := range keys {
		at := address{key.Protocol, key.Addr, key.Port}
		if key.FWMark != 0 {
			at = marks[key]
		}
		wanting := n.names[at]
		if len(wanting) == 0 {
			wanting = n.names[address{at.protocol, netip.Addr{}, at.port}]
		}
		if len(wanting) > 0 {
			out[key] = wanting[0]
		}
	}
	return out, nil
}

func (n *serviceNames) marked() (map[ipvs.Key]address, error) {
	out := map[ipvs.Key]address{}
	sets, err := n.sets()
	if err != nil {
		return nil, err
	}
	for _, family := range ip.Families {
		for e, mark := range sets[plan.Local.In(family)].Entries {
			out[ipvs.Key{FWMark: mark, Addr: family.Unspecified()}] = address{e.Protocol, e.Addr, e.Port}
		}
	}
	return out, nil
}
