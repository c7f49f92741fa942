package main

import (
	"encoding/xml"
	"io"
	"os"
	"path/filepath"
	"strconv"
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

// fontSizes are those of style, by class.
var fontSizes = map[string]float64{"h": 16, "t": 14, "s": 12, "ok": 12.5, "bad": 12.5, "way": 12.5}

// TestTextFits checks that no text leaves its drawing. A character of DejaVu Sans, the
// widest font of style, is half as wide as the font's size on average, and 0.6 in bold.
func TestTextFits(t *testing.T) {
	for name, draw := range drawings {
		var svg struct {
			ViewBox string `xml:"viewBox,attr"`
			Texts   []struct {
				Class  string  `xml:"class,attr"`
				X      float64 `xml:"x,attr"`
				Anchor string  `xml:"text-anchor,attr"`
				Text   string  `xml:",chardata"`
			} `xml:"text"`
		}
		if err := xml.Unmarshal([]byte(draw()), &svg); err != nil {
			t.Fatal(err)
		}
		width, err := strconv.ParseFloat(strings.Fields(svg.ViewBox)[2], 64)
		if err != nil || len(svg.Texts) < 10 {
			t.Fatalf("%s: %d texts, %v", name, len(svg.Texts), err)
		}
		for _, text := range svg.Texts {
			long := map[bool]float64{true: 0.6, false: 0.52}[text.Class == "h"] * fontSizes[text.Class] * float64(len([]rune(text.Text)))
			left := text.X - map[string]float64{"start": 0, "middle": long / 2, "end": long}[text.Anchor]
			if left < 0 || left+long > width {
				t.Errorf("%s: %q is at %.0f to %.0f of %.0f", name, text.Text, left, left+long, width)
			}
		}
	}
}
