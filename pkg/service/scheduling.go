package service

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// How a Service's connections are shared out, in place of what the node has
// for all Services.
const (
	// AnnotationScheduler on a Service names IPVS's scheduler, such as mh.
	AnnotationScheduler = "kube-ipvs.io/scheduler"
	// AnnotationSchedulerFlags beside it lists the scheduler's flags, such as
	// "mh-port,mh-fallback". Without it they are ipvs.DefaultFlags.
	AnnotationSchedulerFlags = "kube-ipvs.io/scheduler-flags"
	// AnnotationWeights on a Service lists the weights of the endpoints in a
	// zone, or on a node, which counts before the zone:
	// "zone-a=3,zone-b=1,node/worker-7=5". All others have weight 1.
	AnnotationWeights = "kube-ipvs.io/weights"
)

// Scheduling is IPVS's scheduler and its flags. The zero Scheduling is the
// node's own.
type Scheduling struct {
	Scheduler string
	Flags     ipvs.Flags
}

func (b *builder) annotationf(name, format string, args ...any) {
	b.errorf("metadata.annotations["+name+"]", format, args...)
}

func (b *builder) scheduling(svc *corev1.Service) Scheduling {
	scheduler, set := svc.Annotations[AnnotationScheduler]
	list, flagsSet := svc.Annotations[AnnotationSchedulerFlags]
	if !set {
		if flagsSet {
			b.annotationf(AnnotationSchedulerFlags, "%q is for the scheduler of %s, which is not set", list, AnnotationScheduler)
		}
		return Scheduling{}
	}
	if !slices.Contains(ipvs.Schedulers, scheduler) {
		b.annotationf(AnnotationScheduler, "%q is none of %s", scheduler, strings.Join(ipvs.Schedulers, ", "))
		return Scheduling{}
	}
	s := Scheduling{scheduler, ipvs.DefaultFlags(scheduler)}
	if flagsSet {
		flags, err := ipvs.ParseFlags(scheduler, list)
		if err != nil {
			b.annotationf(AnnotationSchedulerFlags, "%v", err)
			return s
		}
		s.Flags = flags
	}
	return s
}

// weights are those of zones and nodes, as the annotation names them.
type weights map[string]int

const nodePrefix = "node/"

func (b *builder) weights(svc *corev1.Service) weights {
	text := svc.Annotations[AnnotationWeights]
	if text == "" {
		return nil
	}
	out := weights{}
	for _, item := range strings.Split(text, ",") {
		name, weight, err := parseWeight(strings.TrimSpace(item))
		if err != nil {
			b.annotationf(AnnotationWeights, "%q is not ZONE=WEIGHT or %sNODE=WEIGHT: %v", item, nodePrefix, err)
			continue
		}
		out[name] = weight
	}
	return out
}

// parseWeight leaves 0 to real servers that drain.
func parseWeight(item string) (name string, weight int, err error) {
	name, number, ok := strings.Cut(item, "=")
	if !ok || name == "" || name == nodePrefix {
		return "", 0, errors.New("a name is missing")
	}
	weight, err = strconv.Atoi(number)
	if err != nil || weight < 1 || weight > math.MaxUint16 {
		return "", 0, errors.New("a weight is from 1 to 65535")
	}
	return name, weight, nil
}

// of is an endpoint's weight; 0 if none is given.
func (w weights) of(e *Endpoint) int {
	if weight, ok := w[nodePrefix+e.Node]; ok && e.Node != "" {
		return weight
	}
	return w[e.Zone]
}

// weigh gives endpoints their weights.
func (w weights) weigh(endpoints map[portKey][]Endpoint) {
	if len(w) == 0 {
		return
	}
	for _, list := range endpoints {
		for i := range list {
			list[i].Weight = w.of(&list[i])
		}
	}
}
