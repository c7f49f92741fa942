package apiclient

import (
	"bytes"
	"encoding/binary"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Trim says which labels and annotations of Services and EndpointSlices a client needs.
// It drops all others, and managed fields, owners, finalizers, selectors and the Pods of
// endpoints, from the encoded objects: in a cluster these are more than half of their
// bytes, and decoding them takes more than half of the time. Objects that the API
// server sends as JSON are complete.
type Trim struct{ Label, Annotation func(key string) bool }

// message describes what is dropped from a message of protocol buffers.
type message struct {
	drop   uint64            // a bit for each field
	inside map[int]*message  // messages that are trimmed in turn
	keys   func([]byte) bool // for an entry of a map: the keys that are kept
}

// kinds returns the kinds of objects that are trimmed, with the numbers of generated.proto;
// nil if t is nil.
func (t *Trim) kinds() map[string]*message {
	if t == nil {
		return nil
	}
	keep := func(wanted func(string) bool) *message {
		return &message{keys: func(key []byte) bool { return wanted(string(key)) }}
	}
	meta := &message{
		// generateName, selfLink, generation, ownerReferences, finalizers, managedFields
		drop:   1<<2 | 1<<4 | 1<<7 | 1<<13 | 1<<14 | 1<<17,
		inside: map[int]*message{11: keep(t.Label), 12: keep(t.Annotation)},
	}
	service := &message{inside: map[int]*message{
		1: meta,
		2: {drop: 1 << 2}, // spec.selector
		3: {drop: 1 << 2}, // status.conditions
	}}
	slice := &message{inside: map[int]*message{
		1: meta,
		2: {drop: 1<<3 | 1<<4 | 1<<5}, // hostname, targetRef, deprecatedTopology
	}}
	return map[string]*message{"Service": service, "EndpointSlice": slice}
}

// trimming is a NegotiatedSerializer whose decoder of protocol buffers trims single objects,
// as in the events of a watch. A lister trims those of a list.
type trimming struct {
	runtime.NegotiatedSerializer
	kinds map[string]*message
}

func (t trimming) SupportedMediaTypes() []runtime.SerializerInfo {
	infos := slices.Clone(t.NegotiatedSerializer.SupportedMediaTypes()) // shared by all clients
	for i, info := range infos {
		if info.MediaType == runtime.ContentTypeProtobuf {
			infos[i].Serializer = trimmer{info.Serializer, t.kinds}
		}
	}
	return infos
}

type trimmer struct {
	runtime.Serializer
	kinds map[string]*message
}

// Decode leaves an object that it cannot trim unchanged. If it is malformed, the decoder
// reports the error.
func (t trimmer) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if trimmed, ok := t.trim(data); ok {
		data = trimmed
	}
	return t.Serializer.Decode(data, defaults, into)
}

// prefix precedes encoded objects.
var prefix = []byte("k8s\x00")

// Fields of runtime.Unknown, which encloses an object, and of its runtime.TypeMeta.
const (
	unknownType, unknownRaw = 1, 2
	typeKind                = 2
)

func (t trimmer) trim(data []byte) ([]byte, bool) {
	envelope, ok := bytes.CutPrefix(data, prefix)
	if !ok {
		return nil, false
	}
	kind, ok := value(envelope, unknownType, typeKind)
	if !ok {
		return nil, false
	}
	object := t.kinds[string(kind)]
	if object == nil {
		return nil, false
	}
	out := append(make([]byte, 0, len(data)/2), prefix...)
	return (&message{inside: map[int]*message{unknownRaw: object}}).appendTrimmed(out, envelope)
}

// appendTrimmed appends what remains of a message. It reports false for one that is not
// well-formed.
func (m *message) appendTrimmed(out, data []byte) ([]byte, bool) {
	for len(data) > 0 {
		f, ok := next(data)
		if !ok {
			return nil, false
		}
		data = data[f.size:]
		inside := m.inside[f.number]
		switch {
		case f.number < 64 && m.drop&(1<<f.number) != 0:
		case inside == nil || f.wire != wireBytes:
			out = append(out, f.whole...)
		case inside.keys != nil:
			if key, ok := value(f.value, 1); !ok || inside.keys(key) {
				out = append(out, f.whole...)
			}
		default:
			// The length keeps its number of bytes, so that the rest need not move.
			begin := len(out)
			out = append(out, f.whole[:len(f.whole)-len(f.value)]...)
			value := len(out)
			if out, ok = inside.appendTrimmed(out, f.value); !ok {
				return nil, false
			}
			putLength(out[begin+f.tag:value], uint64(len(out)-value))
		}
	}
	return out, true
}

// putLength encodes a length as a varint of the buffer's size, padded with zeros.
func putLength(b []byte, n uint64) {
	for i := range b {
		b[i] = byte(n&0x7f) | 0x80
		n >>= 7
	}
	b[len(b)-1] &= 0x7f
}

// Wire types.
const (
	wireVarint, wire64, wireBytes, wire32 = 0, 1, 2, 5
)

// field is one field of a message.
type field struct {
	number, wire int
	tag, size    int    // bytes of the tag, and of all
	whole, value []byte // value of wireBytes
}

func next(data []byte) (f field, ok bool) {
	tag, n := binary.Uvarint(data)
	if n <= 0 || tag>>3 == 0 || tag>>3 >= 1<<29 {
		return f, false
	}
	f.number, f.wire, f.tag = int(tag>>3), int(tag&7), n
	switch f.wire {
	case wireVarint:
		_, m := binary.Uvarint(data[n:])
		if m <= 0 {
			return f, false
		}
		n += m
	case wire64:
		n += 8
	case wire32:
		n += 4
	case wireBytes:
		length, m := binary.Uvarint(data[n:])
		if m <= 0 || length > uint64(len(data)-n-m) {
			return f, false
		}
		n += m
		f.value = data[n : n+int(length)]
		n += int(length)
	default:
		return f, false
	}
	if n > len(data) {
		return f, false
	}
	f.size, f.whole = n, data[:n]
	return f, true
}

// value descends a path of field numbers, and returns the bytes of the last field. Of several
// fields with one number, it takes the first one that has bytes.
func value(data []byte, path ...int) ([]byte, bool) {
	for _, number := range path {
		found := false
		for rest := data; len(rest) > 0 && !found; {
			f, ok := next(rest)
			if !ok {
				return nil, false
			}
			rest = rest[f.size:]
			if found = f.number == number && f.wire == wireBytes; found {
				data = f.value
			}
		}
		if !found {
			return nil, false
		}
	}
	return data, true
}
