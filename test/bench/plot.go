package bench

import (
	"fmt"
	"math"
	"strings"
)

// plotted are the measures of the plot, side by side.
var plotted = []Measure{ColdStart, OneMedian}

const (
	panelWidth, panelHeight = 460, 340
	left, right, top, under = 64, 16, 36, 44
	legendLine              = 18
)

var colours = []string{"#0b62a4", "#4da3d9", "#c0392b", "#e08e0b", "#555555", "#2e8b57", "#8e44ad", "#999999"}

// SVG returns a plot with logarithmic axes: the number of Services, and the figure.
func (r *Results) SVG() string {
	var b strings.Builder
	height := panelHeight + legendLine*(len(r.Subjects)+1)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n",
		panelWidth*len(plotted), height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	for i, m := range plotted {
		fmt.Fprintf(&b, `<g transform="translate(%d,0)">`+"\n", i*panelWidth)
		r.drawPanel(&b, m)
		b.WriteString("</g>\n")
	}
	for i, s := range r.Subjects {
		y := panelHeight + legendLine*(i+1)
		fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%[3]d" y2="%[3]d" stroke="%[4]s" stroke-width="3"/><text x="%[5]d" y="%[6]d">%[7]s</text>`+"\n",
			left, left+24, y-4, colour(i), left+32, y, s)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func colour(i int) string { return colours[i%len(colours)] }

// axis maps figures to positions on a logarithmic scale.
type axis struct {
	from, to   int // exponents
	begin, end float64
}

func newAxis(values []float64, begin, end float64) axis {
	a := axis{math.MaxInt, math.MinInt, begin, end}
	for _, v := range values {
		e := math.Log10(v)
		a.from, a.to = min(a.from, int(math.Floor(e))), max(a.to, int(math.Ceil(e)))
	}
	if a.to == a.from {
		a.to++
	}
	return a
}

func (a axis) at(v float64) float64 {
	return a.begin + (math.Log10(v)-float64(a.from))/float64(a.to-a.from)*(a.end-a.begin)
}

func (r *Results) drawPanel(b *strings.Builder, m Measure) {
	fmt.Fprintf(b, `<text x="%d" y="20" font-weight="bold">%s, %s</text>`+"\n", left, m.Name, m.Unit)
	sizes, subjects := r.extent(m)
	var xs, ys []float64
	for _, n := range sizes {
		xs = append(xs, float64(n))
		for _, s := range subjects {
			if v, ok := r.Get(m, s, n); ok && v > 0 {
				ys = append(ys, v)
			}
		}
	}
	if len(ys) == 0 {
		fmt.Fprintf(b, `<text x="%d" y="60">%s</text>`+"\n", left, NotMeasured)
		return
	}
	x := newAxis(xs, left, panelWidth-right)
	y := newAxis(ys, panelHeight-under, top)
	drawGrid(b, x, y)
	for i, s := range r.Subjects {
		r.drawLine(b, m, s, sizes, x, y, colour(i))
	}
}

func drawGrid(b *strings.Builder, x, y axis) {
	for e := x.from; e <= x.to; e++ {
		at := x.at(math.Pow10(e))
		fmt.Fprintf(b, `<line x1="%[1]g" x2="%[1]g" y1="%[2]g" y2="%[3]g" stroke="#ddd"/><text x="%[1]g" y="%[4]g" text-anchor="middle">%[5]s</text>`+"\n",
			at, y.begin, y.end, y.begin+16, Round(math.Pow10(e)))
	}
	for e := y.from; e <= y.to; e++ {
		at := y.at(math.Pow10(e))
		fmt.Fprintf(b, `<line x1="%[2]g" x2="%[3]g" y1="%[1]g" y2="%[1]g" stroke="#ddd"/><text x="%[4]g" y="%[5]g" text-anchor="end">%[6]s</text>`+"\n",
			at, x.begin, x.end, x.begin-6, at+4, Round(math.Pow10(e)))
	}
	fmt.Fprintf(b, `<text x="%g" y="%g" text-anchor="middle">Services</text>`+"\n", (x.begin+x.end)/2, y.begin+34)
}

func (r *Results) drawLine(b *strings.Builder, m Measure, subject string, sizes []int, x, y axis, colour string) {
	var points []string
	for _, n := range sizes {
		if v, ok := r.Get(m, subject, n); ok && v > 0 {
			px, py := x.at(float64(n)), y.at(v)
			points = append(points, fmt.Sprintf("%.1f,%.1f", px, py))
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", px, py, colour)
		}
	}
	fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(points, " "), colour)
}
