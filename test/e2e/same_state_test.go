//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestSameState programs two equal nodes with the same objects, one from a folder, one from
// the API server, and compares the kernels. Neither uses --once, with which the rules that
// are otherwise written on demand are written at once.
func TestSameState(t *testing.T) {
	c := newCluster(t)
	services, endpointSlices := everyKind(c)
	objects := []runtime.Object{newNode(c.Nodes[0]), c.api.ownService()}
	for _, slice := range endpointSlices {
		c.api.addSlice(slice)
		objects = append(objects, slice)
	}
	for _, svc := range services {
		c.api.addService(svc)
		objects = append(objects, svc)
	}

	fromFolder := lab.NewThreeNodes(t).Nodes[0]
	fromFolder.AddPod(c.web1.Name)
	fromFolder.AddPod(c.caller1.Name)
	fromFolder.StartProxy(func(*lab.Process) error { return hasPassed(fromFolder.Node) },
		"--manifests", writeManifests(t, objects...), "--hostname-override", "node1", "--cluster-cidr", podCIDRs)
	c.startProxy(0)
	want := kernelState(fromFolder.Node)
	for _, svc := range services {
		for _, ip := range svc.Spec.ClusterIPs {
			if !strings.Contains(want, ip) {
				t.Errorf("%s: %s is not in the kernel", svc.Name, ip)
			}
		}
	}
	if diff := cmp.Diff(want, kernelState(c.Nodes[0].Node)); diff != "" {
		t.Errorf("from the folder (-), from the API server (+):\n%s", diff)
	}
}

// everyKind returns a Service of each kind, with the fields set that the API server would
// choose.
func everyKind(c *cluster) (services []*corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) {
	plain := newExposed("plain", 1)
	local := newExposed("local", 2)
	local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	local.Spec.HealthCheckNodePort = 31002
	inner := newDualStack("inner", 3)
	inner.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	sticky := newDualStack("sticky", 4)
	sticky.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	guarded := newExposed("guarded", 5)
	guarded.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "192.168.50.0/24", "fd00:51::/64"}
	services = []*corev1.Service{plain, local, inner, sticky, guarded}
	for _, svc := range services {
		endpointSlices = append(endpointSlices, dualStackSlices(svc, webPort, ready(c.web1), terminating(c.caller1), ready(c.web2))...)
	}
	return append(services, newExposed("empty", 6)), endpointSlices
}

// ownService returns the Service that the API server creates for itself.
func (a *api) ownService() *corev1.Service {
	a.t.Helper()
	svc, err := a.client.CoreV1().Services("default").Get(a.t.Context(), "kubernetes", metav1.GetOptions{})
	a.must(err)
	svc.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
	return svc
}

// badDocuments are a valid document, one with an invalid field, one with an unknown
// field, and another valid one.
const badDocuments = `apiVersion: v1
kind: Service
metadata: {name: first}
spec: {clusterIP: 10.96.2.1, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: second}
spec: {clusterIP: 10.96.2.2, ports: [{port: 70000}]}
---
apiVersion: v1
kind: Service
metadata: {name: third}
spec: {clusterIP: 10.96.2.3, ports: [{prot: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: fourth}
spec: {clusterIP: 10.96.2.4, ports: [{port: 80}]}
`

// TestBadDocuments checks that errors are reported with their position, and the rest is
// programmed.
func TestBadDocuments(t *testing.T) {
	node := lab.New(t).Node("node")
	dir := t.TempDir()
	file := filepath.Join(dir, "services.yaml")
	if err := os.WriteFile(file, []byte(badDocuments), 0o644); err != nil {
		t.Fatal(err)
	}
	code, output := node.RunProxy("--manifests", dir, "--once", "--hostname-override", "node")
	if code == 0 {
		t.Error("kube-ipvs --once ended with 0")
	}
	for _, fault := range [][]string{
		{file, "document 2", "spec.ports[0].port"},
		{file, "document 3", "spec.ports[0].prot"},
	} {
		said := slices.ContainsFunc(strings.Split(output, "\n"), func(line string) bool {
			return !slices.ContainsFunc(fault, func(word string) bool { return !strings.Contains(line, word) })
		})
		if !said {
			t.Errorf("no line names %q:\n%s", fault, output)
		}
	}
	var addresses []string
	for ip := range vips(node) {
		addresses = append(addresses, ip.String())
	}
	slices.Sort(addresses)
	if want := []string{"10.96.2.1", "10.96.2.4"}; !slices.Equal(addresses, want) || len(readIPVS(node)) != len(want) {
		t.Errorf("serves %v, want %v:\n%s", addresses, want, output)
	}
}
