package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Services returns all Services with their endpoints, sorted by name.
func (n *Names) Services() []service.Service {
	out := slices.Clone(n.models)
	slices.SortFunc(out, func(a, b service.Service) int { return cmp.Compare(a.Name.String(), b.Name.String()) })
	return out
}

// ServicePrefix marks a Service where an address is expected.
const ServicePrefix = "svc/"

// Resolve returns the cluster IP and port of a Service written as
// "svc/[NAMESPACE/]NAME[:PORT]". PORT is a number or a name, and required if the
// Service has several ports. The default namespace is default.
func (n *Names) Resolve(text string, family ip.Family) (netip.AddrPort, ip.Protocol, error) {
	name, port, _ := strings.Cut(strings.TrimPrefix(text, ServicePrefix), ":")
	if !strings.Contains(name, "/") {
		name = "default/" + name
	}
	i := slices.IndexFunc(n.models, func(s service.Service) bool { return s.Name.String() == name })
	if i < 0 {
		return netip.AddrPort{}, 0, fmt.Errorf("no Service %s with a cluster IP", name)
	}
	s := &n.models[i]
	at := slices.IndexFunc(s.ClusterIPs, func(a netip.Addr) bool { return ip.Of(a) == family })
	if at < 0 {
		return netip.AddrPort{}, 0, fmt.Errorf("Service %s has no %s cluster IP", name, family)
	}
	p, err := portOf(s, port)
	if err != nil {
		return netip.AddrPort{}, 0, fmt.Errorf("the Service %s %w", name, err)
	}
	return netip.AddrPortFrom(s.ClusterIPs[at], p.Port), p.Protocol, nil
}

func portOf(s *service.Service, wanted string) (service.Port, error) {
	var have []string
	for _, p := range s.Ports {
		if wanted != "" && (p.Name == wanted || strconv.Itoa(int(p.Port)) == wanted) {
			return p, nil
		}
		have = append(have, strings.TrimPrefix(fmt.Sprintf("%s:%d/%s", p.Name, p.Port, p.Protocol), ":"))
	}
	switch {
	case len(have) == 0:
		return service.Port{}, errors.New("has no port")
	case wanted != "":
		return service.Port{}, fmt.Errorf("has no port %s, but %s", wanted, strings.Join(have, ", "))
	case len(have) > 1:
		return service.Port{}, fmt.Errorf("has more than one port: name one of %s", strings.Join(have, ", "))
	}
	return s.Ports[0], nil
}

// PodAddress returns the address of a pod, written as NAMESPACE/NAME, that is an
// endpoint of a Service. Other pods are unknown.
func (n *Names) PodAddress(name string, family ip.Family) (netip.Addr, bool) {
	var found []netip.Addr
	for a, p := range n.pods {
		if p.Name == name && ip.Of(a.Addr()) == family {
			found = append(found, a.Addr())
		}
	}
	if len(found) == 0 {
		return netip.Addr{}, false
	}
	return slices.MinFunc(found, netip.Addr.Compare), true
}

// NamesOf returns the names of known Services.
func NamesOf(services ...service.Service) *Names {
	n := newNames()
	for i := range services {
		n.addService(&services[i])
	}
	return n
}
