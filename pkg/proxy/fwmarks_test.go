package proxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

func serviceName(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

// externalLocal adds a Service with a load balancer IP and a node-local endpoint.
func (w *world) externalLocal(name, vip string) {
	clusterIP := strings.Replace(vip, "203.0.113", "10.96.0", 1)
	w.sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
			ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: vip}}}},
	})
	slice := newSlice(name, "10.244.0.2", "10.244.9.9")
	slice.Endpoints[0].NodeName = ptr.To("node1")
	w.sink.SetEndpointSlice(slice)
}

// TestRestartKeepsFWMarks deletes the first of two Services: a process that assigned
// new fwmarks would give the other that fwmark.
func TestRestartKeepsFWMarks(t *testing.T) {
	var o Options
	var before string
	run(t, func(options *Options) { o = *options }, func(w *world) {
		w.externalLocal("a", "203.0.113.1")
		w.externalLocal("b", "203.0.113.2")
		w.synced()
		w.sink.DeleteService(serviceName("a"))
		w.sleep(time.Minute)
		before = w.node.IPVS.Dump()
		o.Kernel.IPVS.(*ipvs.Fake).Counts()
		o.Kernel.IPSet.(*ipset.Fake).Counts()
		if !strings.Contains(before, "-A -f 13 ") || strings.Contains(before, "-A -f 11 ") {
			t.Errorf("before the restart:\n%s", before)
		}
	})
	run(t, func(options *Options) { options.Kernel = o.Kernel }, func(w *world) {
		w.externalLocal("b", "203.0.113.2")
		w.synced()
		w.sleep(time.Minute)
		if got := o.Kernel.IPVS.(*ipvs.Fake).Dump(); got != before {
			t.Errorf("after the restart:\n%s\nwant\n%s", got, before)
		}
		if servers, sets := o.Kernel.IPVS.(*ipvs.Fake).Counts(), o.Kernel.IPSet.(*ipset.Fake).Counts(); len(servers)+len(sets) > 0 {
			t.Errorf("the restart wrote %v, %v", servers, sets)
		}
	})
}

// TestFWMarkIsFreeAfterDeletion refuses a deletion.
func TestFWMarkIsFreeAfterDeletion(t *testing.T) {
	run(t, nil, func(w *world) {
		w.externalLocal("a", "203.0.113.1")
		w.synced()
		w.setRefuse(func(change string) error {
			if strings.HasPrefix(change, "delete virtual server FWM") {
				return unix.ENOMEM
			}
			return nil
		})
		w.sink.DeleteService(serviceName("a"))
		w.sleep(time.Second)
		w.externalLocal("b", "203.0.113.2")
		w.sleep(time.Second)
		if got := w.node.IPVS.Dump(); !strings.Contains(got, "-A -f 11 ") || !strings.Contains(got, "-A -f 13 ") {
			t.Errorf("b got a fwmark that a still has:\n%s", got)
		}
		w.setRefuse(nil)
		w.sleep(time.Minute)
		w.externalLocal("c", "203.0.113.3")
		w.sleep(time.Second)
		if got := w.node.IPVS.Dump(); strings.Count(got, "-A -f 11 ") != 1 || !strings.Contains(got, "203.0.113.3:80") {
			t.Errorf("c did not get the freed fwmark:\n%s", got)
		}
	})
}

// TestFWMarksRunOut checks that internal clients of the last of several Services get
// only node-local endpoints until a fwmark is free.
func TestFWMarksRunOut(t *testing.T) {
	run(t, func(o *Options) { o.Config.LocalMark.Mask = 0xb }, func(w *world) { // one fwmark
		w.externalLocal("a", "203.0.113.1")
		w.synced()
		w.externalLocal("b", "203.0.113.2")
		w.sleep(time.Second)
		count := func(vip string) int { return strings.Count(w.node.IPVS.Dump(), fmt.Sprintf("-a -t %s:80 ", vip)) }
		if got := w.node.IPVS.Dump(); strings.Count(got, "-A -f ") != 1 || count("203.0.113.2") != 1 {
			t.Errorf("with one fwmark:\n%s", got)
		}
		said := func(e event.Warning) bool {
			return e.Regarding.Name == "b" && strings.Contains(e.Note, "203.0.113.2:80: all 1 IPv4 fwmarks")
		}
		if !slices.ContainsFunc(w.events, said) {
			t.Errorf("no Event tells that internal clients of b reach only endpoints of this node: %v", w.events)
		}
		w.sink.DeleteService(serviceName("a"))
		w.sleep(time.Second)
		synctest.Wait()
		if got := w.node.IPVS.Dump(); strings.Count(got, "-A -f 11 ") != 1 || count("203.0.113.2") != 1 {
			t.Errorf("with a free fwmark:\n%s", got)
		}
	})
}
