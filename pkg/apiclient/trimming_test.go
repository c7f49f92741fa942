package apiclient

import (
	"encoding/binary"
	"net/http"
	"net/http/httptest"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// TestTrimmingClient lists and watches in protocol buffers, as the API server sends them.
func TestTrimmingClient(t *testing.T) {
	service := wholeService()
	list := encoded(t, &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "99"}, Items: []corev1.Service{service}})
	event, err := (&metav1.WatchEvent{Type: "ADDED", Object: runtime.RawExtension{Raw: encoded(t, &service)}}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
			_, _ = w.Write(list)
			return
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
		_, _ = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(event))), event...))
	}))
	defer s.Close()
	for name, tc := range map[string]struct {
		open func(*rest.Config) (*Client, error)
		want corev1.Service
	}{
		"trimming": {func(c *rest.Config) (*Client, error) { return NewTrimming(c, ours) }, trimmedService()},
		"other":    {New, wholeService()},
	} {
		c, err := tc.open(&rest.Config{Host: s.URL, QPS: -1})
		if err != nil {
			t.Fatal(err)
		}
		var got []*corev1.Service
		listMeta, err := c.Services("").Each(t.Context(), metav1.ListOptions{}, func(s *corev1.Service) { got = append(got, s) })
		if err != nil || len(got) != 1 || listMeta.ResourceVersion != "99" {
			t.Fatalf("%s: %+v, %v", name, got, err)
		}
		if !equality.Semantic.DeepEqual(got[0], &tc.want) {
			t.Errorf("%s: list has %+v", name, got[0])
		}
		w, err := c.Services("").Watch(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if svc, ok := (<-w.ResultChan()).Object.(*corev1.Service); !ok || !equality.Semantic.DeepEqual(svc.Spec, tc.want.Spec) || !equality.Semantic.DeepEqual(svc.ObjectMeta, tc.want.ObjectMeta) {
			t.Errorf("%s: watch has %+v", name, svc)
		}
		w.Stop()
	}
}
