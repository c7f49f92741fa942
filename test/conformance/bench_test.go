//go:build e2e

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcore "k8s.io/client-go/kubernetes/typed/core/v1"
	typeddiscovery "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// bench runs both programs and the API server that they watch.
type bench struct {
	client          kubernetes.Interface
	kubeProxy, ours *side
	world           *World
	marks           int32
}

func newBench(t testing.TB) *bench {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", lab.Kubeconfig())
	must(t, err)
	config.QPS = -1                           // no limit
	config.WarningHandler = rest.NoWarnings{} // no warnings about deprecated fields
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	b := &bench{client: client, world: NewWorld()}
	b.addNode(t)
	b.addMarker(t)
	// Memory costs less than garbage collection here.
	t.Setenv("GOGC", "400")
	b.kubeProxy, b.ours = newSide(t, "kube-proxy"), newSide(t, "kube-ipvs")
	b.kubeProxy.startKubeProxy()
	b.ours.startKubeIPVS(filepath.Join(os.Getenv("LAB_SRC"), "bin/kube-ipvs"))
	must(t, b.kubeProxy.passed())
	must(t, b.ours.passed())
	b.ours.demandInternal()
	return b
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var (
	ctx     = context.Background()
	created = metav1.CreateOptions{}
	updated = metav1.UpdateOptions{}
	deleted = metav1.DeleteOptions{}
)

func (b *bench) services() typedcore.ServiceInterface { return b.client.CoreV1().Services(Namespace) }
func (b *bench) endpointSlices() typeddiscovery.EndpointSliceInterface {
	return b.client.DiscoveryV1().EndpointSlices(Namespace)
}

func (b *bench) addNode(t testing.TB) {
	t.Helper()
	node, err := b.client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: NodeName}}, created)
	must(t, err)
	for _, a := range []string{NodeIPv4, NodeIPv6} {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	_, err = b.client.CoreV1().Nodes().UpdateStatus(ctx, node, updated)
	must(t, err)
}

// apply writes a change to the API server.
func (b *bench) apply(c Change) error {
	b.world.Apply(c)
	switch {
	case c.Service != nil:
		return b.applyService(c.Service.Object())
	case c.DeleteService != "":
		return gone(b.services().Delete(ctx, c.DeleteService, deleted))
	case c.Slice != nil:
		return b.applySlice(c.Slice.Object())
	case c.DeleteSlice != "":
		return gone(b.endpointSlices().Delete(ctx, c.DeleteSlice, deleted))
	}
	return b.setZone(*c.Zone)
}

func gone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// applyService updates a Service, or recreates it if the API server forbids the change,
// and then writes its status.
func (b *bench) applyService(want *corev1.Service) error {
	status := want.Status
	got, err := b.services().Get(ctx, want.Name, metav1.GetOptions{})
	if err == nil {
		want.ResourceVersion = got.ResourceVersion
		got, err = b.services().Update(ctx, want, updated)
	}
	refused := apierrors.IsInvalid(err) || err == nil && !sameNodePorts(got, want)
	if refused {
		if err := b.services().Delete(ctx, want.Name, deleted); err != nil {
			return err
		}
	}
	if refused || apierrors.IsNotFound(err) {
		want.ResourceVersion = ""
		got, err = b.services().Create(ctx, want, created)
	}
	if err == nil && want.Spec.Type == corev1.ServiceTypeLoadBalancer {
		got.Status = status
		_, err = b.services().UpdateStatus(ctx, got, updated)
	}
	return err
}

// sameNodePorts reports whether the node ports are as wanted. The API server keeps
// unwanted ones after allocateLoadBalancerNodePorts: false.
func sameNodePorts(got, want *corev1.Service) bool {
	return slices.EqualFunc(got.Spec.Ports, want.Spec.Ports, func(a, b corev1.ServicePort) bool { return a.NodePort == b.NodePort })
}

func (b *bench) applySlice(want *discoveryv1.EndpointSlice) error {
	_, err := b.endpointSlices().Update(ctx, want, updated)
	if apierrors.IsNotFound(err) {
		_, err = b.endpointSlices().Create(ctx, want, created)
	}
	return err
}

func (b *bench) setZone(zone string) error {
	nodes := b.client.CoreV1().Nodes()
	node, err := nodes.Get(ctx, NodeName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	node.Labels = map[string]string{}
	if zone != "" {
		node.Labels[corev1.LabelTopologyZone] = zone
	}
	_, err = nodes.Update(ctx, node, updated)
	return err
}

// The marker is a Service whose port and target port change with each step. It arrives by
// the same watches as everything that was written before it. Its endpoints have a hint
// each, so that it also shows when the Node's zone has been processed. It is UDP, so that
// none of its real servers drains.
var markerIPs = []netip.Addr{netip.MustParseAddr("10.96.0.200"), netip.MustParseAddr("fd00:10:96::c8")}

// zones are the zones of Nodes and hints.
var zones = []string{"a", "b", "c"}

func (b *bench) markerService() *corev1.Service {
	policy := corev1.IPFamilyPolicyRequireDualStack
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "marker", Namespace: Namespace},
		Spec: corev1.ServiceSpec{
			IPFamilyPolicy: &policy,
			IPFamilies:     []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			ClusterIP:      markerIPs[0].String(),
			ClusterIPs:     []string{markerIPs[0].String(), markerIPs[1].String()},
			Ports:          []corev1.ServicePort{{Port: b.marks, Protocol: corev1.ProtocolUDP}},
		},
	}
}

