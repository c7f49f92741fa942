//go:build e2e

package e2e

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// api writes objects to the lab's API server as users and controllers do; no controllers
// run. It deletes its objects after the test, because all tests share the server and
// every proxy sees all objects.
type api struct {
	t         testing.TB
	client    kubernetes.Interface
	namespace string
	undo      []func(context.Context) error
}

// newAPI connects to the server and creates a namespace for the test. Call it before the
// lab is created: then its cleanup runs after the lab's, which saves the state of a
// failed test.
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
	t.Cleanup(a.clean)
	ns, err := client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}, metav1.CreateOptions{})
	a.must(err)
	a.namespace = ns.Name
	return a
}

// clean deletes the objects. It keeps the namespace, which only a controller could
// delete.
func (a *api) clean() {
	for i := len(a.undo) - 1; i >= 0; i-- {
		if err := a.undo[i](context.Background()); err != nil && !apierrors.IsNotFound(err) {
			a.t.Errorf("clean up the API server: %v", err)
		}
	}
}

func (a *api) must(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}

// addService creates a Service in the namespace, and then its status, as the
// cloud's controller does.
func (a *api) addService(svc *corev1.Service) {
	a.t.Helper()
	services := a.client.CoreV1().Services(a.namespace)
	svc.Namespace = a.namespace
	created, err := services.Create(a.t.Context(), svc, metav1.CreateOptions{})
	a.must(err)
	a.undo = append(a.undo, func(ctx context.Context) error {
		return services.Delete(ctx, svc.Name, metav1.DeleteOptions{})
	})
	if len(svc.Status.LoadBalancer.Ingress) > 0 {
		created.Status = svc.Status
		_, err = services.UpdateStatus(a.t.Context(), created, metav1.UpdateOptions{})
		a.must(err)
	}
}

// changeService changes the specification and annotations of a Service of the namespace.
func (a *api) changeService(name string, change func(*corev1.Service)) {
	a.t.Helper()
	services := a.client.CoreV1().Services(a.namespace)
	svc, err := services.Get(a.t.Context(), name, metav1.GetOptions{})
	a.must(err)
	change(svc)
	_, err = services.Update(a.t.Context(), svc, metav1.UpdateOptions{})
	a.must(err)
}

// addSlice creates an EndpointSlice in the namespace.
func (a *api) addSlice(slice *discoveryv1.EndpointSlice) {
	a.t.Helper()
	slices := a.client.DiscoveryV1().EndpointSlices(a.namespace)
	slice.Namespace = a.namespace
	_, err := slices.Create(a.t.Context(), slice, metav1.CreateOptions{})
	a.must(err)
	a.undo = append(a.undo, func(ctx context.Context) error {
		return slices.Delete(ctx, slice.Name, metav1.DeleteOptions{})
	})
}

// setSlice replaces an EndpointSlice of the namespace.
func (a *api) setSlice(slice *discoveryv1.EndpointSlice) {
	a.t.Helper()
	slice.Namespace = a.namespace
	_, err := a.client.DiscoveryV1().EndpointSlices(a.namespace).Update(a.t.Context(), slice, metav1.UpdateOptions{})
	a.must(err)
}

// addNode creates a Node with its addresses, as a kubelet does.
func (a *api) addNode(node *corev1.Node) {
	a.t.Helper()
	nodes := a.client.CoreV1().Nodes()
	created, err := nodes.Create(a.t.Context(), node, metav1.CreateOptions{})
	a.must(err)
	a.undo = append(a.undo, func(ctx context.Context) error {
		return nodes.Delete(ctx, node.Name, metav1.DeleteOptions{})
	})
	created.Status.Addresses = node.Status.Addresses
	_, err = nodes.UpdateStatus(a.t.Context(), created, metav1.UpdateOptions{})
	a.must(err)
}
