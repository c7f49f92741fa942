package apiserver

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

// unreachableWorld is a source that watches a fake API server, in a synctest bubble.
type unreachableWorld struct {
	t           *testing.T
	client      *fake.Clientset
	unreachable []string     // in the last call
	told        int          // number of calls
	asked       atomic.Int32 // requests for other Nodes
	down        atomic.Bool  // requests for them fail
}

func (w *unreachableWorld) SetService(*corev1.Service)                  {}
func (w *unreachableWorld) DeleteService(types.NamespacedName)          {}
func (w *unreachableWorld) SetEndpointSlice(*discoveryv1.EndpointSlice) {}
func (w *unreachableWorld) DeleteEndpointSlice(types.NamespacedName)    {}
func (w *unreachableWorld) SetNode(*corev1.Node)                        {}
func (w *unreachableWorld) DeleteNode()                                 {}
func (w *unreachableWorld) Begun()                                      {}
func (w *unreachableWorld) Synced()                                     {}
func (w *unreachableWorld) SetUnreachableNodes(nodes []string) {
	w.unreachable, w.told = nodes, w.told+1
}

// onNodes starts a source on node1, with a slice for each text: endpoints as "node2",
// "node2:unready", "node2:terminating" or "node2:published" (unready, but published as
// ready).
func onNodes(t *testing.T, slices []string, test func(*unreachableWorld)) {
	synctest.Test(t, func(t *testing.T) {
		var objects []runtime.Object
		for _, name := range []string{"node1", "node2", "node3", "node4"} {
			objects = append(objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		for i, text := range slices {
			objects = append(objects, sliceOf(i, text))
		}
		w := &unreachableWorld{t: t, client: fake.NewClientset(objects...)}
		w.client.PrependReactor("list", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
			if strings.Contains(a.(k8stesting.ListAction).GetListRestrictions().Fields.String(), "node1") {
				return false, nil, nil
			}
			w.asked.Add(1)
			if w.down.Load() {
				return true, nil, errors.New("no answer")
			}
			return false, nil, nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- New(fakeClient{w.client}, Options{Node: "node1", UnreachableNodes: true}).Run(ctx, w) }()
		w.after(time.Second)
		test(w)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func sliceOf(number int, text string) *discoveryv1.EndpointSlice {
	slice := &discoveryv1.EndpointSlice{ObjectMeta: meta("web-" + string(rune('a'+number)))}
	for i, word := range strings.Fields(text) {
		node, state, _ := strings.Cut(word, ":")
		ready := state == ""
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{"10.244.0." + string(rune('1'+i))}, NodeName: ptr.To(node),
			Conditions: discoveryv1.EndpointConditions{
				Ready: ptr.To(ready || state == "published"), Serving: ptr.To(ready), Terminating: ptr.To(state == "terminating"),
			},
		})
	}
	return slice
}

// after advances the time, and waits for what happens meanwhile.
func (w *unreachableWorld) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (w *unreachableWorld) set(number int, text string) {
	w.t.Helper()
	if _, err := w.client.DiscoveryV1().EndpointSlices("default").Update(w.t.Context(), sliceOf(number, text), metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// setReady sets the Ready condition and the taints of a node.
func (w *unreachableWorld) setReady(node string, status corev1.ConditionStatus, taints ...corev1.Taint) {
	w.t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: corev1.NodeSpec{Taints: taints}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse}, {Type: corev1.NodeReady, Status: status}}
	if _, err := w.client.CoreV1().Nodes().Update(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *unreachableWorld) want(when, lost string, asked int) {
	w.t.Helper()
	if got := strings.Join(w.unreachable, " "); got != lost {
		w.t.Errorf("%s: lost nodes are %q, want %q", when, got, lost)
	}
	if got := int(w.asked.Load()); got != asked {
		w.t.Errorf("%s: asked %d times, want %d", when, got, asked)
	}
}

// TestIssue89392LostNode reports a node as lost within seconds of its endpoints becoming
// unready, and as reachable with the first ready one.
func TestIssue89392LostNode(t *testing.T) {
	onNodes(t, []string{"node1 node2", "node2 node3"}, func(w *unreachableWorld) {
		w.setReady("node2", corev1.ConditionUnknown)
		w.set(0, "node1 node2:unready")
		w.after(firstCheckMax)
		w.want("another endpoint of the node is ready", "", 0)
		w.set(1, "node2:unready node3")
		w.after(firstCheckMax)
		w.want("none is", "node2", 1)
		w.set(1, "node2:terminating node3")
		w.after(time.Hour)
		if w.told != 1 {
			t.Errorf("%d reports that it is lost", w.told)
		}
		w.set(0, "node1 node2")
		w.after(0)
		w.want("one is back", "", int(w.asked.Load()))
	})
}

func TestLostNodeConditions(t *testing.T) {
	for _, tc := range []struct {
		name string
		say  func(*unreachableWorld)
		lost string
	}{
		{"nothing", func(*unreachableWorld) {}, ""},
		{"its kubelet says that it is not ready", func(w *unreachableWorld) { w.setReady("node2", corev1.ConditionFalse) }, ""},
		{"it is ready", func(w *unreachableWorld) { w.setReady("node2", corev1.ConditionTrue) }, ""},
		{"out of service", func(w *unreachableWorld) {
			w.setReady("node2", corev1.ConditionFalse, corev1.Taint{Key: "node.kubernetes.io/out-of-service"})
		}, "node2"},
		{"shut down", func(w *unreachableWorld) {
			w.setReady("node2", corev1.ConditionFalse, corev1.Taint{Key: "node.cloudprovider.kubernetes.io/shutdown"})
		}, "node2"},
		{"another taint", func(w *unreachableWorld) {
			w.setReady("node2", corev1.ConditionTrue, corev1.Taint{Key: "dedicated"})
		}, ""},
		{"it is deleted", func(w *unreachableWorld) {
			if err := w.client.CoreV1().Nodes().Delete(w.t.Context(), "node2", metav1.DeleteOptions{}); err != nil {
				w.t.Fatal(err)
			}
		}, "node2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			onNodes(t, []string{"node1 node2"}, func(w *unreachableWorld) {
				tc.say(w)
				w.set(0, "node1 node2:unready")
				w.after(firstCheckMax)
				w.want("then", tc.lost, 1)
			})
		})
	}
}

// TestNoRequestsForHealthyNodes starts and ends pods as in every rollout, and makes this
// node's own endpoints fail.
func TestNoRequestsForHealthyNodes(t *testing.T) {
	for _, tc := range []struct{ name, before, after string }{
		{"a pod that begins", "node1", "node1 node2:unready"},
		{"a pod that ends", "node1 node2", "node1 node2:terminating"},
		{"the node's own", "node1 node2", "node1:unready node2"},
		{"none has a node", "node1 :unready", "node1 :unready"},
		{"gone", "node1 node2", "node1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			onNodes(t, []string{tc.before}, func(w *unreachableWorld) {
				w.setReady("node2", corev1.ConditionUnknown)
				w.set(0, tc.after)
				w.after(time.Hour)
				w.want("after an hour", "", 0)
			})
		})
	}
}

