//go:build e2e

package neighbours

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// The Services, by number: one for each externalTrafficPolicy, one whose VIP belongs
// to the balancer, and one under Local without an endpoint on the node.
const (
	clusterService = 1 + iota
	localService
	foreignService
	awayService

	services    = 2 // in the matrix
	allServices = awayService
)

var protocols = []lab.Protocol{lab.TCP, lab.UDP}

func policyOf(n int) string {
	if n == localService || n == awayService {
		return string(corev1.ServiceExternalTrafficPolicyLocal)
	}
	return string(corev1.ServiceExternalTrafficPolicyCluster)
}

func targetPort(n int) uint16 { return uint16(8000 + n) }
func nodePort(n int) uint16   { return uint16(30000 + n) }

// foreignPort is a port of the foreign Service's VIP that no Service has.
const foreignPort = 443

// servicePort differs by Service, because two Services may have the same VIP.
func servicePort(n int) uint16 { return uint16(79 + n) }

var foreignIPs = [2]string{"203.0.113.200", "fd00:203:2::200"}

func clusterIPs(n int) [2]string  { return format([2]string{"10.96.7.%d", "fd00:10:96::7%d"}, n) }
func balancerIPs(n int) [2]string { return format([2]string{"203.0.113.%d", "fd00:203:1::%d"}, n) }

// balancerIPs returns the LoadBalancer IPs of a Service that the matrix uses, and
// statusIPs all that are in its status.
func (p plan) balancerIPs(n int) [2]string {
	if p.balancers[0] != "" {
		return p.balancers
	}
	return balancerIPs(n)
}

func (p plan) statusIPs(n int) []string {
	ips, own := p.balancerIPs(n), p.nodeIPs()
	if p.ownToo {
		return append(own[:], ips[:]...)
	}
	return ips[:]
}

// targetPort is the endpoints' port: the Service's, if they are on the host network.
func (p plan) targetPort(n int) uint16 {
	if p.hostNetwork {
		return servicePort(n)
	}
	return targetPort(n) + p.shift
}

func (p plan) externalIPs(n int) [2]string { return format(p.externalNet, 128+n) }

func format(formats [2]string, n int) [2]string {
	return [2]string{fmt.Sprintf(formats[0], n), fmt.Sprintf(formats[1], n)}
}

// newService returns Service number n.
func (p plan) newService(n int) *corev1.Service {
	ips := clusterIPs(n)
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("web%d", n)},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: ips[0], ClusterIPs: ips[:],
			IPFamilies:            []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			IPFamilyPolicy:        ptr.To(corev1.IPFamilyPolicyRequireDualStack),
			ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicy(policyOf(n)),
		},
	}
	for _, protocol := range protocols {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name: strings.ToLower(string(protocol)), Protocol: corev1.Protocol(protocol), Port: int32(servicePort(n)), NodePort: int32(nodePort(n)),
		})
	}
	vips := foreignIPs[:]
	if n != foreignService {
		vips = p.statusIPs(n)
		external := p.externalIPs(n)
		svc.Spec.ExternalIPs = external[:]
	}
	if policyOf(n) == string(corev1.ServiceExternalTrafficPolicyLocal) {
		svc.Spec.HealthCheckNodePort = int32(31000 + n)
	}
	for _, ip := range vips {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
	}
	return svc
}

// newSlices returns the EndpointSlices of Service number n.
func (p plan) newSlices(n int, svc *corev1.Service, servers []*server) []*discoveryv1.EndpointSlice {
	var slices []*discoveryv1.EndpointSlice
	for i, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: svc.Name + "-" + strings.ToLower(string(family)), Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name},
			},
			AddressType: family,
		}
		for _, port := range svc.Spec.Ports {
			slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{
				Name: ptr.To(port.Name), Protocol: ptr.To(port.Protocol), Port: ptr.To(int32(p.targetPort(n))),
			})
		}
		for _, s := range servers {
			if s.addresses[i].IsValid() && (n != awayService || !strings.HasPrefix(s.name, here)) {
				slice.Endpoints = append(slice.Endpoints, newEndpoint(s.name, s.addresses[i]))
			}
		}
		slices = append(slices, slice)
	}
	return slices
}

func newEndpoint(name string, address netip.Addr) discoveryv1.Endpoint {
	node := "other"
	if strings.HasPrefix(name, here) {
		node = nodeName
	}
	return discoveryv1.Endpoint{
		Addresses: []string{address.String()}, NodeName: &node,
		Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
	}
}

// api writes to the lab's API server, in a namespace of this test. No controllers run.
type api struct {
	t         testing.TB
	client    kubernetes.Interface
	namespace string
}

func newAPI(t testing.TB) *api {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", lab.Kubeconfig())
	if err != nil {
		t.Fatalf("no API server (run the lab with -apiserver): %v", err)
	}
	config.QPS = -1 // without a limit
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	a := &api{t: t, client: client}
	ns, err := client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "neighbours-"}}, metav1.CreateOptions{})
	a.must(err)
	a.namespace = ns.Name
	return a
}

func (a *api) must(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}

// undo deletes an object when the test ends, because every proxy sees all objects.
func (a *api) undo(remove func(context.Context) error) {
	a.t.Cleanup(func() {
		if err := remove(context.Background()); err != nil && !apierrors.IsNotFound(err) {
			a.t.Errorf("clean up the API server: %v", err)
		}
	})
}

// addService creates a Service, its status and its slices.
func (a *api) addService(svc *corev1.Service, slices []*discoveryv1.EndpointSlice) {
	a.t.Helper()
	for _, slice := range slices {
		all := a.client.DiscoveryV1().EndpointSlices(a.namespace)
		_, err := all.Create(a.t.Context(), slice, metav1.CreateOptions{})
		a.must(err)
		a.undo(func(ctx context.Context) error { return all.Delete(ctx, slice.Name, metav1.DeleteOptions{}) })
	}
	all := a.client.CoreV1().Services(a.namespace)
	status := svc.Status
	created, err := all.Create(a.t.Context(), svc, metav1.CreateOptions{})
	a.must(err)
	a.undo(func(ctx context.Context) error { return all.Delete(ctx, svc.Name, metav1.DeleteOptions{}) })
	created.Status = status
	_, err = all.UpdateStatus(a.t.Context(), created, metav1.UpdateOptions{})
	a.must(err)
}

func (a *api) updateSlices(slices []*discoveryv1.EndpointSlice) {
	a.t.Helper()
	for _, slice := range slices {
		_, err := a.client.DiscoveryV1().EndpointSlices(a.namespace).Update(a.t.Context(), slice, metav1.UpdateOptions{})
		a.must(err)
	}
}

// addNode creates the Node.
func (a *api) addNode(ips [2]string) {
	a.t.Helper()
	all := a.client.CoreV1().Nodes()
	var created *corev1.Node
	lab.Eventually(a.t, 30*time.Second, "the last test's Node is gone", func() (err error) {
		created, err = all.Create(a.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			if old, err := all.Get(a.t.Context(), nodeName, metav1.GetOptions{}); err == nil {
				a.t.Logf("%+v", old.ManagedFields)
			}
			err = errors.Join(err, all.Delete(a.t.Context(), nodeName, metav1.DeleteOptions{}))
		}
		return err
	})
	a.undo(func(ctx context.Context) error { return all.Delete(ctx, nodeName, metav1.DeleteOptions{}) })
	for _, ip := range ips {
		created.Status.Addresses = append(created.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip})
	}
	_, err := all.UpdateStatus(a.t.Context(), created, metav1.UpdateOptions{})
	a.must(err)
}
