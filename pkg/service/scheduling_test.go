package service

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

func annotated(pairs ...string) *corev1.Service {
	return newService(func(s *corev1.Service) {
		s.Annotations = map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			s.Annotations["kube-ipvs.io/"+pairs[i]] = pairs[i+1]
		}
	})
}

// Errors name what is invalid, and the default is used.
func TestScheduling(t *testing.T) {
	for _, tc := range []struct {
		annotations []string
		want        Scheduling
		err         string
	}{
		{nil, Scheduling{}, ""},
		{[]string{"scheduler", "wrr"}, Scheduling{Scheduler: "wrr"}, ""},
		{[]string{"scheduler", "mh"}, Scheduling{"mh", ipvs.FlagSched1 | ipvs.FlagSched2}, ""},
		{[]string{"scheduler", "mh", "scheduler-flags", ""}, Scheduling{Scheduler: "mh"}, ""},
		{[]string{"scheduler", "mh", "scheduler-flags", "mh-port"}, Scheduling{"mh", ipvs.FlagSched2}, ""},
		{[]string{"scheduler", "maglev"}, Scheduling{}, `Service shop/web: metadata.annotations[kube-ipvs.io/scheduler]: "maglev" is none of rr, wrr`},
		{[]string{"scheduler", ""}, Scheduling{}, `kube-ipvs.io/scheduler]: "" is none of`},
		{[]string{"scheduler", "sh", "scheduler-flags", "mh-port"}, Scheduling{"sh", ipvs.FlagSched1}, `kube-ipvs.io/scheduler-flags]: "mh-port" is none of sh-fallback, sh-port`},
		{[]string{"scheduler-flags", "mh-port"}, Scheduling{}, `kube-ipvs.io/scheduler-flags]: "mh-port" needs kube-ipvs.io/scheduler, which is not set`},
	} {
		s, err := Build(annotated(tc.annotations...), nil)
		if s.Scheduling != tc.want || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%q: %+v, %v, want %+v, %s", tc.annotations, s.Scheduling, err, tc.want, tc.err)
		}
	}
}

func TestWeights(t *testing.T) {
	inZone := func(addr, zone, node string) discoveryv1.Endpoint {
		e := endpoint(addr)
		e.Zone, e.NodeName = &zone, &node
		return e
	}
	slice := newSlice("web-1", inZone("10.244.1.5", "a", "one"), inZone("10.244.2.5", "b", "two"), endpoint("10.244.3.5"))
	for _, tc := range []struct {
		text string
		want []int32
		err  string
	}{
		{"", []int32{0, 0, 0}, ""},
		{"a=3", []int32{3, 0, 0}, ""},
		{"a=3, b=2", []int32{3, 2, 0}, ""},
		{"a=3,node/one=7,node/two=65535", []int32{7, 65535, 0}, ""},
		{"one=3", []int32{0, 0, 0}, ""},
		{"a=3,b=0", []int32{3, 0, 0}, `Service shop/web: metadata.annotations[kube-ipvs.io/weights]: "b=0" is not ZONE=WEIGHT or node/NODE=WEIGHT: weight must be from 1 to 65535`},
		{"b=65536,a=2", []int32{2, 0, 0}, "weight must be from 1 to 65535"},
		{"a", []int32{0, 0, 0}, "a name is missing"},
		{"=3", []int32{0, 0, 0}, "a name is missing"},
		{"node/=3", []int32{0, 0, 0}, "a name is missing"},
	} {
		s, err := Build(annotated("weights", tc.text), []*discoveryv1.EndpointSlice{slice})
		var got []int32
		for _, e := range s.Ports[0].Endpoints {
			got = append(got, e.Weight)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%q: %v, %v", tc.text, got, err)
		}
	}
}

func TestMaxConnections(t *testing.T) {
	for value, want := range map[string]uint32{"1": 1, "2147483647": 2147483647, "0": 0, "-1": 0, "2147483648": 0, "many": 0, "": 0} {
		s, err := Build(annotated("max-connections", value), nil)
		if s.MaxConnections != want || (err == nil) != (want != 0) {
			t.Errorf("%q: %d, %v", value, s.MaxConnections, err)
		}
		if err != nil && !strings.Contains(err.Error(), "kube-ipvs.io/max-connections]: \""+value+"\" is not") {
			t.Errorf("%q: %v", value, err)
		}
	}
}

func TestOnePacket(t *testing.T) {
	for _, tc := range []struct {
		value    string
		affinity bool
		want     bool
		err      string
	}{
		{"true", false, true, ""},
		{"false", false, false, ""},
		{"", false, false, `kube-ipvs.io/one-packet]: invalid value "", want true or false`},
		{"true", true, false, "kube-ipvs.io/one-packet]: cannot be combined with session affinity"},
	} {
		svc := annotated("one-packet", tc.value)
		if tc.affinity {
			svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		}
		s, err := Build(svc, nil)
		if s.OnePacket != tc.want || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%q: %t, %v", tc.value, s.OnePacket, err)
		}
	}
}
