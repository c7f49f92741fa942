// Package service turns the API's objects into the proxy's own model of a
// Service: addresses parsed, defaults resolved, what is not valid left out
// and reported. It decides nothing; that is package plan's part.
package service

import (
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// AnnotationMasquerade on a Service, "true", has its external traffic
// masqueraded under externalTrafficPolicy Local too. Its endpoints see the
// node instead of the client, but answer through it: pods with a way of their
// own to the client (macvlan, a second interface) would answer directly, and
// the client knows no such connection.
const AnnotationMasquerade = "kube-ipvs.io/masquerade"

// AnnotationIPMode on a Service, "Proxy", leaves the IPs of its load balancer
// to the cloud, as if all of them had that ipMode in the Service's status; see
// corev1.LoadBalancerIPMode. "VIP" changes nothing.
const AnnotationIPMode = "kube-ipvs.io/ip-mode"

// AnnotationOnePacket on a Service, "true", has each UDP datagram scheduled by itself,
// also those of one client's port (kubernetes#110814). It is for traffic that is not
// answered, such as syslog: IPVS keeps no connection by which an answer would get the
// Service's address back (ip_vs_update_conntrack in net/netfilter/ipvs/ip_vs_nfct.c).
const AnnotationOnePacket = "kube-ipvs.io/one-packet"

// Service is one Service with its endpoints.
type Service struct {
	Name    types.NamespacedName
	UID     types.UID
	Created time.Time

	ClusterIPs    []netip.Addr // at most one of each family
	ExternalIPs   []netip.Addr
	LoadBalancers []netip.Addr   // those with ipMode VIP; Proxy's are the cloud's business
	SourceRanges  []netip.Prefix // masked; nil: unrestricted

	ExternalLocal bool // externalTrafficPolicy: Local
	Masquerade    bool // even then; see AnnotationMasquerade
	InternalLocal bool // internalTrafficPolicy: Local

	Scheduling          Scheduling
	AffinitySeconds     uint32 // 0: no session affinity
	OnePacket           bool   // each UDP datagram by itself; never with session affinity
	HealthCheckNodePort uint16 // 0: none

	Ports []Port // in the API's order
}

// Has tells whether the Service is one of a family, which those of its cluster
// IPs say (spec.ipFamilies): neither node ports nor external addresses serve
// another.
func (s *Service) Has(f ip.Family) bool {
	return len(s.ClusterIPs) == 0 || slices.ContainsFunc(s.ClusterIPs, func(a netip.Addr) bool { return ip.Of(a) == f })
}

// External tells whether anything but the cluster IPs leads to the Service.
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
	Endpoints []Endpoint // of both families, by address and port
}

// Endpoint is one address and port behind a port of a Service.
type Endpoint struct {
	Addr        netip.AddrPort
	Node        string // name of the node that it runs on, or ""
	Zone        string // the zone that it runs in, or ""
	Weight      int    // of connections against other endpoints; 0: none given, which is 1
	Ready       bool   // wants traffic; never true for a terminating one, unless unready ones are published
	Serving     bool   // can answer
	Terminating bool
	ZoneHints   []string // zones that should use it; none: no hint
	NodeHints   []string // nodes that should use it; none: no hint
}
