package proxy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// everyFeature has Services that use most rules and sets.
func (w *world) everyFeature() {
	w.sink.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", UID: "uid of node1"}})
	local := corev1.ServiceExternalTrafficPolicyLocal
	for i, policy := range []corev1.ServiceExternalTrafficPolicy{corev1.ServiceExternalTrafficPolicyCluster, local} {
		name, vip := fmt.Sprintf("web%d", i), fmt.Sprintf("10.96.0.1%d", i)
		w.sink.SetService(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, ClusterIP: vip, ClusterIPs: []string{vip}, ExternalTrafficPolicy: policy,
				LoadBalancerSourceRanges: []string{"192.0.2.0/24"}, ExternalIPs: []string{fmt.Sprintf("203.0.113.2%d", i)},
				Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080 + int32(i)}},
			},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("203.0.113.1%d", i)}}}},
		})
		w.slice(name, "10.244.0.2")
	}
	w.synced()
	w.sleep(2 * time.Minute)
}

func claimPorts(o *Options) { o.Config.VIPs.LoadBalancers = plan.ClaimPort }

// partsInUse returns the extensions of the rules, as OmittedRule.Lacks names them, and the types of the
// sets, of everyFeature.
func partsInUse(t *testing.T) (extensions []string, types map[ipset.Type]bool) {
	types = map[ipset.Type]bool{}
	run(t, func(o *Options) {
		claimPorts(o)
		o.Kernel.IPSet.(*ipset.Fake).Refuse = func(c ipset.Change) error {
			if c.Op == ipset.CreateSet {
				types[c.Set.Type] = true
			}
			return nil
		}
	}, func(w *world) {
		w.everyFeature()
		for line := range strings.Lines(w.node.NAT[ip.IPv4].Save()) {
			for _, option := range []string{"-m", "-j"} {
				for _, name := range nat.Arguments(nat.Rule(strings.TrimSpace(line)), option) {
					known := slices.Contains([]string{"tcp", "udp", "icmp", "RETURN", "ACCEPT", "DROP"}, name) || strings.Contains(name, "-")
					if part := option + " " + name; !known && !slices.Contains(extensions, part) {
						extensions = append(extensions, part)
					}
				}
			}
		}
	})
	return extensions, types
}

// Each extension and set type that the kernel lacks is named in an Event on the Node, once,
// and in the log. The Services are served.
func TestMissingPartIsAnEvent(t *testing.T) {
	extensions, types := partsInUse(t)
	if len(extensions) < 8 || len(types) < 4 {
		t.Errorf("only %q and %v are in use", extensions, slices.Collect(maps.Keys(types)))
	}
	for _, part := range extensions {
		t.Run(part, func(t *testing.T) {
			want := "xt_" + part[3:]
			namedInEvent(t, want, func(o *Options, w *world) {
				w.node.NAT[ip.IPv4].Lacks = func(r nat.Rule) error {
					if slices.Contains(nat.Arguments(r, part[:2]), part[3:]) {
						return unix.ENOENT
					}
					return nil
				}
			})
		})
	}
	for kind := range types {
		t.Run(string(kind), func(t *testing.T) {
			namedInEvent(t, "create set KUBE-", func(o *Options, w *world) {
				sets := o.Kernel.IPSet.(*ipset.Fake)
				sets.Refuse = func(c ipset.Change) error {
					if c.Op == ipset.CreateSet && c.Set.Type == kind {
						return unix.EPROTO
					}
					return nil
				}
				exists := func(name string) bool { return strings.Contains(sets.Dump(), " "+name+" ") }
				w.node.NAT[ip.IPv4].HasSet = exists
				o.Kernel.NAT[ip.IPv6].(*nat.Fake).HasSet = exists
			})
		})
	}
	t.Run("scheduler", func(t *testing.T) {
		namedInEvent(t, "no IPVS scheduler rr", func(o *Options, w *world) {
			o.Config.Scheduler, o.Config.MissingScheduler = "wrr", "rr"
		})
	})
}

func namedInEvent(t *testing.T, want string, without func(*Options, *world)) {
	t.Helper()
	var made *world
	run(t, func(o *Options) {
		claimPorts(o)
		made = o.Observer.(*world)
		without(o, made)
	}, func(w *world) {
		w.everyFeature()
		w.sleep(10 * time.Minute)
		found := map[string]int{}
		for _, e := range w.events {
			if e.Regarding.Kind == "Node" && e.Reason == reasonNodeConflict && strings.Contains(e.Note, want) {
				found[e.Note]++
			}
		}
		if len(found) == 0 || len(found) > 12 {
			t.Errorf("%d Events name %q: %+v", len(found), want, w.events)
		}
		for note, times := range found {
			if times > 1 {
				t.Errorf("written %d times: %s", times, note)
			}
		}
		if log := strings.Join(w.logged(), "\n"); !strings.Contains(log, want) {
			t.Errorf("the log does not name %q:\n%s", want, log)
		}
		if w.realServers("10.96.0.10") != 1 {
			t.Errorf("the Service is not served:\n%s", w.node.IPVS.Dump())
		}
	})
}

// Omitted rules are reported soon, and written soon after the module is installed, although
// rules are otherwise compared every few minutes: nothing announces a module.
func TestOmittedRulesAreTriedAgain(t *testing.T) {
	var installed atomic.Bool
	run(t, func(o *Options) {
		o.RulesWatched = true
		o.Observer.(*world).node.NAT[ip.IPv4].Lacks = func(r nat.Rule) error {
			if strings.Contains(string(r), "MASQUERADE") && !installed.Load() {
				return unix.ENOENT
			}
			return nil
		}
	}, func(w *world) {
		w.sink.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", UID: "uid of node1"}})
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.sleep(10 * time.Second)
		if len(w.events) == 0 || !strings.Contains(w.events[0].Note, "MASQUERADE") {
			t.Errorf("Events: %+v", w.events)
		}
		w.sleep(5 * time.Minute)
		installed.Store(true)
		w.sleep(time.Minute)
		if !strings.Contains(w.node.NAT[ip.IPv4].Save(), "MASQUERADE") {
			t.Errorf("not written a minute after the module is there:\n%s", w.node.NAT[ip.IPv4].Save())
		}
	})
}
