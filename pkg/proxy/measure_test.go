package proxy

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// changedAt delivers a slice that the controller wrote because of a change at the given
// time.
func (w *world) changedAt(name string, at time.Time, endpoints ...string) {
	s := newSlice(name, endpoints...)
	s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: at.Format(time.RFC3339Nano)}
	w.sink.SetEndpointSlice(s)
}

// The latency covers only changes since the start, each once, and none that was
// refused.
func TestNetworkProgrammingLatency(t *testing.T) {
	run(t, func(o *Options) { o.MinSyncPeriod = 10 * time.Second }, func(w *world) {
		w.service("web", "10.96.0.10")
		w.changedAt("web", time.Now().Add(-time.Hour), "10.244.0.2")
		w.synced()
		w.sleep(time.Minute)
		at := time.Now()
		w.sleep(2 * time.Second)
		w.changedAt("web", at, "10.244.0.3")
		w.sleep(time.Minute)
		w.changedAt("web", at, "10.244.0.3") // known objects are delivered again
		w.sleep(time.Minute)
		if diff := cmp.Diff([]time.Duration{2 * time.Second}, w.latencies); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		w.setRefuse(func(change string) error {
			if strings.Contains(change, "10.244.0.4") {
				return errors.New("no")
			}
			return nil
		})
		w.changedAt("web", time.Now(), "10.244.0.4")
		w.sleep(time.Minute)
		if len(w.latencies) != 1 {
			t.Errorf("refused changes count as programmed: %v", w.latencies)
		}
	})
}

// A retry of another Service's change does not end the wait of a change that is not planned
// yet.
func TestNetworkProgrammingLatencyOfWaitingChange(t *testing.T) {
	run(t, func(o *Options) { o.MinSyncPeriod = 10 * time.Second }, func(w *world) {
		w.service("other", "10.96.0.11", "10.244.0.5")
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.sleep(time.Minute)
		w.setRefuse(func(change string) error {
			if strings.Contains(change, "10.244.0.4") {
				return errors.New("no")
			}
			return nil
		})
		w.slice("other", "10.244.0.4")
		w.sleep(time.Millisecond)
		w.changedAt("web", time.Now(), "10.244.0.3")
		w.sleep(time.Minute)
		if len(w.latencies) != 1 || w.latencies[0] < 9*time.Second {
			t.Errorf("latencies %v, want one of 10 s", w.latencies)
		}
	})
}

func TestChangesAreCounted(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.slice("web", "10.244.0.3")
		w.sink.DeleteService(serviceName("web"))
		w.sink.DeleteEndpointSlice(serviceName("web-1"))
		w.sleep(time.Second)
		if want := (changes{services: 2, endpoints: 3}); w.changed != want {
			t.Errorf("%+v, want %+v", w.changed, want)
		}
		if w.planned != len(w.passes) {
			t.Errorf("planning was measured %d times in %d passes", w.planned, len(w.passes))
		}
	})
}

func TestServicesWithoutLocalEndpoints(t *testing.T) {
	run(t, nil, func(w *world) {
		w.externalLocal("external", "203.0.113.5")
		w.slice("external", "10.244.9.9")
		w.internalLocal("internal", "10.96.0.20")
		w.slice("internal", "10.244.9.9")
		w.internalLocal("nowhere", "10.96.0.21")
		w.synced()
		if want := [2]int{1, 1}; w.noLocal != want {
			t.Errorf("internal and external %v, want %v", w.noLocal, want)
		}
		w.slice("internal")
		w.sink.DeleteService(serviceName("external"))
		w.sleep(time.Second)
		if want := [2]int{0, 0}; w.noLocal != want {
			t.Errorf("internal and external %v, want %v", w.noLocal, want)
		}
	})
}

// internalLocal adds a Service with internalTrafficPolicy Local.
func (w *world) internalLocal(name, vip string) {
	w.sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			ClusterIP: vip, ClusterIPs: []string{vip}, InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyLocal),
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	})
}
