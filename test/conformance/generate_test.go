//go:build e2e

package conformance

import "pgregory.net/rapid"

// The generators draw from small pools, so that steps affect existing state: Services
// share addresses, endpoints return, Services change their type. A failure shrinks to the
// first element of each pool.
const slots = 5

var (
	// drawSequence begins with enough objects for the steps to change. It is short,
	// because it may have to be shrunk.
	drawSequence = rapid.Custom(func(t *rapid.T) []Step {
		opening := Step(rapid.SliceOfN(drawChange, 8, 12).Draw(t, "opening"))
		return append([]Step{opening}, rapid.SliceOfN(drawStep, 1, 20).Draw(t, "steps")...)
	})

	drawStep = rapid.Custom(func(t *rapid.T) Step { return rapid.SliceOfN(drawChange, 1, 4).Draw(t, "changes") })

	drawChange = rapid.Custom(func(t *rapid.T) Change {
		switch kind := rapid.IntRange(0, 19).Draw(t, "kind"); {
		case kind < 8:
			return Change{Service: drawService.Draw(t, "service")}
		case kind < 16:
			return Change{Slice: drawSlice.Draw(t, "slice")}
		case kind < 18:
			s := Service{Slot: drawSlot.Draw(t, "slot")}
			return Change{DeleteService: s.Name()}
		case kind < 19:
			s := drawSlice.Draw(t, "slice")
			return Change{DeleteSlice: s.Name()}
		}
		zone := rapid.SampledFrom(append(zones, "")).Draw(t, "zone")
		return Change{Zone: &zone}
	})

	drawSlot = rapid.IntRange(0, slots-1)

	drawService = rapid.Custom(func(t *rapid.T) *Service {
		s := &Service{
			Slot:                drawSlot.Draw(t, "slot"),
			Type:                rapid.SampledFrom([]string{"ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer", "LoadBalancer", "ExternalName", "Headless"}).Draw(t, "type"),
			Families:            rapid.SampledFrom([]string{"4", "46", "46", "64", "6"}).Draw(t, "families"),
			Ports:               rapid.SliceOfNDistinct(drawPort, 1, 3, func(p Port) string { return p.Name }).Draw(t, "ports"),
			ExternalLocal:       rapid.Bool().Draw(t, "externalTrafficPolicy Local"),
			InternalLocal:       rarely(t, "internalTrafficPolicy Local", 4),
			TrafficDistribution: rapid.SampledFrom([]string{"", "", "", "PreferClose", "PreferSameZone", "PreferSameNode"}).Draw(t, "trafficDistribution"),
			PublishNotReady:     rarely(t, "publishNotReadyAddresses", 8),
			NamedByOtherProxy:   rarely(t, "service-proxy-name", 16),
			LabelledHeadless:    rarely(t, "headless", 16),
		}
		if rarely(t, "affinity", 4) {
			s.AffinitySeconds = rapid.SampledFrom([]int32{10800, 1, 60, 86400}).Draw(t, "seconds")
		}
		if s.Type == "ClusterIP" || s.Type == "NodePort" || s.Type == "LoadBalancer" {
			s.ExternalIPs = rapid.SliceOfNDistinct(rapid.SampledFrom(externalIPs), 0, 2, rapid.ID[string]).Draw(t, "externalIPs")
		}
		if s.Type == "LoadBalancer" {
			drawBalancer(t, s)
		}
		return s
	})

	// A port number may appear once for each protocol of a Service.
	drawPort = rapid.Custom(func(t *rapid.T) Port {
		name, numbers := rapid.SampledFrom(portNames).Draw(t, "name"), []int32{80, 81, 443, FirstNodePort, FirstNodePort + 10}
		if name == "admin" {
			numbers = []int32{8443, FirstNodePort + 1}
		}
		return Port{name, rapid.SampledFrom(numbers).Draw(t, "number")}
	})

	// The API requires unique endpoints in a slice. Another slice of the Service may
	// repeat one.
	drawSlice = rapid.Custom(func(t *rapid.T) *Slice {
		return &Slice{
			Slot:              drawSlot.Draw(t, "slot"),
			Number:            rapid.IntRange(0, 1).Draw(t, "number"),
			Family:            rapid.SampledFrom([]string{"4", "4", "4", "4", "6", "6", "6", "6", "FQDN"}).Draw(t, "family"),
			Ports:             rapid.SliceOfNDistinct(drawSlicePort, 1, 4, func(p SlicePort) string { return p.Name }).Draw(t, "ports"),
			Endpoints:         rapid.SliceOfNDistinct(drawEndpoint, 0, 4, func(e Endpoint) int { return e.Host }).Draw(t, "endpoints"),
			NamedByOtherProxy: rarely(t, "service-proxy-name", 24),
			LabelledHeadless:  rarely(t, "headless", 24),
		}
	})

	drawSlicePort = rapid.Custom(func(t *rapid.T) SlicePort {
		return SlicePort{
			rapid.SampledFrom(portNames).Draw(t, "name"),
			rapid.SampledFrom([]int32{8080, 8080, 8081, 80, 0}).Draw(t, "number"),
		}
	})

	drawEndpoint = rapid.Custom(func(t *rapid.T) Endpoint {
		e := Endpoint{
			Host:  rapid.IntRange(0, len(Hosts)-1).Draw(t, "host"),
			State: rapid.SampledFrom(append([]string{"ready", "ready", "ready"}, EndpointStates...)).Draw(t, "state"),
		}
		if rarely(t, "hints", 2) {
			e.Zones = []string{rapid.SampledFrom(zones).Draw(t, "zone")}
		}
		if rarely(t, "node hints", 4) {
			e.Nodes = []string{rapid.SampledFrom([]string{NodeName, OtherNode}).Draw(t, "node")}
		}
		return e
	})
)

var (
	portNames   = []string{"web", "datagram", "stream", "admin"}
	externalIPs = []string{"198.51.100.1", "198.51.100.2", "fd00:51::1", NodeIPv4, "203.0.113.1", "fd00:51::2"}
	balancerIPs = []string{"203.0.113.1", "203.0.113.2", "203.0.113.3", "fd00:113::1", "fd00:113::2", NodeIPv6}
)

// rarely returns true once in so many times. A failure shrinks to false.
func rarely(t *rapid.T, what string, times int) bool {
	return rapid.IntRange(0, times-1).Draw(t, what) == times-1
}

func drawBalancer(t *rapid.T, s *Service) {
	s.NoNodePorts = rarely(t, "no node ports", 4)
	s.SourceRanges = rapid.SliceOfNDistinct(rapid.SampledFrom([]string{
		"100.64.0.0/16", "192.168.50.0/24", "10.244.1.0/24", "0.0.0.0/0", "fd00:64::/32", "fd00:50::/64", "::/0",
	}), 0, 3, rapid.ID[string]).Draw(t, "loadBalancerSourceRanges")
	for _, ip := range rapid.SliceOfNDistinct(rapid.SampledFrom(balancerIPs), 0, 3, rapid.ID[string]).Draw(t, "load balancer") {
		mode := rapid.SampledFrom([]string{"VIP", "VIP", "VIP", "VIP", "Proxy", "Hostname"}).Draw(t, "ipMode")
		s.Ingress = append(s.Ingress, Ingress{ip, mode})
	}
}
