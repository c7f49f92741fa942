package service

import (
	"fmt"
	"math/rand"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// manySlices returns slices of a Service with distinct addresses, together enough that the result of
// merging them is kept.
func manySlices() []*discoveryv1.EndpointSlice {
	var list []*discoveryv1.EndpointSlice
	for i := range 12 {
		var endpoints []discoveryv1.Endpoint
		for j := range 100 {
			endpoints = append(endpoints, endpoint(fmt.Sprintf("10.244.%d.%d", j, 1+i)))
			endpoints[j].NodeName = ptr(fmt.Sprint("node-", j%3))
		}
		s := newSlice(fmt.Sprint("web-", 10+i), endpoints...)
		s.Ports = []discoveryv1.EndpointPort{{Name: ptr("a"), Port: ptr(int32(8080))}, {Name: ptr("b"), Port: ptr(int32(9090))}}
		list = append(list, s)
	}
	return list
}

// sliceChanges are changes of one of several slices. Those that are small let the endpoints be updated.
var sliceChanges = []struct {
	name   string
	small  bool
	change func(r *rand.Rand, s *discoveryv1.EndpointSlice)
}{
	{"nothing", true, func(*rand.Rand, *discoveryv1.EndpointSlice) {}},
	{"another address", true, func(r *rand.Rand, s *discoveryv1.EndpointSlice) {
		s.Endpoints[r.Intn(len(s.Endpoints))] = endpoint(unused(r))
	}},
	{"a condition", true, func(r *rand.Rand, s *discoveryv1.EndpointSlice) {
		s.Endpoints[r.Intn(len(s.Endpoints))].Conditions.Ready = ptr(r.Intn(2) > 0)
	}},
	{"a node", true, func(r *rand.Rand, s *discoveryv1.EndpointSlice) {
		s.Endpoints[r.Intn(len(s.Endpoints))].NodeName = ptr(fmt.Sprint("node-", r.Intn(9)))
	}},
	{"one less", true, func(r *rand.Rand, s *discoveryv1.EndpointSlice) {
		at := r.Intn(len(s.Endpoints))
		s.Endpoints = slices.Delete(s.Endpoints, at, at+1)
	}},
	{"one more", true, func(r *rand.Rand, s *discoveryv1.EndpointSlice) {
		s.Endpoints = append(s.Endpoints, endpoint(unused(r)))
	}},
	{"an address twice", false, func(_ *rand.Rand, s *discoveryv1.EndpointSlice) {
		s.Endpoints = append(s.Endpoints, s.Endpoints[0])
		s.Endpoints[0].Conditions.Ready = ptr(false)
	}},
	{"a new address twice", false, func(r *rand.Rand, s *discoveryv1.EndpointSlice) {
		e := endpoint(unused(r))
		s.Endpoints = append(s.Endpoints, e, e)
	}},
	{"an address of another slice", false, func(_ *rand.Rand, s *discoveryv1.EndpointSlice) {
		e := endpoint(fmt.Sprintf("10.244.7.%d", 12))
		e.NodeName = ptr("other")
		s.Endpoints = append(s.Endpoints, e)
	}},
	{"many addresses", false, func(r *rand.Rand, s *discoveryv1.EndpointSlice) {
		for i := range 9 {
			s.Endpoints[10*i] = endpoint(unused(r))
		}
	}},
	{"a port", false, func(r *rand.Rand, s *discoveryv1.EndpointSlice) { s.Ports[0].Port = ptr(int32(8081 + r.Intn(1000))) }},
	{"a port twice", false, func(_ *rand.Rand, s *discoveryv1.EndpointSlice) {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr("a"), Port: ptr(int32(8082))})
	}},
	{"another port", false, func(r *rand.Rand, s *discoveryv1.EndpointSlice) { s.Ports[0].Name = ptr(fmt.Sprint("c", r.Intn(1000))) }},
}

