package proxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// Duration of each kernel write, in synctest's time.
const writeTakes = 100 * time.Microsecond

// timed records the time of the first write with each prefix.
func (w *world) timed(prefixes ...string) map[string]time.Time {
	first := map[string]time.Time{}
	w.setRefuse(func(write string) error {
		time.Sleep(writeTakes)
		for _, p := range prefixes {
			if _, done := first[p]; strings.HasPrefix(write, p) && !done {
				first[p] = time.Now()
			}
		}
		return nil
	})
	return first
}

// large returns a Service with the given numbers of ports and endpoints, and with names
// of maximum length.
func (w *world) large(name string, number, ports, endpoints int) {
	vip := fmt.Sprintf("10.97.0.%d", number)
	long := strings.Repeat("n", 63)
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: long, Name: name + strings.Repeat("-", 62-len(name)) + "x"},
		Spec:       corev1.ServiceSpec{ClusterIP: vip, ClusterIPs: []string{vip}},
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: long, Name: svc.Name, Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for i := range ports {
		port, name := int32(i+1), fmt.Sprintf("p%014d", i)
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: name, Port: port})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &name, Port: &port})
	}
	for i := range endpoints {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.245.%d.%d", i/250, i%250+1)}})
	}
	w.sink.SetService(svc)
	w.sink.SetEndpointSlice(slice)
}

// TestReliabilityLargeServices adds Services with 10,000 ports and with 5,000 endpoints
// together with small ones, at the start and later. The small ones do not wait. A small
// Service added while a large one is written waits only for that one.
func TestReliabilityLargeServices(t *testing.T) {
	record := reliability.Begin(t, reliability.Input, "large")
	var waits []time.Duration
	var whole time.Duration
	const period = time.Second
	run(t, func(o *Options) { o.MinSyncPeriod = period }, func(w *world) {
		at := w.timed("add virtual server TCP 10.96.0.10:80", "add virtual server TCP 10.97.0.1:10000")
		began := time.Now()
		w.large("a", 1, 10000, 2)
		w.large("b", 2, 1, 5000)
		w.service("small", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.sleep(time.Minute)
		waits = append(waits, at["add virtual server TCP 10.96.0.10:80"].Sub(began))
		whole = at["add virtual server TCP 10.97.0.1:10000"].Sub(began)
		if n := w.realServersOf("10.97.0.2", 1); n != 5000 {
			t.Errorf("%d real servers, want 5000", n)
		}

		w.service("first", "10.96.0.12")
		const over = period / 10 // the previous pass is over by then; the next follows after the period
		w.sleep(over)
		at = w.timed("add virtual server TCP 10.96.0.11:80")
		began = time.Now().Add(period - over)
		w.large("a", 1, 10000, 3)
		w.large("b", 2, 2, 5000)
		w.service("other", "10.96.0.11", "10.244.0.2")
		w.sleep(time.Minute)
		waits = append(waits, at["add virtual server TCP 10.96.0.11:80"].Sub(began))
		if n := w.realServersOf("10.97.0.1", 10000); n != 3 {
			t.Errorf("%d real servers, want 3", n)
		}
		if len(w.events) > 0 {
			t.Errorf("complaints: %+v", w.events)
		}
	})
	const limit = time.Second / 10
	if slices.Max(waits) > limit {
		t.Errorf("small Services were programmed after %v, the large one after %s", waits, whole)
	}
	record(
		reliability.Figure{Name: "ports of one Service", Value: 10000, Shows: "and 5,000 endpoints of another, with names of maximum length"},
		reliability.Figure{Name: "time until that Service is programmed", Value: whole.Seconds(), Unit: "s", Shows: fmt.Sprintf("the kernel takes %s for each write", writeTakes)},
		reliability.Figure{Name: "time until a small Service is programmed", Value: slices.Max(waits).Seconds() * 1000, Unit: "ms", Shows: "while both wait"},
	)
}

// TestLargeServicesShareAPeriod changes several large Services at once. They wait for
// --ipvs-min-sync-period once, not one after another.
func TestLargeServicesShareAPeriod(t *testing.T) {
	run(t, func(o *Options) { o.MinSyncPeriod = 20 * time.Second }, func(w *world) {
		const services = 3
		change := func(ports int) {
			for n := 1; n <= services; n++ {
				w.large(fmt.Sprint("l", n), n, ports, 1000)
			}
		}
		change(2)
		w.synced()
		w.sleep(time.Minute)
		w.service("first", "10.96.0.12")
		w.sleep(time.Second) // it is programmed; what follows waits for the period
		change(3)
		w.sleep(20 * time.Second)
		for n := 1; n <= services; n++ {
			if got := w.realServersOf(fmt.Sprintf("10.97.0.%d", n), 3); got != 1000 {
				t.Errorf("Service %d has %d real servers after the period, want 1000", n, got)
			}
		}
		w.service("small", "10.96.0.10", "10.244.0.2")
		w.sleep(time.Second)
		if w.realServers("10.96.0.10") != 0 {
			t.Error("the next change does not wait for the period")
		}
	})
}

// TestOneEventForManyFaults checks that there is one Event per Service, however many
// faults it has.
func TestOneEventForManyFaults(t *testing.T) {
	run(t, nil, func(w *world) {
		svc := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "bad"},
			Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.12", ClusterIPs: []string{"10.96.0.12"}},
		}
		for range 10000 {
			svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Port: 80})
		}
		w.sink.SetService(svc)
		w.service("good", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.sleep(time.Hour)
		if len(w.events) != 1 || w.events[0].Regarding.Name != "bad" || !strings.HasPrefix(w.events[0].Note, "Service default/bad: spec.ports[1]: TCP 80 appears twice") {
			t.Errorf("%d Events", len(w.events))
		}
		if w.realServers("10.96.0.10") != 1 {
			t.Error("another Service is not served")
		}
	})
}

// TestNextLarge has one large Service change in every pass. The others have their turn.
func TestNextLarge(t *testing.T) {
	name := func(n string) types.NamespacedName { return types.NamespacedName{Namespace: "default", Name: n} }
	var last types.NamespacedName
	var planned []string
	large := []types.NamespacedName{name("a"), name("b"), name("c")}
	for len(planned) < 5 {
		last = nextLarge(large, last)
		planned = append(planned, last.Name)
		if last != large[0] { // "a" has changed again
			large = slices.DeleteFunc(large, func(n types.NamespacedName) bool { return n == last })
		}
	}
	if want := []string{"a", "b", "c", "a", "a"}; !slices.Equal(planned, want) {
		t.Errorf("planned %v, want %v", planned, want)
	}
}
