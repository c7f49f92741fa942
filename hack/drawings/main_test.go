package main

import (
	"encoding/xml"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDrawings checks that docs/img has what this program draws, and that it is XML.
func TestDrawings(t *testing.T) {
	for name, draw := range drawings {
		want := draw()
		got, err := os.ReadFile(filepath.Join("..", "..", "docs", "img", name))
		if err != nil || string(got) != want {
			t.Errorf("docs/img/%s is stale, make docs writes it (%v)", name, err)
		}
		decoder := xml.NewDecoder(strings.NewReader(want))
		for err = nil; err == nil; {
			_, err = decoder.Token()
		}
		if err != io.EOF {
			t.Errorf("%s: %v", name, err)
		}
	}
}