// unused returns an address that no slice has, most likely.
func unused(r *rand.Rand) string {
	return fmt.Sprintf("10.%d.%d.%d", 243+2*r.Intn(2), r.Intn(250), 1+r.Intn(250))
}

// TestUpdate changes slices of a Service with many endpoints, and builds it again in the memory of the
// last time. The result is that of all slices. After a small change, the slices are not merged again.
func TestUpdate(t *testing.T) {
	svc := newService(func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80}, {Name: "b", Port: 81}, {Name: "none", Port: 82}}
	})
	weighed := svc.DeepCopy()
	weighed.Annotations = map[string]string{AnnotationWeights: nodePrefix + "node-1=5"}
	for _, tc := range sliceChanges {
		t.Run(tc.name, func(t *testing.T) {
			r := rand.New(rand.NewSource(1))
			for range 5 {
				list, scratch := manySlices(), &Scratch{}
				kept := make([]*Slice, len(list))
				for i := range list {
					kept[i] = parseSlice(list[i])
				}
				for step, s := range []*corev1.Service{svc, svc, svc, weighed, svc} {
					if step > 0 {
						at := r.Intn(len(list) - 1)
						tc.change(r, list[at])
						kept = slices.Clone(kept)
						kept[at] = parseSlice(list[at])
					}
					want := mustBuild(t, s, list...)
					got, err := Parse(s).In(scratch, kept)
					if err != nil {
						t.Fatal(err)
					}
					for i := range want.Ports {
						if !slices.Equal(want.Ports[i].Endpoints, got.Ports[i].Endpoints) {
							t.Fatalf("step %d, port %s:\n%v, want\n%v", step, want.Ports[i].Name, endpointsOf(got.Ports[i]), endpointsOf(want.Ports[i]))
						}
					}
				}
				if got := updates(scratch, list, kept, r, tc.change); got != tc.small {
					t.Fatalf("updated: %v, want %v", got, tc.small)
				}
			}
		})
	}
}

// updates reports whether one more change updates the endpoints of the first port, which were
// merged last without weights.
func updates(scratch *Scratch, list []*discoveryv1.EndpointSlice, kept []*Slice, r *rand.Rand, change func(*rand.Rand, *discoveryv1.EndpointSlice)) bool {
	at := r.Intn(len(list) - 1)
	change(r, list[at])
	kept = slices.Clone(kept)
	kept[at] = parseSlice(list[at])
	return scratch.kept[0].update(kept)
}

// Neither several changed slices nor another number of slices is an update. Nor is a change where
// another slice reports an address twice.
func TestUpdateOfOneSliceOnly(t *testing.T) {
	svc := newService(func(s *corev1.Service) { s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80}} })
	var kept []*Slice
	for _, s := range manySlices() {
		kept = append(kept, parseSlice(s))
	}
	again := func(at ...int) []*Slice {
		list := slices.Clone(kept)
		for _, i := range at {
			list[i] = parseSlice(manySlices()[i])
		}
		return list
	}
	for _, tc := range []struct {
		name   string
		slices []*Slice
		want   bool
	}{{"none", again(), true}, {"one", again(3), true}, {"two", again(3, 5), false}, {"one less", again()[1:], false}} {
		scratch := &Scratch{}
		if _, err := Parse(svc).In(scratch, kept); err != nil {
			t.Fatal(err)
		}
		if got := scratch.kept[0].update(tc.slices); got != tc.want {
			t.Errorf("%s changed: updated %v, want %v", tc.name, got, tc.want)
		}
	}
	twice := manySlices()[5]
	twice.Endpoints = append(twice.Endpoints, twice.Endpoints[0])
	kept[5] = parseSlice(twice)
	scratch := &Scratch{}
	if _, err := Parse(svc).In(scratch, kept); err != nil {
		t.Fatal(err)
	}
	if scratch.kept[0].update(again(3)) {
		t.Error("updated, although an address is reported twice")
	}
}
