package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
)

// Names of subjects: Direct sends packets straight to the endpoint, KubeIPVS is our program
// with default settings. leastIPVS is IPVS with the least rules.
const (
	Direct    = "direct"
	leastIPVS = "floor"
	KubeIPVS  = "kube-ipvs"
)

// Figure is the number of instructions that one exchange takes in the whole guest,
// including client and server.
type Figure struct {
	Services int    `json:"services"`
	World    string `json:"world"` // the Services besides the ClusterIPs
	Subject  string `json:"subject"`
	// Variant names a modification of the subject: a removed rule, or a kernel parameter.
	// Empty: none.
	Variant  string `json:"variant,omitempty"`
	Path     string `json:"path"`
	Workload string `json:"workload"`
	Value    int    `json:"value"`
}

// place returns the figure's key: a later figure with the same key replaces it.
func (f Figure) place() Figure {
	f.Value = 0
	return f
}

// Figures are the figures of one or more runs, with facts about the latest run. The zero
// value is empty and ready to use.
type Figures struct {
	Facts map[string]string `json:"facts"`
	List  []Figure          `json:"figures"`
}

// LoadFigures reads a file that Save wrote. A missing file contains no figures.
func LoadFigures(path string) (*Figures, error) {
	f := &Figures{Facts: map[string]string{}}
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return f, nil
	}
	if err == nil {
		err = json.Unmarshal(text, f)
	}
	return f, err
}

// Save writes one figure per line, so that diffs are readable.
func (f *Figures) Save(path string) error {
	facts, err := json.Marshal(f.Facts)
	if err != nil {
		return err
	}
	lines := make([]string, len(f.List))
	for i, figure := range f.List {
		line, err := json.Marshal(figure)
		if err != nil {
			return err
		}
		lines[i] = string(line)
	}
	text := fmt.Sprintf("{\"facts\": %s,\n\"figures\": [\n%s\n]}\n", facts, strings.Join(lines, ",\n"))
	return os.WriteFile(path, []byte(text), 0o644)
}

// Put adds a figure, or replaces the one with the same key.
func (f *Figures) Put(figure Figure) {
	same := func(other Figure) bool { return other.place() == figure.place() }
	if i := slices.IndexFunc(f.List, same); i >= 0 {
		f.List[i] = figure
		return
	}
	f.List = append(f.List, figure)
}

// Drop removes the figures that a function selects.
func (f *Figures) Drop(selects func(Figure) bool) { f.List = slices.DeleteFunc(f.List, selects) }

// value returns the figure at a place.
func (f *Figures) value(place Figure) (int, bool) {
	for _, figure := range f.List {
		if figure.place() == place.place() {
			return figure.Value, true
		}
	}
	return 0, false
}

// Over returns the difference between a figure and that of the direct path in the same
// world, with the same path and workload. The direct path does not depend on the number
// of Services.
func (f *Figures) Over(figure Figure) (int, bool) {
	value, ok := f.value(figure)
	for _, other := range f.List {
		if other.Subject == Direct && other.World == figure.World && other.Path == figure.Path && other.Workload == figure.Workload {
			return value - other.Value, ok
		}
	}
	return 0, false
}

// column is a path and a workload.
type column struct{ path, workload string }

func (c column) place(row Figure) Figure {
	row.Path, row.Workload = c.path, c.workload
	return row
}

// distinct returns the distinct results of a function for the selected figures, in the
// order of the list.
func distinct[T comparable](f *Figures, selects func(Figure) bool, of func(Figure) T) []T {
	var list []T
	for _, figure := range f.List {
		if selects(figure) && !slices.Contains(list, of(figure)) {
			list = append(list, of(figure))
		}
	}
	return list
}

func columnOf(f Figure) column { return column{f.Path, f.Workload} }

// rowOf returns a figure without its column.
func rowOf(f Figure) Figure {
	f.Path, f.Workload, f.Value = "", "", 0
	return f
}

// Table returns a Markdown table of the selected figures with a row for each subject and
// variant. It shows the figures of the direct path, and the differences of all others to
// it.
func (f *Figures) Table(selects func(Figure) bool) string {
	columns := distinct(f, selects, columnOf)
	rows := distinct(f, selects, rowOf)
	var b strings.Builder
	b.WriteString("| |")
	for _, c := range columns {
		fmt.Fprintf(&b, " %s, %s |", c.path, c.workload)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(columns)) + "\n")
	for _, row := range rows {
		b.WriteString("| " + f.rowName(row, rows) + " |")
		for _, c := range columns {
			b.WriteString(" " + f.cell(c.place(row)) + " |")
		}
		b.WriteString("\n")
	}
	return b.String()
}

// rowName names a row by the fields that distinguish it.
func (f *Figures) rowName(row Figure, rows []Figure) string {
	name := row.Subject
	if row.Variant != "" {
		name += ", " + row.Variant
	}
	differs := func(other Figure) bool { return other.Services != row.Services }
	if slices.ContainsFunc(rows, differs) {
		name += fmt.Sprintf(", %s Services", thousands(row.Services))
	}
	return name
}

func (f *Figures) cell(place Figure) string {
	value, ok := f.value(place)
	if !ok {
		return "–"
	}
	if place.Subject == Direct {
		return thousands(value)
	}
	over, ok := f.Over(place)
	if !ok {
		return "–"
	}
	return signed(over)
}

func signed(n int) string {
	if n < 0 {
		return "−" + thousands(-n)
	}
	return "+" + thousands(n)
}

// Saved returns a Markdown table of the instructions that each variant saves compared
// with its unmodified subject.
func (f *Figures) Saved(selects func(Figure) bool) string {
	columns := distinct(f, selects, columnOf)
	rows := distinct(f, selects, rowOf)
	var b strings.Builder
	b.WriteString("| |")
	for _, c := range columns {
		fmt.Fprintf(&b, " %s, %s |", c.path, c.workload)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(columns)) + "\n")
	for _, row := range rows {
		if row.Variant == "" {
			continue
		}
		b.WriteString("| " + row.Variant + " |")
		for _, c := range columns {
			b.WriteString(" " + f.difference(c.place(row)) + " |")
		}
		b.WriteString("\n")
	}
	return b.String()
}

// difference returns the difference between a variant's figure and its subject's.
func (f *Figures) difference(place Figure) string {
	with, ok := f.value(place)
	place.Variant = ""
	whole, there := f.value(place)
	if !ok || !there {
		return "–"
	}
	return signed(with - whole)
}
