package apiclient

import (
	"bytes"
	"encoding/json"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// serviceLister returns a lister of Services without a server.
func serviceLister(trim *Trim) *lister[corev1.Service, *corev1.Service] {
	return &lister[corev1.Service, *corev1.Service]{resource: "services", kind: "ServiceList", trim: trim.kinds()["Service"]}
}

func serviceList(t testing.TB, items ...corev1.Service) []byte {
	return encoded(t, &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "99", Continue: "more"}, Items: items})
}

// TestEach reads lists byte by byte, trimmed and complete, and compares them with what the
// decoder of client-go returns.
func TestEach(t *testing.T) {
	list := serviceList(t, wholeService(), corev1.Service{}, wholeService())
	asJSON, err := json.Marshal(corev1.ServiceList{
		TypeMeta: typed("ServiceList", "v1"), ListMeta: metav1.ListMeta{ResourceVersion: "99", Continue: "more"}, Items: []corev1.Service{wholeService(), {}, wholeService()},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		body []byte
		trim *Trim
		want corev1.Service
	}{
		"complete": {list, nil, wholeService()},
		"trimmed":  {list, &ours, trimmedService()},
		"JSON":     {asJSON, &ours, wholeService()},
	} {
		var got []*corev1.Service
		listMeta, err := serviceLister(tc.trim).read(iotest.OneByteReader(bytes.NewReader(tc.body)), func(s *corev1.Service) { got = append(got, s) })
		if err != nil || listMeta.ResourceVersion != "99" || listMeta.Continue != "more" || len(got) != 3 {
			t.Errorf("%s: %d objects, %+v, %v", name, len(got), listMeta, err)
			continue
		}
		want, _, err := protobufOf(t, nil).Decode(encoded(t, &tc.want), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range []int{0, 2} {
			got[i].TypeMeta = metav1.TypeMeta{}
			want.(*corev1.Service).TypeMeta = metav1.TypeMeta{}
			if got[i].CreationTimestamp.Equal(&want.(*corev1.Service).CreationTimestamp) {
				got[i].CreationTimestamp = want.(*corev1.Service).CreationTimestamp // in another time zone
			}
			if !reflect.DeepEqual(got[i], want) {
				t.Errorf("%s: got  %+v\nwant %+v", name, got[i], want)
			}
		}
	}
}

// TestEachSlice reads EndpointSlices of different sizes, trimmed.
func TestEachSlice(t *testing.T) {
	list := &discoveryv1.EndpointSliceList{Items: []discoveryv1.EndpointSlice{wholeSlice(2), wholeSlice(100), wholeSlice(2)}}
	l := &lister[discoveryv1.EndpointSlice, *discoveryv1.EndpointSlice]{kind: "EndpointSliceList", trim: ours.kinds()["EndpointSlice"]}
	var got []*discoveryv1.EndpointSlice
	if _, err := l.read(bytes.NewReader(encoded(t, list)), func(s *discoveryv1.EndpointSlice) { got = append(got, s) }); err != nil || len(got) != 3 {
		t.Fatalf("%d objects, %v", len(got), err)
	}
	for i, endpoints := range []int{2, 100, 2} {
		// As decoded without trimming: nil and empty are the same then.
		short := trimmedSlice(endpoints)
		want, _, err := protobufOf(t, nil).Decode(encoded(t, &short), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		want.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{}) // items of a list have none
		if !reflect.DeepEqual(got[i], want) {
			t.Errorf("got  %+v\nwant %+v", got[i], want)
		}
	}
}

// TestEachOfBrokenList cuts a list after each byte: an incomplete list is never taken for a
// complete one.
func TestEachOfBrokenList(t *testing.T) {
	list := serviceList(t, wholeService(), wholeService())
	for name, trim := range map[string]*Trim{"complete": nil, "trimmed": &ours} {
		read := func(body io.Reader) (int, error) {
			count := 0
			_, err := serviceLister(trim).read(body, func(*corev1.Service) { count++ })
			return count, err
		}
		// The envelope ends with two empty texts, without which the list is complete.
		const empty = 4
		for size := range len(list) - empty {
			if count, err := read(bytes.NewReader(list[:size])); err == nil {
				t.Errorf("%s: %d of %d bytes are read as a list of %d", name, size, len(list), count)
			}
		}
		if count, err := read(bytes.NewReader(list)); err != nil || count != 2 {
			t.Errorf("%s: %d objects, %v", name, count, err)
		}
		if _, err := read(io.MultiReader(bytes.NewReader(list[:100]), iotest.ErrReader(io.ErrClosedPipe))); err != io.ErrClosedPipe {
			t.Errorf("%s: a broken connection: %v", name, err)
		}
	}
}

func TestEachOfOtherKind(t *testing.T) {
	for name, body := range map[string][]byte{
		"another list":           encoded(t, &discoveryv1.EndpointSliceList{}),
		"a Status":               encoded(t, &metav1.Status{Message: "gone"}),
		"another list in JSON":   []byte(`{"kind":"NodeList","apiVersion":"v1","items":[{"metadata":{"name":"node1"}}]}`),
		"a Status in JSON":       []byte(`{"kind":"Status","apiVersion":"v1"}`),
		"no list":                []byte("k8s\x00"),
		"nothing":                nil,
		"an item of 2^62 bytes":  []byte("k8s\x00\x0a\x11\x0a\x02v1\x12\x0bServiceList\x12\xff\xff\xff\xff\xff\xff\xff\x3f\x12\xfe\xff\xff\xff\xff\xff\xff\x3f"),
		"an item of no Service":  []byte("k8s\x00\x0a\x11\x0a\x02v1\x12\x0bServiceList\x12\x03\x12\x01\xff"),
		"an unknown wire type":   []byte("k8s\x00\x0a\x11\x0a\x02v1\x12\x0bServiceList\x12\x01\x17"),
		"text instead of a list": []byte(strings.Repeat("no list ", 10)),
	} {
		count := 0
		if _, err := serviceLister(&ours).read(bytes.NewReader(body), func(*corev1.Service) { count++ }); err == nil || count > 0 {
			t.Errorf("%s: %d objects, error %v", name, count, err)
		}
	}
}

// FuzzEach reads damaged lists, which must not panic, and reads whatever client-go reads.
func FuzzEach(f *testing.F) {
	f.Add(serviceList(f, wholeService()))
	f.Add([]byte("k8s\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		count := 0
		_, err := serviceLister(&ours).read(bytes.NewReader(data), func(*corev1.Service) { count++ })
		whole, _, wholeErr := protobufOf(t, nil).Decode(data, nil, nil)
		if list, ok := whole.(*corev1.ServiceList); wholeErr == nil && ok && bytes.HasPrefix(data, prefix) && (err != nil || count != len(list.Items)) {
			t.Errorf("%d of %d objects, %v", count, len(list.Items), err)
		}
	})
}

// BenchmarkDecode decodes a list of EndpointSlices as client-go does, and object by object.
func BenchmarkDecode(b *testing.B) {
	const count = 1000
	list := &discoveryv1.EndpointSliceList{}
	for range count {
		list.Items = append(list.Items, wholeSlice(2))
	}
	data := encoded(b, list)
	read := func(trim *Trim) error {
		l := &lister[discoveryv1.EndpointSlice, *discoveryv1.EndpointSlice]{kind: "EndpointSliceList", trim: trim.kinds()["EndpointSlice"]}
		_, err := l.read(bytes.NewReader(data), func(*discoveryv1.EndpointSlice) {})
		return err
	}
	for name, decode := range map[string]func() error{
		"client-go": func() error { _, _, err := protobufOf(b, nil).Decode(data, nil, nil); return err },
		"complete":  func() error { return read(nil) },
		"trimmed":   func() error { return read(&ours) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := decode(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
