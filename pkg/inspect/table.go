package inspect

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"sigs.k8s.io/yaml"
)

// Formats are the formats of Print.
var Formats = []string{"table", "wide", "json", "yaml"}

// Print writes rows in a format: "table", which omits the last columns, "wide", "json"
// or "yaml".
func Print[R Row](w io.Writer, format string, columns []string, narrow int, rows []R) error {
	if rows == nil {
		rows = []R{} // an empty list, not null
	}
	switch format {
	case "json":
		return WriteJSON(w, rows)
	case "yaml":
		return WriteYAML(w, rows)
	case "wide":
		narrow = len(columns)
	}
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, strings.Join(columns[:narrow], "\t"))
	for _, r := range rows {
		cells := r.Cells()[:narrow]
		for i, cell := range cells {
			if cell == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// WriteYAML writes what WriteJSON would, as YAML.
func WriteYAML(w io.Writer, value any) error {
	text, err := yaml.Marshal(value)
	if err != nil {
		return err
	}
	_, err = w.Write(text)
	return err
}

// WriteJSON writes the JSON format of all commands.
func WriteJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
