package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
)

// Names of subjects: Direct sends packets straight to the endpoint, KubeIPVS is our program
// with default settings.
const (
	Direct   = "direct"
	KubeIPVS = "kube-ipvs"
)

// Figure is how many instructions of the guest's one exchange takes, client and server
// included.
type Figure struct {
	Services int    `json:"services"`
	World    string `json:"world"` // which Services there are besides the ClusterIPs
	Subject  string `json:"subject"`
	// Variant is what differs from the subject as it is: a rule that is missing, or a
	// kernel parameter.
	Variant  string `json:"variant,omitempty"`
	Path     string `json:"path"`
	Workload string `json:"workload"`
	Value    int    `json:"value"`
}

// place is where a figure belongs: a later one there replaces it.
func (f Figure) place() Figure {
	f.Value = 0
	return f
}

// Figures are those of one or more runs, with facts about the latest. The zero value is
// empty and ready to use.
type Figures struct {
	Facts map[string]string `json:"facts"`
	List  []Figure          `json:"figures"`
}

// LoadFigures reads what Save has written; a file that is missing holds none.
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

// Save writes a figure a line, so that a change can be read.
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

// Put adds a figure, or replaces that of the same place.
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

// Over returns what a figure is over the direct path's of the same world, path and
// workload, which does not depend on the number of Services.
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

// distinct returns what a function makes of each selected figure, each once, in the order
// of the list.
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

// rowOf is a figure without its column.
func rowOf(f Figure) Figure {
	f.Path, f.Workload, f.Value = "", "", 0
	return f
}

// Table is a Markdown table of the selected figures, a row for each subject and variant:
// what they are over the direct path, and of the direct path the figures.
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

// rowName names a row by what distinguishes it.
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

// Saved is a Markdown table of what each variant takes less than its subject as it is.
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

// difference is a variant's figure less its subject's.
func (f *Figures) difference(place Figure) string {
	with, ok := f.value(place)
	place.Variant = ""
	whole, there := f.value(place)
	if !ok || !there {
		return "–"
	}
	return signed(with - whole)
}
