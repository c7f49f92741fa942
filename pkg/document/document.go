// Package document splits files of YAML or JSON documents, so that each can be decoded,
// and its errors reported, separately.
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

// Document is one document of a file, or one item of a document that is a list.
type Document struct {
	Number int // in the file, from 1; empty documents do not count
	Line   int // first non-empty line of the document, from 1
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

// Items returns the items of a list (the API's kind List). It returns an error if the
// document cannot be decoded, and nothing if there is no field items.
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

// Split splits a file at its document markers without parsing it: an invalid document
// does not affect the others. Documents of comments and directives only are omitted. It
// never fails.
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
			// The rest of the marker's line belongs to the document; blanks preserve
			// the columns that the parser reports.
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

// isMarker reports whether a line begins with a document marker: in YAML, three
// characters at the start of a line, followed by a blank.
func isMarker(line []byte, marker string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(marker))
	return ok && (len(rest) == 0 || bytes.ContainsRune([]byte(" \t\r\n"), rune(rest[0])))
}

// firstContent returns the first line, from 0, that is not blank, a comment or a
// directive.
func firstContent(part []byte) (int, bool) {
	for i, line := range bytes.Split(part, []byte("\n")) {
		text := bytes.TrimSpace(line)
		if len(text) > 0 && text[0] != '#' && line[0] != '%' {
			return i, true
		}
	}
	return 0, false
}

// Decode decodes the document into a value with JSON tags. It returns unknown fields
// and duplicate keys in loose and decodes everything else (the last of duplicate keys
// counts). An error means that the document is not YAML, or that a field has the wrong
// type.
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

// toJSON converts the document to JSON and returns duplicate keys. JSON is returned
// unchanged: its decoder finds duplicates.
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

// flatten joins the errors of a YAML parser in one line.
func flatten(err error) error {
	lines := strings.Split(strings.ReplaceAll(err.Error(), "error converting YAML to JSON: ", ""), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return errors.New(strings.Join(lines, " "))
}
