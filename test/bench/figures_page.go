package bench

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"text/template"
)

//go:embed instructions/dataplane.md.tmpl
var dataplaneTemplate string

// Page returns docs/performance/dataplane.md: the template with tables of the figures.
// floors are those of a run that compares kube-ipvs with the floor only, and untracked those
// of one in which traffic of pods is not tracked.
func (f *Figures) Page(floors, untracked *Figures) (string, error) {
	functions := template.FuncMap{
		"facts": f.facts,
		// inFloors is a table of kube-ipvs on all paths of the other run.
		"inFloors":    floors.InFloors,
		"floorsFacts": floors.facts,
		// untracked is a table of all figures of the third run.
		"untracked":      func() string { return untracked.Table(func(Figure) bool { return true }) },
		"untrackedFacts": untracked.facts,
		// path is a table of all subjects on a path of a world.
		"path": func(world, path string, services int) string {
			return f.tableOrNone(f.Table, func(x Figure) bool {
				return x.World == world && x.Path == path && x.Services == services && x.Variant == ""
			})
		},
		// sizes is the same for all numbers of Services.
		"sizes": func(world, path string) string {
			return f.tableOrNone(f.Table, func(x Figure) bool {
				return x.World == world && x.Path == path && x.Variant == "" && x.Subject != Direct
			})
		},
		// changes are what kernel parameters and empty chains cost a subject.
		"changes": func(world, subject string) string {
			return f.tableOrNone(f.Saved, func(x Figure) bool { return x.World == world && x.Subject == subject && !isAblation(x) })
		},
		// ablation is what rules cost a subject, and floorsAblation the same in the other run.
		"ablation":       f.ablation,
		"floorsAblation": floors.ablation,
	}
	parsed, err := template.New("dataplane").Funcs(functions).Parse(dataplaneTemplate)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	err = parsed.Execute(&b, nil)
	return b.String(), err
}

// withoutPrefix is the prefix of an ablation's variants.
const withoutPrefix = "without "

func isAblation(f Figure) bool { return strings.HasPrefix(f.Variant, withoutPrefix) }

// ablation returns the table of what rules cost a subject.
func (f *Figures) ablation(world, subject string) string {
	return f.tableOrNone(f.Saved, func(x Figure) bool {
		return x.World == world && x.Subject == subject && (x.Variant == "" || isAblation(x)) && !strings.HasPrefix(x.Workload, "UDP")
	})
}

func (f *Figures) tableOrNone(table func(func(Figure) bool) string, selects func(Figure) bool) string {
	if !slices.ContainsFunc(f.List, selects) {
		return NotMeasured + "\n"
	}
	return table(selects)
}

func (f *Figures) facts() string {
	var b strings.Builder
	b.WriteString("| | |\n|---|---|\n")
	for _, name := range []string{"date", "kube-ipvs", "kube-proxy", "kernel"} {
		if value, ok := f.Facts[name]; ok {
			fmt.Fprintf(&b, "| %s | %s |\n", name, value)
		}
	}
	return b.String()
}

// InFloors returns a Markdown table with a row for each world, path and subject of ours. A
// cell holds the instructions over the direct path, those of the floor, and the quotient.
func (f *Figures) InFloors() string {
	ours := func(x Figure) bool { return x.Variant == "" && strings.HasPrefix(x.Subject, KubeIPVS) }
	titles := distinct(f, ours, func(x Figure) string { return x.Workload })
	var b strings.Builder
	b.WriteString("| the node has | path | subject |")
	for _, title := range titles {
		b.WriteString(" " + title + " |")
	}
	b.WriteString("\n|---|---|---|" + strings.Repeat("---|", len(titles)) + "\n")
	for _, row := range distinct(f, ours, func(x Figure) Figure { x.Workload, x.Value = "", 0; return x }) {
		fmt.Fprintf(&b, "| %s | %s | %s |", row.World, row.Path, row.Subject)
		for _, title := range titles {
			row.Workload = title
			b.WriteString(" " + f.inFloors(row) + " |")
		}
		b.WriteString("\n")
	}
	return b.String()
}

