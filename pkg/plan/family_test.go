package plan_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// A Service has the families of its cluster IPs. Node ports and external addresses of
// another family are not served.
func TestFamiliesOfService(t *testing.T) {
	cfg := defaultConfig()
	cfg.Families = ip.Families
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
	facts := plan.Facts{NodeName: "node-1", NodePorts: addrs}
	vips := []netip.Addr{netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("2001:db8:113::5")}
	part := plan.ForService(&cfg, &facts, &service.Service{
		ClusterIPs: []netip.Addr{netip.MustParseAddr("fd00:96::10")}, ExternalIPs: vips, LoadBalancers: vips,
		ExternalLocal: true, HealthCheckNodePort: 31000,
		Ports: []service.Port{{Protocol: ip.TCP, Port: 80, NodePort: 30080}},
	})
	if len(part.VirtualServers) != 3 {
		t.Errorf("%d virtual servers, want those of the cluster IP, the VIP and the node port", len(part.VirtualServers))
	}
	for _, vs := range part.VirtualServers {
		if vs.Key.Family() != ip.IPv6 {
			t.Errorf("%s is served", vs.Key)
		}
	}
	for _, m := range part.Members {
		if !strings.HasPrefix(m.Set, "KUBE-6-") {
			t.Errorf("%s has a member", m.Set)
		}
	}
	for _, v := range part.VIPs {
		if ip.Of(v.Addr) != ip.IPv6 {
			t.Errorf("%s is claimed", v)
		}
	}
}
