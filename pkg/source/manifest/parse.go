package manifest

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/kube-ipvs/kube-ipvs/pkg/document"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// The kinds that are read.
const (
	kindService = "Service"
	kindSlice   = "EndpointSlice"
	kindNode    = "Node"
)

// lists are the typed lists, by apiVersion and kind, with the type of their items.
var lists = map[metav1.TypeMeta]metav1.TypeMeta{
	{APIVersion: "v1", Kind: "List"}:                               {},
	{APIVersion: "v1", Kind: "ServiceList"}:                        {APIVersion: "v1", Kind: kindService},
	{APIVersion: "v1", Kind: "NodeList"}:                           {APIVersion: "v1", Kind: kindNode},
	{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSliceList"}: {APIVersion: "discovery.k8s.io/v1", Kind: kindSlice},
}

// key identifies an object.
type key struct {
	kind string
	name types.NamespacedName
}

// String is "Service default/web", or "Node n1".
func (k key) String() string {
	return k.kind + " " + strings.TrimPrefix(k.name.String(), "/")
}

// object is an object that a file defines. It is immutable.
type object struct {
	key   key
	where document.Document
	// meta is the Service, EndpointSlice or Node with its defaults, or nil if the proxy
	// does not need it.
	meta metav1.Object
}

// problem is an error in one document.
type problem struct {
	where document.Document
	key   key // of the object, as far as it is known
	known bool
	err   error
}

// parsed is the content of a file.
type parsed struct {
	objects  []object
	problems []problem
	ignored  []metav1.TypeMeta // other kinds
}

// parse parses a file. An error in one document does not affect the others. It skips Nodes
// that do not have the given name.
func parse(text []byte, nodeName string) parsed {
	return (&parser{nodeName: nodeName}).parse(text)
}

func (p *parser) parse(text []byte) parsed {
	for _, d := range document.Split(text) {
		p.document(d, metav1.TypeMeta{})
	}
	return p.parsed
}

type parser struct {
	parsed
	nodeName string
	whole    bool // keep what source.Trim removes
}

// head is common to all objects. It is decoded first and leniently, to identify even an
// invalid object.
type head struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
}

// document parses one document, or an item of a list, which may omit its kind.
func (p *parser) document(d document.Document, implied metav1.TypeMeta) {
	var h head
	if _, err := d.Decode(&h); err != nil {
		p.problems = append(p.problems, problem{where: d, err: err})
		return
	}
	h.APIVersion, h.Kind = cmp.Or(h.APIVersion, implied.APIVersion), cmp.Or(h.Kind, implied.Kind)
	if items, ok := lists[h.TypeMeta]; ok {
		p.list(d, items)
		return
	}
	k := key{kind: h.Kind, name: types.NamespacedName{Namespace: h.Metadata.Namespace, Name: h.Metadata.Name}}
	var err error
	switch h.TypeMeta {
	case metav1.TypeMeta{APIVersion: "v1", Kind: kindService}:
		k.name.Namespace = cmp.Or(k.name.Namespace, corev1.NamespaceDefault)
		err = p.service(d, k)
	case metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: kindSlice}:
		k.name.Namespace = cmp.Or(k.name.Namespace, corev1.NamespaceDefault)
		err = p.slice(d, k)
	case metav1.TypeMeta{APIVersion: "v1", Kind: kindNode}:
		k.name.Namespace = ""
		err = p.node(d, k)
	default:
		p.other(d, h.TypeMeta)
	}
	if err != nil {
		p.problems = append(p.problems, problem{where: d, key: k, known: k.name.Name != "", err: err})
	}
}

func (p *parser) list(d document.Document, implied metav1.TypeMeta) {
	items, err := d.Items()
	if err != nil {
		p.problems = append(p.problems, problem{where: d, err: err})
		return
	}
	for _, item := range items {
		p.document(item, implied)
	}
}

// other records a kind that is not read, or a missing kind.
func (p *parser) other(d document.Document, kind metav1.TypeMeta) {
	var errs field.ErrorList
	if kind.APIVersion == "" {
		errs = append(errs, field.Required(field.NewPath("apiVersion"), ""))
	}
	if kind.Kind == "" {
		errs = append(errs, field.Required(field.NewPath("kind"), ""))
	}
	if len(errs) > 0 {
		p.problems = append(p.problems, problem{where: d, err: joined(errs)})
		return
	}
	p.ignored = append(p.ignored, kind)
}

func (p *parser) service(d document.Document, k key) error {
	s := &corev1.Service{}
	if err := decode(d, s); err != nil {
		return err
	}
	defaultService(s)
	if othersService(s) {
		return p.add(d, k, nil, nil)
	}
	var c checker
	c.service(s)
	return p.add(d, k, s, c.errs)
}

// othersService reports whether this proxy does not serve a Service: it is headless, of type
// ExternalName, or labeled for another proxy. Such a Service is not validated.
func othersService(s *corev1.Service) bool {
	return s.Spec.ClusterIP == corev1.ClusterIPNone || s.Spec.Type == corev1.ServiceTypeExternalName ||
		!service.Selector().Matches(labels.Set(s.Labels))
}

func (p *parser) slice(d document.Document, k key) error {
	s := &discoveryv1.EndpointSlice{}
	if err := decode(d, s); err != nil {
		return err
	}
	defaultSlice(s)
	if !service.EndpointSliceSelector().Matches(labels.Set(s.Labels)) {
		return p.add(d, k, nil, nil)
	}
	var c checker
	c.slice(s)
	return p.add(d, k, s, c.errs)
}

func (p *parser) node(d document.Document, k key) error {
	n := &corev1.Node{}
	if err := decode(d, n); err != nil {
		return err
	}
	if n.Name != p.nodeName {
		return p.add(d, k, nil, nil)
	}
	n.Namespace = ""
	defaultNode(n)
	var c checker
	c.node(n)
	return p.add(d, k, n, c.errs)
}

// add adds an object, or nil for one that the proxy does not need, unless it is
// invalid.
func (p *parser) add(d document.Document, k key, meta metav1.Object, errs field.ErrorList) error {
	if len(errs) > 0 {
		return joined(errs)
	}
	if k.name.Name == "" {
		return joined(field.ErrorList{field.Required(field.NewPath("metadata", "name"), "")})
	}
	if meta != nil && !p.whole {
		source.Trim(meta)
	}
	p.objects = append(p.objects, object{key: k, where: d, meta: meta})
	return nil
}

// decode decodes strictly.
func decode(d document.Document, into any) error {
	loose, err := d.Decode(into)
	if err != nil {
		return err
	}
	return joined(loose)
}

// joined joins errors in one line, so that each document has one.
func joined[E error](errs []E) error {
	if len(errs) == 0 {
		return nil
	}
	texts := make([]string, len(errs))
	for i, err := range errs {
		texts[i] = err.Error()
	}
	return errors.New(strings.Join(texts, "; "))
}

// errorf returns an error with the position in the file and what happens to the object.
func (p problem) errorf(file string, kept bool) error {
	at := fmt.Sprintf("%s: %s", file, p.where)
	if p.known {
		at += ": " + p.key.String()
	}
	if kept {
		return fmt.Errorf("%s: %w; keeping its last valid version", at, p.err)
	}
	return fmt.Errorf("%s: %w", at, p.err)
}
