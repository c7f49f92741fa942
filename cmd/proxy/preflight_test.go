package main

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/proxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
	"github.com/kube-ipvs/kube-ipvs/test/fakenode"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// oneService is a source with a Service and its endpoint.
type oneService struct{ source.Loader }

func (oneService) Load(_ context.Context, sink source.Sink) error {
	sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.80", ClusterIPs: []string{"10.96.0.80"},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	})
	sink.SetEndpointSlice(&discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.2"}}},
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](8000)}},
	})
	sink.Synced()
	return nil
}

func (s oneService) Run(ctx context.Context, sink source.Sink) error { return s.Load(ctx, sink) }

// TestDryRunWithoutIPVS plans a node whose kernel has loaded neither ip_vs, and so has none
// of its parameters, nor ip_set.
func TestDryRunWithoutIPVS(t *testing.T) {
	cfg := scenario.DefaultConfig()
	cfg.NodeName, cfg.Families = "node1", ip.Families
	parameters := sysctl.State{}
	for key, value := range fakenode.Parameters(&cfg, nil) {
		if !strings.Contains(key, "/vs/") {
			parameters[key] = value
		}
	}
	node := fakenode.New(parameters)
	node.OnChange = func(change string) error {
		t.Errorf("%s, in a dry run", change)
		return nil
	}
	var listed strings.Builder
	kernel := reconcile.Kernel{
		IPVS: noIPVS{}, IPSet: noSets{}, Routing: node.Routing, Sysctl: node.Sysctl, Conntrack: node.Conntrack, Loopback: node.Loopback, KubeProxy: node.KubeProxy,
		NAT: map[ip.Family]reconcile.NAT{ip.IPv4: node.NAT[ip.IPv4], ip.IPv6: node.NAT[ip.IPv6]},
	}
	p := proxy.New(proxy.Options{
		ReadOnly: true,
		Config:   cfg,
		Kernel: kernel.DryRun(func(part, _, change string) {
			listed.WriteString(part + ": " + change + "\n")
		}),
		ProbeScheduler:  func(string) error { return nil },
		BridgeNetfilter: func(bool) plan.BridgeNetfilter { return plan.BridgeEnabled },
		Network:         node.Routing, Rules: node.NAT[ip.IPv4],
		HealthChecks: discard{}, Observer: discard{}, Meter: discard{}, Events: &dryRunResult{},
	})
	if err := p.Once(t.Context(), oneService{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ipvs: add virtual server TCP 10.96.0.80:80", "ipvs: add real server 10.244.0.2:8000", "ipset: create set KUBE-CLUSTER-IP"} {
		if !strings.Contains(listed.String(), want) {
			t.Errorf("%q is not in\n%s", want, listed.String())
		}
	}
}
