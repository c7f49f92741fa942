// Package inspect lists the kernel state of Services with their names, and draws explanations of
// package trace.
package inspect

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Names maps addresses and ports to Services and pods.
type Names struct {
	services map[target]string
	models   []service.Service
	marks    map[ipvs.Key]target    // of virtual servers by fwmark
	pods     map[netip.AddrPort]Pod // with port 0: of the address
	complete bool
}

// Pod is the pod behind an endpoint.
type Pod struct {
	Name string // NAMESPACE/NAME, or "" if the endpoint is not a pod
	Node string
}

// target is what clients connect to. A node port has no address.
type target struct {
	protocol ip.Protocol
	addr     netip.Addr
	port     uint16
}

// Load reads all Services of a source. Without a source the names are empty. The result
// is never nil: with an error it contains the names that could be read.
func Load(ctx context.Context, from source.Loader) (*Names, error) {
	n := newNames()
	if from == nil {
		return n, nil
	}
	s := sink{Names: n, slices: map[types.NamespacedName][]*discoveryv1.EndpointSlice{}}
	err := from.Load(ctx, &s)
	for _, svc := range s.found {
		model, _ := service.Build(svc, s.slices[types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}])
		n.addService(&model)
	}
	return n, err
}

// Complete reports whether everything that the source has was read, except objects that are
// unusable.
func (n *Names) Complete() bool { return n.complete }

func newNames() *Names {
	return &Names{services: map[target]string{}, marks: map[ipvs.Key]target{}, pods: map[netip.AddrPort]Pod{}}
}

// sink collects names from a source. The running proxy reports unusable fields.
type sink struct {
	*Names
	found  []*corev1.Service
	slices map[types.NamespacedName][]*discoveryv1.EndpointSlice
}

func (s sink) DeleteService(types.NamespacedName)       {}
func (s sink) DeleteEndpointSlice(types.NamespacedName) {}
func (s sink) SetNode(*corev1.Node)                     {}
func (s sink) DeleteNode()                              {}
func (s sink) SetUnreachableNodes([]string)             {}
func (s sink) Begun()                                   {}
func (s sink) Synced()                                  { s.complete = true }

func (s *sink) SetService(svc *corev1.Service) { s.found = append(s.found, svc) }

func (s *sink) SetEndpointSlice(slice *discoveryv1.EndpointSlice) {
	if svc, ok := service.ServiceOf(slice); ok {
		s.slices[svc] = append(s.slices[svc], slice)
	}
	for _, e := range slice.Endpoints {
		pod := Pod{}
		if e.NodeName != nil {
			pod.Node = *e.NodeName
		}
		if ref := e.TargetRef; ref != nil && ref.Kind == "Pod" {
			pod.Name = ref.Namespace + "/" + ref.Name
		}
		for _, text := range e.Addresses {
			if a, err := netip.ParseAddr(text); err == nil {
				s.addPod(a, slice.Ports, pod)
			}
		}
	}
}

// addPod records the pod of an address and ports. Pods on the host network share the node's
// address: it stands for a pod only if that is the only one.
func (n *Names) addPod(a netip.Addr, ports []discoveryv1.EndpointPort, pod Pod) {
	for _, p := range ports {
		if p.Port != nil {
			n.pods[netip.AddrPortFrom(a, uint16(*p.Port))] = pod
		}
	}
	alone := netip.AddrPortFrom(a, 0)
	if other, ok := n.pods[alone]; ok && other.Name != pod.Name {
		pod.Name = ""
	}
	n.pods[alone] = pod
}

// podAt returns the pod behind an endpoint.
func (n *Names) podAt(endpoint netip.AddrPort) Pod {
	if pod, ok := n.pods[endpoint]; ok {
		return pod
	}
	return n.pods[netip.AddrPortFrom(endpoint.Addr(), 0)]
}

func (n *Names) addService(s *service.Service) {
	n.models = append(n.models, *s)
	var addresses []netip.Addr
	addresses = append(addresses, s.ClusterIPs...)
	addresses = append(addresses, s.ExternalIPs...)
	addresses = append(addresses, s.LoadBalancers...)
	for _, p := range s.Ports {
		name := s.Name.String()
		if p.Name != "" {
			name += ":" + p.Name
		}
		for _, a := range addresses {
			n.services[target{p.Protocol, a, p.Port}] = name
		}
		if p.NodePort != 0 {
			n.services[target{p.Protocol, netip.Addr{}, p.NodePort}] = name
		}
	}
}

// Marks reads the fwmarks of virtual servers from the sets.
func (n *Names) Marks(sets ipset.State) {
	for _, family := range ip.Families {
		for e, mark := range sets[plan.Local.In(family)].Entries {
			key := ipvs.Key{FWMark: mark, Addr: family.Unspecified()}
			n.marks[key] = target{e.Protocol, e.Addr, e.Port}
		}
	}
}

// Service returns the Service and port of a virtual server, or "".
func (n *Names) Service(key ipvs.Key) string {
	t := target{key.Protocol, key.Addr, key.Port}
	if key.FWMark != 0 {
		t = n.marks[key]
	}
	return n.at(t)
}

func (n *Names) at(t target) string {
	if name, ok := n.services[t]; ok {
		return name
	}
	return n.services[target{t.protocol, netip.Addr{}, t.port}]
}

// Label adds names to an explanation: of the Service, and of the pods behind its real
// servers. A node port belongs to a Service only if the address is the node's.
func (n *Names) Label(x *trace.Explanation, q trace.Question, node *trace.Node) {
	for i := range x.RealServers {
		b := &x.RealServers[i]
		if at, err := netip.ParseAddrPort(b.RealServer); err == nil {
			pod := n.podAt(at)
			b.Pod, b.Host = pod.Name, pod.Node
		}
	}
	if x.Verdict.Outcome == trace.Unserved {
		return
	}
	asked := target{q.Protocol, q.To.Addr(), q.To.Port()}
	x.Service = n.services[asked]
	if x.Service == "" && node.Local(asked.addr) {
		x.Service = n.at(asked)
	}
}

// Entry returns the Service of a set member, or "".
func (n *Names) Entry(e ipset.Entry) string {
	if e.Protocol == 0 {
		return ""
	}
	return n.at(target{e.Protocol, e.Addr, e.Port})
}

// Address returns what a virtual server serves: an address and port, or a fwmark with
// the address and port.
func (n *Names) Address(key ipvs.Key) string {
	if key.FWMark == 0 {
		return netip.AddrPortFrom(key.Addr, key.Port).String()
	}
	if t, ok := n.marks[key]; ok {
		return fmt.Sprintf("%s (mark %#x)", netip.AddrPortFrom(t.addr, t.port), key.FWMark)
	}
	return fmt.Sprintf("mark %#x", key.FWMark)
}

func (n *Names) protocol(key ipvs.Key) string {
	if key.FWMark == 0 {
		return key.Protocol.String()
	}
	return n.marks[key].protocol.String()
}
