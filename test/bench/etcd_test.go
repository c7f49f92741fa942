//go:build e2e

package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/metadata"
)

// Objects whose creation through the API server would take minutes are written directly
// to etcd, encoded as the API server does. It learns of them through its watch of etcd.

// stored is an object as stored in etcd.
type stored struct {
	Key   []byte `json:"key"`
	Value []byte `json:"value"`
}

var encoder = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)

// store encodes an object for storage.
func store(key string, version schema.GroupVersion, kind string, object interface {
	runtime.Object
	metav1.Object
}) (stored, error) {
	object.SetUID(types.UID(key))
	object.SetGeneration(1)
	now := metav1.NewTime(time.Now())
	object.SetCreationTimestamp(now)
	object.SetManagedFields(metadata.ManagedFields("kube-controller-manager", version.String(), now))
	object.GetObjectKind().SetGroupVersionKind(version.WithKind(kind))
	var b bytes.Buffer
	err := encoder.Encode(object, &b)
	return stored{[]byte("/registry/" + key), b.Bytes()}, err
}

// storedService returns a Service with its slices, and the object by which the API server
// records that the cluster IP is allocated.
func (a *api) storedService(n int) ([]stored, error) {
	svc, slices := a.objects(n)
	svc.Namespace = a.space
	address := &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Name: svc.Spec.ClusterIP, Labels: map[string]string{
			networkingv1.LabelIPAddressFamily: string(corev1.IPv4Protocol), networkingv1.LabelManagedBy: "ipallocator.k8s.io",
		}},
		Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: a.space, Name: svc.Name}},
	}
	var objects []stored
	var errs []error
	add := func(o stored, err error) { objects, errs = append(objects, o), append(errs, err) }
	add(store("ipaddresses/"+address.Name, networkingv1.SchemeGroupVersion, "IPAddress", address))
	for _, slice := range slices {
		slice.Namespace = a.space
		add(store("endpointslices/"+a.space+"/"+slice.Name, discoveryv1.SchemeGroupVersion, "EndpointSlice", slice))
	}
	add(store("services/specs/"+a.space+"/"+svc.Name, corev1.SchemeGroupVersion, "Service", svc))
	return objects, errors.Join(errs...)
}

// perTransaction is the number of objects from which on a transaction is sent. etcd allows 128.
const perTransaction = 120

// grow creates Services until there are n.
func (a *api) grow(n int) {
	a.t.Helper()
	for a.count < n {
		var operations []map[string]stored
		for ; a.count < n && len(operations) < perTransaction; a.count++ {
			objects, err := a.storedService(a.count)
			must(a.t, err)
			for _, o := range objects {
				operations = append(operations, map[string]stored{"requestPut": o})
			}
		}
		must(a.t, transact(operations))
	}
	a.awaitCache(n - 1)
}

// replace deletes all Services, and creates n others; objects returns each with its slices.
func (a *api) replace(n int, objects func(n int) (*corev1.Service, []*discoveryv1.EndpointSlice)) {
	a.t.Helper()
	for _, kind := range []string{"services/specs/", "endpointslices/"} {
		prefix := "/registry/" + kind + a.space
		body, err := json.Marshal(map[string][]byte{"key": []byte(prefix + "/"), "range_end": []byte(prefix + "0")})
		must(a.t, err)
		must(a.t, send("deleterange", body))
	}
	lab.Eventually(a.t, 5*time.Minute, "the API server knows that all Services are deleted", func() error {
		cached := metav1.ListOptions{ResourceVersion: "0"}
		services, err := a.client.CoreV1().Services(a.space).List(a.t.Context(), cached)
		if err != nil {
			return err
		}
		endpoints, err := a.client.DiscoveryV1().EndpointSlices(a.space).List(a.t.Context(), cached)
		if err == nil && len(services.Items)+len(endpoints.Items) > 0 {
			err = fmt.Errorf("%d Services and %d EndpointSlices", len(services.Items), len(endpoints.Items))
		}
		return err
	})
	a.count, a.objects = 0, objects
	clear(a.versions)
	a.grow(n)
}

// awaitCache waits until a list contains the last created Service. The API server answers
// lists from the state that its watch of etcd has delivered.
func (a *api) awaitCache(n int) {
	a.t.Helper()
	cached := metav1.GetOptions{ResourceVersion: "0"}
	lab.Eventually(a.t, time.Minute, "the API server knows "+serviceName(n), func() error {
		if _, err := a.client.CoreV1().Services(a.space).Get(a.t.Context(), serviceName(n), cached); err != nil {
			return err
		}
		_, err := a.client.DiscoveryV1().EndpointSlices(a.space).Get(a.t.Context(), newSlice(n, 0).Name, cached)
		return err
	})
}

// writing is a request to etcd with changes.
type writing struct {
	body      []byte
	addresses []netip.Addr // the new ones
}

// prepare encodes the requests for a number of changes in advance, each of another
// Service: on an emulated machine encoding takes longer than sending.
func (a *api) prepare(services, changes int) []writing {
	a.t.Helper()
	out := make([]writing, changes/perWrites)
	for i := range out {
		var operations []map[string]stored
		for j := range perWrites {
			r := a.renewal((i*perWrites + j) % services)
			r.slice.Namespace = a.space
			o, err := store("endpointslices/"+a.space+"/"+r.slice.Name, discoveryv1.SchemeGroupVersion, "EndpointSlice", r.slice)
			must(a.t, err)
			operations = append(operations, map[string]stored{"requestPut": o})
			out[i].addresses = append(out[i].addresses, r.address)
		}
		body, err := transaction(operations)
		must(a.t, err)
		out[i].body = body
	}
	return out
}

func transact(operations []map[string]stored) error {
	body, err := transaction(operations)
	if err != nil {
		return err
	}
	return send("txn", body)
}

// transaction encodes a transaction for the JSON interface of etcd.
func transaction(operations []map[string]stored) ([]byte, error) {
	return json.Marshal(map[string]any{"success": operations})
}

// send sends a request to etcd.
func send(request string, body []byte) error {
	response, err := http.Post(os.Getenv("LAB_ETCD")+"/v3/kv/"+request, "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("etcd: %s: %s", response.Status, answer)
	}
	return err
}
