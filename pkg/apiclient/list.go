package apiclient

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
)

// Lister lists and watches objects of one kind.
type Lister[T any] interface {
	// Each calls a function for each object of a list while it reads the list, and returns the
	// list's metadata. After an error, some of the objects may have been read. The function
	// owns the object.
	Each(context.Context, metav1.ListOptions, func(*T)) (metav1.ListMeta, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// All returns the objects of a list.
func All[T any](ctx context.Context, l Lister[T], o metav1.ListOptions) ([]*T, error) {
	var objects []*T
	_, err := l.Each(ctx, o, func(object *T) { objects = append(objects, object) })
	return objects, err
}

// decodable is a pointer to an object that protocol buffers can be decoded into.
type decodable[T any] interface {
	*T
	runtime.Object
	metav1.Object
	Unmarshal(data []byte) error
}

// lister reads a list from the API server object by object. client-go's own clients decode a
// list only when they have all of it: on a large cluster that takes twice the memory that the
// proxy needs afterwards.
type lister[T any, P decodable[T]] struct {
	watcher
	client              rest.Interface
	namespace, resource string
	kind                string   // of the list
	trim                *message // nil: objects are complete
}

func newLister[T any, P decodable[T]](c *Client, client rest.Interface, resource, namespace, kind string) Lister[T] {
	return &lister[T, P]{
		watcher: gentype.NewClient(resource, client, parameter, namespace, func() P { return new(T) }, gentype.PrefersProtobuf[P]()),
		client:  client, namespace: namespace, resource: resource, kind: kind + "List", trim: c.trim[kind],
	}
}

// watcher is the part of a client of client-go that a lister uses.
type watcher interface {
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

func (l *lister[T, P]) Each(ctx context.Context, o metav1.ListOptions, do func(*T)) (metav1.ListMeta, error) {
	body, err := l.client.Get().UseProtobufAsDefault().NamespaceIfScoped(l.namespace, l.namespace != "").
		Resource(l.resource).VersionedParams(&o, parameter).Stream(ctx)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	defer func() { _ = body.Close() }()
	listMeta, err := l.read(body, do)
	if err != nil {
		return metav1.ListMeta{}, fmt.Errorf("reading the list of %s: %w", l.resource, err)
	}
	return listMeta, nil
}

func (l *lister[T, P]) read(body io.Reader, do func(*T)) (metav1.ListMeta, error) {
	r := bufio.NewReader(body)
	begin, err := r.Peek(len(prefix))
	if err != nil {
		return metav1.ListMeta{}, err
	}
	if !bytes.Equal(begin, prefix) {
		return readDecoded(r, do)
	}
	_, _ = r.Discard(len(prefix)) // cannot fail: peeked
	return l.readProtobuf(r, do)
}

// readDecoded reads a list that is not in protocol buffers.
func readDecoded[T any](r io.Reader, do func(*T)) (listMeta metav1.ListMeta, err error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return listMeta, err
	}
	list, _, err := codecs.UniversalDeserializer().Decode(data, nil, nil)
	if err != nil {
		return listMeta, err
	}
	m, err := meta.ListAccessor(list)
	if err != nil {
		return listMeta, err
	}
	listMeta = metav1.ListMeta{ResourceVersion: m.GetResourceVersion(), Continue: m.GetContinue(), RemainingItemCount: m.GetRemainingItemCount()}
	return listMeta, meta.EachListItem(list, func(o runtime.Object) error {
		item, ok := any(o).(*T)
		if !ok {
			return fmt.Errorf("unexpected object %T, want %T", o, item)
		}
		do(item)
		return nil
	})
}

// readProtobuf reads a runtime.Unknown that encloses a list.
func (l *lister[T, P]) readProtobuf(r *bufio.Reader, do func(*T)) (listMeta metav1.ListMeta, err error) {
	var kind string
	complete := false
	err = (&section{r: r}).fields(func(number int, content *section) error {
		switch number {
		case unknownType:
			typeMeta, err := content.bytes(&bytes.Buffer{})
			name, _ := value(typeMeta, typeKind)
			kind = string(name)
			return err
		case unknownRaw:
			if kind != l.kind {
				return fmt.Errorf("the API server sent kind %q, want %q", kind, l.kind)
			}
			complete = true
			return l.readItems(content, &listMeta, do)
		}
		return nil
	})
	if err == nil && !complete {
		err = io.ErrUnexpectedEOF
	}
	return listMeta, err
}

// Fields of a list.
const listMetadata, listItems = 1, 2

func (l *lister[T, P]) readItems(list *section, listMeta *metav1.ListMeta, do func(*T)) error {
	var buffer bytes.Buffer // holds one item at a time
	var trimmed []byte
	return list.fields(func(number int, content *section) error {
		if number != listMetadata && number != listItems {
			return nil
		}
		data, err := content.bytes(&buffer)
		if err != nil {
			return err
		}
		if number == listMetadata {
			return listMeta.Unmarshal(data)
		}
		if l.trim != nil {
			// If appendTrimmed fails, Unmarshal reports the error.
			if kept, ok := l.trim.appendTrimmed(trimmed[:0], data); ok {
				data, trimmed = kept, kept
			}
		}
		item := P(new(T))
		if err := item.Unmarshal(data); err != nil {
			return err
		}
		do(item)
		return nil
	})
}

// section is the unread rest of a message of protocol buffers, or of a field's value.
type section struct {
	r     *bufio.Reader
	sized bool
	left  int64 // unread bytes; only if sized, else the section ends with the input
}

// fields calls a function for each field, and skips what the function does not read. The
// value of a numeric field is an empty section.
func (s *section) fields(do func(number int, value *section) error) error {
	for {
		tag, err := binary.ReadUvarint(s)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		value, err := s.value(int(tag & 7))
		if err != nil {
			return unexpected(err)
		}
		if err := do(int(tag>>3), value); err != nil {
			return err
		}
		if err := value.skip(); err != nil {
			return err
		}
	}
}

// value returns a field's value as a section, whose bytes s counts as read.
func (s *section) value(wire int) (*section, error) {
	var size uint64
	var err error
	switch wire {
	case wireVarint:
		_, err = binary.ReadUvarint(s)
	case wire64:
		size = 8
	case wireBytes:
		size, err = binary.ReadUvarint(s)
	case wire32:
		size = 4
	default:
		err = fmt.Errorf("unexpected wire type %d", wire)
	}
	if err != nil {
		return nil, err
	}
	if size > math.MaxInt64 || s.sized && int64(size) > s.left {
		return nil, io.ErrUnexpectedEOF
	}
	s.left -= int64(size)
	return &section{r: s.r, sized: true, left: int64(size)}, nil
}

// ReadByte implements io.ByteReader.
func (s *section) ReadByte() (byte, error) {
	if s.sized && s.left == 0 {
		return 0, io.EOF
	}
	b, err := s.r.ReadByte()
	if s.sized {
		err = unexpected(err)
	}
	s.left--
	return b, err
}

// bytes reads the section into a buffer. The result is valid until the buffer is used again.
func (s *section) bytes(buffer *bytes.Buffer) ([]byte, error) {
	buffer.Reset()
	_, err := io.CopyN(buffer, s.r, s.left)
	s.left = 0
	return buffer.Bytes(), unexpected(err)
}

func (s *section) skip() error {
	_, err := io.CopyN(io.Discard, s.r, s.left)
	s.left = 0
	return unexpected(err)
}

// unexpected returns io.ErrUnexpectedEOF for io.EOF, and other errors unchanged.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
