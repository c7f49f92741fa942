//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

const namespace = "default"

// newService returns a Service with one port, named after its protocol.
func newService(name string, protocol corev1.Protocol, port int32, clusterIPs ...string) *corev1.Service {
	families := make([]corev1.IPFamily, len(clusterIPs))
	policy := corev1.IPFamilyPolicySingleStack
	for i, ip := range clusterIPs {
		families[i] = corev1.IPv4Protocol
		if netip.MustParseAddr(ip).Is6() {
			families[i] = corev1.IPv6Protocol
		}
		if i > 0 {
			policy = corev1.IPFamilyPolicyRequireDualStack
		}
	}
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.ServiceSpec{
			Type:           corev1.ServiceTypeClusterIP,
			ClusterIP:      clusterIPs[0],
			ClusterIPs:     clusterIPs,
			IPFamilies:     families,
			IPFamilyPolicy: &policy,
			Ports:          []corev1.ServicePort{{Name: strings.ToLower(string(protocol)), Protocol: protocol, Port: port}},
		},
	}
}

// endpoint is an address behind a Service, on a node or outside of all nodes.
type endpoint struct {
	address, node string
	notReady      bool
	terminating   bool // still serving
}

// newSlice returns a slice of a Service's endpoints of one family, all with one target
// port.
func newSlice(svc *corev1.Service, family string, port int32, endpoints ...endpoint) *discoveryv1.EndpointSlice {
	slice := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: svc.Namespace, Name: svc.Name + "-" + strings.ToLower(family),
			Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name},
		},
		AddressType: discoveryv1.AddressType(family),
	}
	for _, p := range svc.Spec.Ports {
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: ptr.To(p.Name), Protocol: ptr.To(p.Protocol), Port: ptr.To(port)})
	}
	for _, e := range endpoints {
		out := discoveryv1.Endpoint{Addresses: []string{e.address}, Conditions: discoveryv1.EndpointConditions{
			Ready: ptr.To(!e.notReady && !e.terminating), Serving: ptr.To(!e.notReady), Terminating: ptr.To(e.terminating),
		}}
		if e.node != "" {
			out.NodeName = ptr.To(e.node)
		}
		slice.Endpoints = append(slice.Endpoints, out)
	}
	return slice
}

// newLoadBalancer adds a LoadBalancer IP to a Service.
func newLoadBalancer(svc *corev1.Service, ips ...string) *corev1.Service {
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	for _, ip := range ips {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
	}
	return svc
}

// writeManifests writes objects to a new folder, one file each, and returns its path.
func writeManifests(t testing.TB, objects ...runtime.Object) string {
	t.Helper()
	dir := t.TempDir()
	for i, o := range objects {
		writeManifest(t, filepath.Join(dir, fmt.Sprintf("%02d.yaml", i)), o)
	}
	return dir
}

func writeManifest(t testing.TB, path string, object runtime.Object) {
	t.Helper()
	data, err := yaml.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}
