// Package document reads files that hold YAML or JSON documents, so that each
// is decoded, and complained of, by itself.
package document

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Document is one document of a file, or one item of a document that is a
// list.
type Document struct {
	Number int // in the file, from 1; empty documents are not counted
	Line   int // of the document's first line that is not empty, from 1
	Item   int // in the list, from 1; 0 for a document of its own
	data   []byte
}

// String is "document 2 (line 14)", and with an item "document 2 (line 14),
// item 3".
func (d Document) String() string {
	s := fmt.Sprintf("document %d (line %d)", d.Number, d.Line)
	if d.Item > 0 {
		s += fmt.Sprintf(", item %d", d.Item)
	}
	return s
}

// Items takes a list (as the API's kind List) apart. It fails if the document
// cannot be decoded; without field items it is empty.
func (d Document) Items() ([]Document, error) {
	var list struct {
		Items []json.RawMessage `json:"items"`
	}
	if _, err := d.Decode(&list); err != nil {
		return nil, err
	}
	items := make([]Document, len(list.Items))
	for i, text := range list.Items {
		items[i] = Document{Number: d.Number, Line: d.Line, Item: i + 1, data: text}
	}
	return items, nil
}

// Split cuts a file at its document markers, without parsing it: a document
// that is broken leaves its neighbours whole. What holds only comments and
// directives is no document. It never fails.
func Split(file []byte) []Document {
	var docs []Document
	var part []byte
	start := 1
	end := func(next int) {
		if line, ok := firstContent(part); ok {
			docs = append(docs, Document{Number: len(docs) + 1, Line: start + line, data: part})
		}
		part, start = nil, next
	}
	lines := bytes.SplitAfter(bytes.TrimPrefix(file, []byte("\ufeff")), []byte("\n"))
	for i, line := range lines {
		switch {
		case isMarker(line, "---"):
			end(i + 1)
			// What follows the marker on its line belongs to the document;
			// the blanks keep the columns that the parser reports.
			part = append([]byte("   "), line[3:]...)
		case isMarker(line, "..."):
			end(i + 2)
		default:
			part = append(part, line...)
		}
	}
	end(0)
	return docs
}

// isMarker says whether a line begins with a document marker: in YAML, three
// characters at the line's start and then a blank, whatever is around them.
func isMarker(line []byte, marker string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(marker))
	return ok && (len(rest) == 0 || bytes.ContainsRune([]byte(" \t\r\n"), rune(rest[0])))
}

// firstContent gives the first line, from 0, that is neither blank, comment
// nor directive.
func firstContent(part []byte) (int, bool) {
	for i, line := range bytes.Split(part, []byte("\n")) {
		text := bytes.TrimSpace(line)
		if len(text) > 0 && text[0] != '#' && line[0] != '%' {
			return i, true
		}
	}
	return 0, false
}

// Decode decodes the document into a value with JSON tags. Fields that the
// value does not have and keys that occur twice are listed in loose, while
// all else is decoded (of two keys, the last counts). An error means that the
// document is no YAML, or that a field has the wrong type.
func (d Document) Decode(into any) (loose []error, err error) {
	text, twice, err := d.toJSON()
	if err != nil {
		return nil, err
	}
	unknown, err := kjson.UnmarshalStrict(text, into)
	if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "json: "))
	}
	return append(twice, unknown...), nil
}

// toJSON gives the document as JSON, and the keys that occur twice. JSON
// itself is left as it is: its reader finds such keys.
func (d Document) toJSON() (text []byte, twice []error, err error) {
	if json.Valid(d.data) {
		return d.data, nil, nil
	}
	text, err = yaml.YAMLToJSONStrict(d.data)
	if err == nil {
		return text, nil, nil
	}
	text, looseErr := yaml.YAMLToJSON(d.data)
	if looseErr != nil {
		return nil, nil, flatten(looseErr)
	}
	return text, []error{flatten(err)}, nil
}

// flatten puts a YAML parser's list of errors on one line.
func flatten(err error) error {
	lines := strings.Split(strings.ReplaceAll(err.Error(), "error converting YAML to JSON: ", ""), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return errors.New(strings.Join(lines, " "))
}