func (f *Figures) inFloors(place Figure) string {
	over, ok := f.Over(place)
	place.Subject = leastIPVS
	floor, there := f.Over(place)
	if !ok || !there {
		return "–"
	}
	return fmt.Sprintf("%s / %s, %.2f", signed(over), signed(floor), float64(over)/float64(floor))
}

// bar is a line of a chart.
type bar struct {
	label string
	value int
}

// chart is a panel with a bar for each line.
type chart struct {
	title string
	bars  []bar
}

const (
	barHeight  = 16
	chartWidth = 560
	panelGap   = 16
)

// SVG returns a chart of what each subject adds to the direct path in the default world.
func (f *Figures) SVG() string {
	var charts []chart
	for _, path := range []string{"ClusterIP", "NodePort"} {
		for _, workload := range []string{"TCP connection", "TCP round trip"} {
			selects := func(x Figure) bool {
				return x.World == "default" && x.Path == path && x.Workload == workload && x.Variant == "" && x.Subject != Direct && x.Services == 10
			}
			charts = append(charts, f.chart(path+", "+workload+": instructions over the direct path", selects, func(x Figure) bar {
				over, _ := f.Over(x)
				return bar{x.Subject, over}
			}))
		}
	}
	return drawCharts(charts, 150)
}

// AblationSVG returns a chart of the cost of each rule of kube-ipvs.
func (f *Figures) AblationSVG() string {
	var charts []chart
	for _, path := range []string{"ClusterIP", "NodePort"} {
		selects := func(x Figure) bool {
			return x.World == "default" && x.Subject == KubeIPVS && x.Path == path && x.Workload == "TCP connection" && isAblation(x)
		}
		charts = append(charts, f.chart(path+", TCP connection: instructions that a rule costs", selects, func(x Figure) bar {
			whole := x
			whole.Variant = ""
			value, _ := f.value(whole)
			return bar{strings.TrimPrefix(x.Variant, withoutPrefix), value - x.Value}
		}))
	}
	return drawCharts(charts, 420)
}

func (f *Figures) chart(title string, selects func(Figure) bool, of func(Figure) bar) chart {
	c := chart{title: title}
	for _, figure := range f.List {
		if selects(figure) {
			c.bars = append(c.bars, of(figure))
		}
	}
	return c
}

// drawCharts draws panels in two columns. labels is the width for names.
func drawCharts(charts []chart, labels int) string {
	rows := 0
	for _, c := range charts {
		rows = max(rows, len(c.bars))
	}
	width, height := chartWidth+labels, (rows+2)*barHeight+panelGap
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n",
		2*width, (len(charts)+1)/2*height)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	for i, c := range charts {
		fmt.Fprintf(&b, `<g transform="translate(%d,%d)">`+"\n", i%2*width, i/2*height)
		c.draw(&b, labels)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func (c chart) draw(b *strings.Builder, labels int) {
	longest := 1
	for _, line := range c.bars {
		longest = max(longest, line.value)
	}
	fmt.Fprintf(b, `<text x="8" y="%d" font-weight="bold">%s</text>`+"\n", barHeight, escape(c.title))
	for i, line := range c.bars {
		y := (i + 2) * barHeight
		fill := "#888888"
		if strings.HasPrefix(line.label, KubeIPVS) {
			fill = "#1f6fb2"
		}
		fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="end">%s</text>`, labels-6, y+11, escape(line.label))
		length := max(0, line.value) * (chartWidth - 80) / longest
		fmt.Fprintf(b, `<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>`, labels, y+1, length, barHeight-3, fill)
		fmt.Fprintf(b, `<text x="%d" y="%d">%s</text>`+"\n", labels+length+4, y+11, signed(line.value))
	}
}

func escape(text string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(text)
}
