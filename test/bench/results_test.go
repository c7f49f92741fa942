package bench

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

func example() *Results {
	r := NewResults()
	r.Fact("machine", "two cores")
	r.Put(ColdStart, Ours, 100, 2)
	r.Put(ColdStart, Ours, 1000, 2.5)
	r.Put(ColdStart, IPVS, 1000, 1000)
	return r
}

// A missing figure is shown as not measured, in the table of figures and in that of
// targets.
func TestNotMeasured(t *testing.T) {
	page := example().Markdown(Targets([]int{1000}, 1000))
	for _, line := range []string{
		"| machine | two cores |",
		"| Services | 100 | 1,000 |",
		"| kube-ipvs, route | 2 | 2.50 |",
		"| kube-proxy, ipvs | not measured | 1,000 |",
		"| Cold start of kube-proxy's IPVS mode, in ours, 1,000 Services | at least 200 | 400 | met |",
		"| Cold start of its nftables mode, in ours, 1,000 | at least 10 | not measured | |",
	} {
		if !strings.Contains(page, line+"\n") {
			t.Errorf("no line %q in\n%s", line, page)
		}
	}
	if strings.Contains(page, Memory.Name+",") {
		t.Errorf("a table for what has no figures:\n%s", page)
	}
}

// The page of counted instructions has their targets and no others.
func TestCountedPage(t *testing.T) {
	r := example()
	r.Put(PodStart, Ours, 44125, 5.25)
	page := r.CountedPage(CountedTargets(44125))
	for _, line := range []string{
		"| A pod starts on a node with 44,125 VIPs: million instructions, on the loop and beside it (2 ms) | at most 6 | 5.25 | met |",
		"| Most memory during the start, in that after it, 44,125 | at most 1.30 | not measured | |",
		"### A pod starts, million instructions",
	} {
		if !strings.Contains(page, line+"\n") {
			t.Errorf("no line %q in\n%s", line, page)
		}
	}
	if strings.Contains(page, "kube-proxy, ipvs") {
		t.Errorf("figures of another page:\n%s", page)
	}
}

func TestTargetsAreMissed(t *testing.T) {
	r := example()
	r.Put(ColdStart, IPVS, 1000, 100)
	if page := r.Markdown(Targets([]int{1000}, 1000)); !strings.Contains(page, "| at least 200 | 40 | **missed** |") {
		t.Error(page)
	}
}

func TestRound(t *testing.T) {
	for value, want := range map[float64]string{
		0: "0", 44125: "44,125", 1234567.8: "1,234,568", 999.6: "1,000", 123.4: "123", 12.34: "12.3", 1.234: "1.23", 0.12345: "0.123", -1500: "-1,500", -150.2: "-150",
	} {
		if got := Round(value); got != want {
			t.Errorf("%v is shown as %s, want %s", value, got, want)
		}
	}
}

func TestPercentile(t *testing.T) {
	var values []float64
	for i := range 100 {
		values = append(values, float64(99-i))
	}
	if p := Percentile(values, 0.5); p != 50 {
		t.Errorf("the median is %v", p)
	}
	if p := Percentile(values, 0.99); p != 99 {
		t.Errorf("the 99th percentile is %v", p)
	}
	if p := Percentile([]float64{3}, 0.99); p != 3 {
		t.Errorf("of one value: %v", p)
	}
}

// The plot is valid XML, with a line for each subject that has figures.
func TestPlot(t *testing.T) {
	plot := example().SVG()
	decoder := xml.NewDecoder(strings.NewReader(plot))
	for {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, plot)
		}
	}
	if n := strings.Count(plot, "<circle"); n != 3 {
		t.Errorf("%d points, want 3:\n%s", n, plot)
	}
	if strings.Contains(plot, "NaN") || strings.Contains(plot, "Inf") {
		t.Errorf("places that are none:\n%s", plot)
	}
}
