package service

import (
	"encoding/hex"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Parsed is the parsed form of a Service that is kept between changes. It has only the
// fields that are read, in a third of the memory of the API object.
type Parsed struct {
	Name types.NamespacedName

	uid        uuid  // zero if the UID has another form; then it is in rest
	created    int64 // seconds since 1970
	clusterIPs []netip.Addr
	ports      []parsedPort
	rest       *fields // nil if all other fields have their zero value
	proxied    bool
}

type parsedPort struct {
	name           unique.Handle[string]
	protocol       ip.Protocol
	port, nodePort uint16
}

// fields are a Service without endpoints, and the errors about its unusable fields.
type fields struct {
	Service
	weights     weights
	errs        []error
	errsOfPorts []error
}

// Parse parses a Service. It does not keep a reference to svc.
func Parse(svc *corev1.Service) *Parsed {
	id, isUUID := parseUUID(svc.UID)
	p := &Parsed{Name: nameOf(svc), uid: id, proxied: Proxied(svc)}
	if !p.proxied {
		return p
	}
	f := build(svc)
	if isUUID {
		f.UID = ""
	}
	p.created, p.clusterIPs = f.Created.Unix(), slices.Clip(f.ClusterIPs)
	p.ports = make([]parsedPort, len(f.Ports))
	for i, port := range f.Ports {
		p.ports[i] = parsedPort{unique.Make(port.Name), port.Protocol, port.Port, port.NodePort}
	}
	f.Name, f.Created, f.ClusterIPs, f.Ports = types.NamespacedName{}, time.Time{}, nil, nil
	if !reflect.ValueOf(f).Elem().IsZero() {
		p.rest = f
	}
	return p
}

// Proxied reports whether the Service gets virtual servers; see the function Proxied.
func (p *Parsed) Proxied() bool { return p.proxied }

// UID returns the Service's UID. If it is in no usual form, it is known only of a Service that
// is proxied.
func (p *Parsed) UID() types.UID {
	switch {
	case p.uid != (uuid{}):
		return p.uid.UID()
	case p.rest != nil:
		return p.rest.UID
	}
	return ""
}

// uuid is the usual form of a UID, in 16 bytes instead of 64 for the text.
type uuid [16]byte

// parseUUID returns false if the UID has another form than that of UID.
func parseUUID(uid types.UID) (id uuid, ok bool) {
	b, err := hex.DecodeString(strings.ReplaceAll(string(uid), "-", ""))
	if err != nil || len(b) != len(id) || uuid(b) == (uuid{}) || uuid(b).UID() != uid {
		return uuid{}, false
	}
	return uuid(b), true
}

func (id uuid) UID() types.UID {
	text := make([]byte, 0, 36)
	for i, part := range [][]byte{id[:4], id[4:6], id[6:8], id[8:10], id[10:]} {
		if i > 0 {
			text = append(text, '-')
		}
		text = hex.AppendEncode(text, part)
	}
	return types.UID(text)
}

// Ports returns the number of ports.
func (p *Parsed) Ports() int { return len(p.ports) }

// HasPort reports whether the Service has a port.
func (p *Parsed) HasPort(protocol ip.Protocol, number uint16) bool {
	return slices.ContainsFunc(p.ports, func(q parsedPort) bool { return q.protocol == protocol && q.port == number })
}

// With returns the model of the Service with the endpoints of slices; see Build. The
// caller must not change it.
func (p *Parsed) With(endpointSlices []*Slice) (Service, error) {
	return p.In(&Scratch{}, endpointSlices)
}

// In returns the same as With. The endpoints are in the memory of scratch, and valid until its next
// use.
func (p *Parsed) In(scratch *Scratch, endpointSlices []*Slice) (Service, error) {
	var f fields
	if p.rest != nil {
		f = *p.rest
	}
	f.Name, f.UID, f.Created, f.ClusterIPs = p.Name, p.UID(), time.Unix(p.created, 0), p.clusterIPs
	if len(p.ports) > 0 {
		f.Ports = make([]Port, len(p.ports))
	}
	for i, port := range p.ports {
		f.Ports[i] = Port{Name: port.name.Value(), Protocol: port.protocol, Port: port.port, NodePort: port.nodePort}
	}
	return f.with(endpointSlices, scratch)
}

// with adds the endpoints to the ports.
func (f *fields) with(endpointSlices []*Slice, scratch *Scratch) (Service, error) {
	scratch.reset()
	endpointSlices = byName(endpointSlices)
	errs := f.errs
	for _, slice := range endpointSlices {
		errs = append(errs[:len(errs):len(errs)], slice.errs...)
	}
	for i := range f.Ports {
		port := &f.Ports[i]
		port.Endpoints = scratch.merge(port, endpointSlices, len(f.weights) > 0)
		f.weights.weigh(port.Endpoints)
	}
	errs = append(errs[:len(errs):len(errs)], f.errsOfPorts...)
	return f.Service, errors.Join(errs...)
}

// nameOf returns the name of an object. Namespaces are interned, because many names share
// few of them.
func nameOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: unique.Make(o.GetNamespace()).Value(), Name: o.GetName()}
}
