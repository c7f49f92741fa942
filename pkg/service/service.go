// Package service builds the proxy's model of a Service from API objects: it parses
// addresses, resolves defaults, and reports and omits what is invalid. It makes no
// decisions; package plan does.
package service

import (
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Service is one Service with its endpoints.
type Service struct {
	Name    types.NamespacedName
	UID     types.UID
	Created time.Time

	ClusterIPs    []netip.Addr // at most one per family
	ExternalIPs   []netip.Addr
	LoadBalancers []netip.Addr   // with ipMode VIP only
	SourceRanges  []netip.Prefix // masked; nil: unrestricted

	ExternalLocal bool // externalTrafficPolicy: Local
	Masquerade    bool // even under ExternalLocal; see AnnotationMasquerade
	InternalLocal bool // internalTrafficPolicy: Local

	Scheduling          Scheduling
	AffinitySeconds     uint32 // 0: no session affinity
	OnePacket           bool   // each UDP datagram by itself; never with session affinity
	MaxConnections      uint32 // of each endpoint; 0: no limit
	HealthCheckNodePort uint16 // 0: none

	Ports []Port // in the API's order
}

// Has reports whether the Service has a family. Its cluster IPs decide
// (spec.ipFamilies): node ports and external addresses do not add families.
func (s *Service) Has(f ip.Family) bool {
	return len(s.ClusterIPs) == 0 || slices.ContainsFunc(s.ClusterIPs, func(a netip.Addr) bool { return ip.Of(a) == f })
}

// External reports whether the Service is reachable by more than its cluster IPs.
func (s *Service) External() bool {
	if len(s.ExternalIPs) > 0 || len(s.LoadBalancers) > 0 {
		return true
	}
	for _, p := range s.Ports {
		if p.NodePort != 0 {
			return true
		}
	}
	return false
}

// Port is one port of a Service and the endpoints behind it.
type Port struct {
	Name      string
	Protocol  ip.Protocol
	Port      uint16
	NodePort  uint16     // 0: none
	Endpoints []Endpoint // of both families, sorted by address and port
}

// Endpoint is one address and port behind a port of a Service.
type Endpoint struct {
	Addr        netip.AddrPort
	Node        string // name of its node, or ""
	Zone        string // zone of its node, or ""
	Hints       *Hints // nodes and zones that should use it; nil: no hint
	Weight      int32  // relative to other endpoints; 0: not set, counts as 1
	Ready       bool   // may receive new connections; false for terminating endpoints unless unready addresses are published
	Serving     bool   // can answer
	Terminating bool
}

// Hints are the topology hints of an endpoint.
type Hints struct{ Zones, Nodes []string }

// ZoneHints returns the zones that should use the endpoint; none: no hint.
func (e *Endpoint) ZoneHints() []string {
	if e.Hints == nil {
		return nil
	}
	return e.Hints.Zones
}

// NodeHints returns the nodes that should use the endpoint; none: no hint.
func (e *Endpoint) NodeHints() []string {
	if e.Hints == nil {
		return nil
	}
	return e.Hints.Nodes
}
