//go:build e2e

package bench

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/metadata"
)

// endpointsOfEach is the number of endpoints of each Service.
const endpointsOfEach = 2

// vip returns the cluster IP of Service number n. The first addresses of the range belong
// to the API server's own Services.
func vip(n int) netip.Addr { return numbered(netip.MustParseAddr("10.96.0.0"), 256+n) }

// endpoint returns address number i of Service number n. Its versions repeat after 16.
func endpoint(n, i, version int) netip.Addr {
	return numbered(netip.MustParseAddr("10.128.0.0"), (n*endpointsOfEach+i)*16+version%16)
}

func numbered(first netip.Addr, n int) netip.Addr {
	a := first.As4()
	sum := int(a[1])<<16 + int(a[2])<<8 + int(a[3]) + n
	return netip.AddrFrom4([4]byte{a[0], byte(sum >> 16), byte(sum >> 8), byte(sum)})
}

// DNS has kubeadm's addresses.
var dnsIP, dnsEndpoint = netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("10.127.0.10")

// addDNS creates the DNS Service through the API server.
func (a *api) addDNS() {
	a.t.Helper()
	svc, slice := newService(0), newSlice(0, 0)
	svc.Name, slice.Name, slice.Labels = "kube-dns", "kube-dns-1", map[string]string{discoveryv1.LabelServiceName: "kube-dns"}
	svc.Spec.ClusterIP, svc.Spec.ClusterIPs = dnsIP.String(), []string{dnsIP.String()}
	svc.Spec.Ports = []corev1.ServicePort{{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, TargetPort: intstr.FromInt32(53)}}
	slice.Ports = []discoveryv1.EndpointPort{{Name: ptr.To("dns"), Protocol: ptr.To(corev1.ProtocolUDP), Port: ptr.To[int32](53)}}
	slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{dnsEndpoint.String()}}}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem}}
	if _, err := a.client.CoreV1().Namespaces().Create(a.t.Context(), ns, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		must(a.t, err)
	}
	a.create(ns.Name, svc, slice)
}

// create creates a slice and then its Service through the API server.
func (a *api) create(namespace string, svc *corev1.Service, slice *discoveryv1.EndpointSlice) {
	a.t.Helper()
	_, err := a.client.DiscoveryV1().EndpointSlices(namespace).Create(a.t.Context(), slice, metav1.CreateOptions{})
	must(a.t, err)
	_, err = a.client.CoreV1().Services(namespace).Create(a.t.Context(), svc, metav1.CreateOptions{})
	must(a.t, err)
}

func serviceName(n int) string { return fmt.Sprintf("svc-%05d", n) }

func newService(n int) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: serviceName(n), Labels: metadata.HelmLabels(serviceName(n)), Annotations: metadata.HelmAnnotations(serviceName(n)),
		},
		Spec: corev1.ServiceSpec{
			Type:                  corev1.ServiceTypeClusterIP,
			ClusterIP:             vip(n).String(),
			ClusterIPs:            []string{vip(n).String()},
			IPFamilies:            []corev1.IPFamily{corev1.IPv4Protocol},
			IPFamilyPolicy:        ptr.To(corev1.IPFamilyPolicySingleStack),
			InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyCluster),
			SessionAffinity:       corev1.ServiceAffinityNone,
			Selector:              map[string]string{"app.kubernetes.io/name": "backend", "app.kubernetes.io/instance": serviceName(n)},
			Ports:                 []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(8000)}},
		},
	}
}

func newSlice(n, version int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: serviceName(n) + "-1", GenerateName: serviceName(n) + "-", Labels: metadata.HelmLabels(serviceName(n)),
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().UTC().Format(time.RFC3339)},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Service", Name: serviceName(n), UID: anyUID, Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true),
			}},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](8000)}},
	}
	s.Labels[discoveryv1.LabelServiceName] = serviceName(n)
	s.Labels[discoveryv1.LabelManagedBy] = "endpointslice-controller.k8s.io"
	for i := range endpointsOfEach {
		v := 0
		if i == 0 {
			v = version
		}
		s.Endpoints = append(s.Endpoints, newEndpoint(n, i, endpoint(n, i, v)))
	}
	return s
}

// anyUID is an UID with the length of a real one.
const anyUID = "0b9b8b6e-6c0e-4a53-9d0a-0f8f5d1f0d5e"

