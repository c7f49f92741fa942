package proxy

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// claim adds a Service with two ports that was created at the given second.
func (w *world) claim(name, vip string, second int64) {
	w.sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid of " + name), CreationTimestamp: metav1.Unix(second, 0)},
		Spec: corev1.ServiceSpec{
			ClusterIP: vip, ClusterIPs: []string{vip},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}, {Name: "https", Protocol: corev1.ProtocolTCP, Port: 443}},
		},
	})
	w.slice(name, "10.244.0.2")
}

func TestConflictIsAnEventAndAMetric(t *testing.T) {
	run(t, nil, func(w *world) {
		w.synced()
		w.claim("young", "10.96.0.10", 20)
		w.claim("old", "10.96.0.10", 10)
		w.sleep(time.Minute)
		w.slice("young", "10.244.0.3") // planning again does not report again
		w.sleep(time.Minute)
		if len(w.events) != 1 || w.conflicts != 2 {
			t.Fatalf("%d conflicts, Events %+v", w.conflicts, w.events)
		}
		e := w.events[0]
		if e.Regarding.UID != "uid of young" || e.Related == nil || e.Related.UID != "uid of old" || e.Reason != reasonConflict ||
			!strings.HasPrefix(e.Note, "TCP 10.96.0.10:80, TCP 10.96.0.10:443: already served by Service default/old") {
			t.Errorf("%+v", e)
		}
		w.sink.DeleteService(types.NamespacedName{Namespace: "default", Name: "old"})
		w.sleep(time.Minute)
		if w.conflicts != 0 || len(w.events) != 1 {
			t.Errorf("%d conflicts after the older Service went, Events %+v", w.conflicts, w.events)
		}
	})
}

func TestComplaintIsAnEventOnce(t *testing.T) {
	run(t, nil, func(w *world) {
		w.synced()
		for range 3 {
			w.service("web", "not an address")
			w.sleep(time.Minute)
		}
		if len(w.events) != 1 || w.events[0].Regarding.Name != "web" || w.events[0].Reason != reasonUnusable || !strings.Contains(w.events[0].Note, "spec.clusterIPs[0]") {
			t.Errorf("Events %+v", w.events)
		}
	})
}

func TestRefusedHealthCheckIsAnEvent(t *testing.T) {
	run(t, nil, func(w *world) {
		w.synced()
		w.claim("web", "10.96.0.10", 10)
		w.sleep(time.Second)
		taken := errors.New("address already in use")
		w.proxy.HealthCheckRefused(types.NamespacedName{Namespace: "default", Name: "web"}, "0.0.0.0:30001", taken)
		w.proxy.HealthCheckRefused(types.NamespacedName{Namespace: "default", Name: "deleted"}, "0.0.0.0:30002", taken)
		want := []event.Warning{{
			Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: "default", Name: "web", UID: "uid of web"},
			Reason:    "FailedToStartServiceHealthcheck",
			Note:      `node node1 failed to start healthcheck "default/web" on 0.0.0.0:30001: address already in use`,
		}}
		if diff := cmp.Diff(want, w.events); diff != "" {
			t.Errorf("Events (-want +got):\n%s", diff)
		}
	})
}

// TestMissingScheduler checks that the Service is served with the node's
// scheduler, and that its own is probed again without a change of the Service.
func TestMissingScheduler(t *testing.T) {
	run(t, nil, func(w *world) {
		w.synced()
		w.node.IPVS.Schedulers = []string{"rr"}
		ask := func(scheduler string) {
			w.sink.SetService(&corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Annotations: map[string]string{"kube-ipvs.io/scheduler": scheduler}},
				Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.10", Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}}},
			})
			w.sleep(time.Minute)
		}
		w.slice("web", "10.244.0.2")
		ask("mh")
		if got := w.node.IPVS.Dump(); !strings.Contains(got, "-A -t 10.96.0.10:80 -s rr\n") || w.realServers("10.96.0.10") != 1 {
			t.Errorf("serves\n%s", got)
		}
		const want = `metadata.annotations[kube-ipvs.io/scheduler]: probe scheduler "mh"`
		if len(w.events) != 1 || !strings.Contains(w.events[0].Note, want) || !strings.Contains(w.events[0].Note, "modprobe ip_vs_mh") {
			t.Errorf("Events %+v", w.events)
		}
		w.node.IPVS.Schedulers = []string{"rr", "mh"}
		w.sleep(time.Minute)
		if got := w.node.IPVS.Dump(); !strings.Contains(got, "-A -t 10.96.0.10:80 -s mh -b mh-fallback,mh-port\n") {
			t.Errorf("serves\n%s", got)
		}
		ask("nosuch")
		if got := w.node.IPVS.Dump(); !strings.Contains(got, "-A -t 10.96.0.10:80 -s rr\n") || len(w.events) != 2 {
			t.Errorf("serves\n%s, Events %+v", got, w.events)
		}
	})
}

// TestNodeConflictEvent makes another program use our bit, stop, and use
// it again.
func TestNodeConflictEvent(t *testing.T) {
	run(t, nil, func(w *world) {
		w.sink.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", UID: "uid of node1"}})
		w.synced()
		theirs := routing.Rule{Family: ip.IPv4, Priority: 7, Mark: 0x6000, Mask: 0x6000, Table: 7}
		for _, op := range []routing.Op{routing.AddRule, routing.DeleteRule, routing.AddRule} {
			if failures := w.node.Routing.Do(routing.Change{Op: op, Rule: theirs}); len(failures) > 0 {
				t.Fatal(failures)
			}
			w.sleep(5 * time.Minute)
		}
		if len(w.events) != 2 {
			t.Fatalf("%d Events, want one for each time: %+v", len(w.events), w.events)
		}
		if e := w.events[0]; e.Regarding.Kind != "Node" || e.Regarding.UID != "uid of node1" || e.Reason != reasonNodeConflict || !strings.Contains(e.Note, "IPv4 rule 7: fwmark 0x6000/0x6000") {
			t.Errorf("%+v", e)
		}
	})
}
