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

// Scheduling is an IPVS scheduler and its flags. The zero value is the node's default.
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
			b.annotationf(AnnotationSchedulerFlags, "%q needs %s, which is not set", list, AnnotationScheduler)
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

// maxConnections returns the annotation's value, or 0 without it.
func (b *builder) maxConnections(svc *corev1.Service) uint32 {
	text, set := svc.Annotations[AnnotationMaxConnections]
	if !set {
		return 0
	}
	n, err := strconv.ParseUint(text, 10, 31)
	if err != nil || n == 0 {
		b.annotationf(AnnotationMaxConnections, "%q is not a number of connections from 1 to %d", text, math.MaxInt32)
		return 0
	}
	return uint32(n)
}

// weights are the weights of zones and nodes in the annotation.
type weights map[string]int32

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

// parseWeight rejects 0, which is reserved for draining real servers.
func parseWeight(item string) (name string, weight int32, err error) {
	name, number, ok := strings.Cut(item, "=")
	if !ok || name == "" || name == nodePrefix {
		return "", 0, errors.New("a name is missing")
	}
	w, err := strconv.ParseUint(number, 10, 16)
	if err != nil || w == 0 {
		return "", 0, errors.New("weight must be from 1 to 65535")
	}
	return name, int32(w), nil
}

// of returns an endpoint's weight, or 0 if none is set.
func (w weights) of(e *Endpoint) int32 {
	if weight, ok := w[nodePrefix+e.Node]; ok && e.Node != "" {
		return weight
	}
	return w[e.Zone]
}

// weigh sets the weights of endpoints.
func (w weights) weigh(endpoints []Endpoint) {
	if len(w) == 0 {
		return
	}
	for i := range endpoints {
		endpoints[i].Weight = w.of(&endpoints[i])
	}
}