func (b *bench) markerSlice(family int) *discoveryv1.EndpointSlice {
	name, protocol := "", corev1.ProtocolUDP
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("marker-%d", family), Namespace: Namespace,
			Labels: map[string]string{discoveryv1.LabelServiceName: "marker"},
		},
		AddressType: []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}[family],
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &b.marks}},
	}
	for i, zone := range zones {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{markerHost(family, i).String()},
			Hints:     &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}},
		})
	}
	return slice
}

func markerHost(family, i int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf([]string{"10.244.9.%d", "fd00:244:9::%d"}[family], i+1))
}

func (b *bench) addMarker(t testing.TB) {
	t.Helper()
	b.marks = 1
	must(t, b.writeMarker())
}

func (b *bench) writeMarker() error {
	if err := b.applyService(b.markerService()); err != nil {
		return err
	}
	for family := range markerIPs {
		if err := b.applySlice(b.markerSlice(family)); err != nil {
			return err
		}
	}
	return nil
}

// marker returns the marker's state in the kernel after the current step.
func (b *bench) marker() marker {
	out, port := marker{}, uint16(b.marks)
	for family, a := range markerIPs {
		for i, zone := range zones {
			if b.world.Zone == zone || b.world.Zone == "" {
				out.add(endpoint{"UDP", netip.AddrPortFrom(a, port)}, netip.AddrPortFrom(markerHost(family, i), port))
			}
		}
	}
	return out
}

// settle waits until both programs have processed everything written so far, and returns
// their kernels' state.
func (b *bench) settle() (theirs, ours *Kernel, err error) {
	b.marks = b.marks%60000 + 1
	began := time.Now()
	if err := b.writeMarker(); err != nil {
		return nil, nil, err
	}
	err = both(
		func() (err error) { ours, err = b.settled(b.ours, began); return err },
		func() (err error) { theirs, err = b.settled(b.kubeProxy, began); return err })
	return theirs, ours, err
}

// settled returns a program's kernel state once it has processed everything that was
// written before the marker.
func (b *bench) settled(s *side, written time.Time) (*Kernel, error) {
	if err := s.await(b.marker(), uint16(b.marks), written); err != nil {
		return nil, err
	}
	return s.read()
}

// both runs two functions concurrently and joins their errors.
func both(one, other func() error) error {
	done := make(chan error)
	go func() { done <- other() }()
	err := one()
	return errors.Join(err, <-done)
}

// compare returns the differences between two kernels, and the promises that ours breaks.
func (b *bench) compare(theirs, ours *Kernel) ([]Diff, error) {
	questions := Questions(theirs, ours)
	kubeProxys, err := theirs.Facts(questions)
	if err != nil {
		return nil, fmt.Errorf("kube-proxy: %w", err)
	}
	facts, err := ours.Facts(questions)
	if err != nil {
		return nil, fmt.Errorf("kube-ipvs: %w", err)
	}
	return append(Compare(kubeProxys, facts), b.world.Broken(facts)...), nil
}

// step makes a step's changes and returns the differences that are not allowed. A
// difference that disappears after one more pass of both programs is ignored: the change
// was in progress.
func (b *bench) step(step Step, allowed func(*Difference)) ([]Diff, error) {
	for _, c := range step {
		if err := b.apply(c); err != nil {
			text, _ := json.Marshal(c)
			return nil, fmt.Errorf("the API server refuses %s: %w", text, err)
		}
	}
	for again := range 2 {
		theirs, ours, err := b.settle()
		if err != nil {
			return nil, err
		}
		differs, err := b.compare(theirs, ours)
		if err != nil {
			return nil, err
		}
		unexpected := slices.DeleteFunc(differs, func(d Diff) bool {
			entry := Allowed(b.world, d)
			if entry != nil {
				allowed(entry)
			}
			return entry != nil
		})
		if len(unexpected) == 0 || again == 1 {
			return unexpected, nil
		}
	}
	return nil, nil
}

// clear returns a step that deletes all objects.
func (b *bench) clear() Step {
	var step Step
	for name := range b.world.Services {
		step = append(step, Change{DeleteService: name})
	}
	for name := range b.world.Slices {
		step = append(step, Change{DeleteSlice: name})
	}
	if b.world.Zone != "" {
		step = append(step, Change{Zone: new(string)})
	}
	return step
}