// TestReadyInNameOnly publishes an endpoint that is not ready.
func TestReadyInNameOnly(t *testing.T) {
	onNodes(t, []string{"node1 node2", "node2:published node3"}, func(w *unreachableWorld) {
		w.setReady("node2", corev1.ConditionUnknown)
		w.set(0, "node1 node2:unready")
		w.after(firstCheckMax)
		w.want("then", "node2", 1)
	})
}

// TestLostBeforeTheStart starts when the node is already lost: no earlier state is known.
func TestLostBeforeTheStart(t *testing.T) {
	onNodes(t, []string{"node1 node2:unready"}, func(w *unreachableWorld) {
		w.setReady("node2", corev1.ConditionUnknown)
		w.after(firstCheckMax)
		w.want("after the start", "node2", 1)
	})
}

// TestRetriesAreRare: a node whose kubelet fails may die later, and an API server that
// does not answer may answer later.
func TestRetriesAreRare(t *testing.T) {
	onNodes(t, []string{"node1 node2"}, func(w *unreachableWorld) {
		w.down.Store(true)
		w.setReady("node2", corev1.ConditionFalse)
		w.set(0, "node1 node2:unready")
		w.after(firstCheckMax + recheckMin)
		w.want("no answer, twice", "", 2)
		w.down.Store(false)
		w.after(2 * recheckMin)
		w.want("its kubelet answers", "", 3)
		w.setReady("node2", corev1.ConditionUnknown)
		w.after(4 * recheckMin)
		w.want("and then does not", "node2", 4)
		w.down.Store(true)
		w.after(time.Hour)
		if asked := w.asked.Load(); asked < 12 || asked > 18 {
			t.Errorf("asked %d times in an hour", asked)
		}
		w.want("no answer is no news", "node2", int(w.asked.Load()))
	})
}

// TestMostNodesAreNotLost: most nodes look lost if the API server is cut off from them.
func TestMostNodesAreNotLost(t *testing.T) {
	onNodes(t, []string{"node1 node2 node3 node4"}, func(w *unreachableWorld) {
		for _, node := range []string{"node2", "node3", "node4"} {
			w.setReady(node, corev1.ConditionUnknown)
		}
		w.set(0, "node1 node2:unready node3:unready node4")
		w.after(firstCheckMax)
		w.want("two of four", "node2 node3", 2)
		w.set(0, "node1 node2:unready node3:unready node4:unready")
		w.after(firstCheckMax)
		w.want("three of four", "node2 node3", 3)
		w.set(0, "node1 node2:unready node3:unready node4")
		w.after(time.Minute)
		w.set(0, "node1 node2:unready node3 node4")
		w.after(0)
		w.want("another one is back", "node2", int(w.asked.Load()))
		w.set(0, "node1:unready node2:unready node3:unready node4:unready")
		w.after(firstCheckMax)
		w.want("again three of four", "node2", int(w.asked.Load()))
		w.set(0, "node1:unready node2 node3:unready node4:unready")
		w.after(0)
		w.want("one is back while most are not", "", int(w.asked.Load()))
	})
}