// newEndpoint returns endpoint number i of Service number n. One in a hundred is on the node.
func newEndpoint(n, i int, address netip.Addr) discoveryv1.Endpoint {
	host := fmt.Sprintf("worker-%d", (n+i)%500)
	if n%50 == 0 && i == 0 {
		host = "node"
	}
	return discoveryv1.Endpoint{
		Addresses:  []string{address.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
		NodeName:   ptr.To(host), Zone: ptr.To(fmt.Sprintf("zone-%d", (n+i)%3)),
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("%s-%d", serviceName(n), i), UID: anyUID},
	}
}

// mixedService returns Service number n of the mixed ones, with its slices: each has both families, one in
// ten has a node port, and one in twenty a load balancer too.
func mixedService(n int) (*corev1.Service, []*discoveryv1.EndpointSlice) {
	svc, slice := newService(n), newSlice(n, 0)
	svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	svc.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
	svc.Spec.ClusterIPs = append(svc.Spec.ClusterIPs, fmt.Sprintf("fd00:10:96::%x", 256+n))
	if n%10 == 0 {
		svc.Spec.Type = corev1.ServiceTypeNodePort
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		svc.Spec.Ports[0].NodePort = 30000 + int32(n/10)%2768
	}
	if n%20 == 0 {
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{
			IP: numbered(netip.MustParseAddr("203.0.113.0"), n/20).String(), IPMode: ptr.To(corev1.LoadBalancerIPModeVIP),
		}}
	}
	six := newSlice(n, 0)
	six.Name, six.AddressType, six.Endpoints = serviceName(n)+"-2", discoveryv1.AddressTypeIPv6, nil
	for i := range endpointsOfEach {
		six.Endpoints = append(six.Endpoints, newEndpoint(n, i, netip.MustParseAddr(fmt.Sprintf("fd00:10:128::%x:%x", n, i+1))))
	}
	return svc, []*discoveryv1.EndpointSlice{slice, six}
}

// api writes to the lab's API server.
type api struct {
	t      testing.TB
	client kubernetes.Interface
	space  string
	count  int
	// versions counts the changes of each Service's endpoint.
	versions map[int]int
	// objects returns a Service with its slices.
	objects func(n int) (*corev1.Service, []*discoveryv1.EndpointSlice)
}

// plain returns Service number n with one slice.
func plain(n int) (*corev1.Service, []*discoveryv1.EndpointSlice) {
	return newService(n), []*discoveryv1.EndpointSlice{newSlice(n, 0)}
}

// writers is the number of concurrent requests.
const writers = 16

func newAPI(t testing.TB) *api {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", lab.Kubeconfig())
	must(t, err)
	config.QPS = -1
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = config.ContentType
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	a := &api{t: t, client: client, versions: map[int]int{}, objects: plain}
	ns, err := client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "bench-"}}, metav1.CreateOptions{})
	must(t, err)
	a.space = ns.Name
	a.addDNS()
	a.addPlane()
	return a
}

// renewal is a replacement of one endpoint. The next renewal of the Service uses another
// address.
type renewal struct {
	service int
	slice   *discoveryv1.EndpointSlice
	address netip.Addr // the new one
}

// renewal returns the next change of a Service.
func (a *api) renewal(n int) renewal {
	a.versions[n]++
	v := a.versions[n]
	return renewal{n, newSlice(n, v), endpoint(n, 0, v)}
}

// write sends a change to the API server.
func (a *api) write(ctx context.Context, r renewal) error {
	_, err := a.client.DiscoveryV1().EndpointSlices(a.space).Update(ctx, r.slice, metav1.UpdateOptions{})
	return err
}

// parallel calls a function for each number of a range concurrently, and returns the
// first error.
func (a *api) parallel(from, to int, do func(context.Context, int) error) {
	a.t.Helper()
	numbers := make(chan int)
	go func() {
		defer close(numbers)
		for i := from; i < to; i++ {
			numbers <- i
		}
	}()
	var done sync.WaitGroup
	var first error
	var once sync.Once
	for range writers {
		done.Go(func() {
			for i := range numbers {
				if err := do(a.t.Context(), i); err != nil {
					once.Do(func() { first = err })
				}
			}
		})
	}
	done.Wait()
	must(a.t, first)
}
