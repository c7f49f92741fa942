package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestFiguresOfTheREADME compares the README's measurements with the pages that explain
// them. Most of these pages are written by make targets.
func TestFiguresOfTheREADME(t *testing.T) {
	measurements := rows(t, "README.md", "## Measurements")
	found := map[string][]string{}
	for _, row := range measurements {
		found[row[0]] = row[1:4]
	}
	ipvs, nftables := "kube-proxy, ipvs", "kube-proxy, nftables"
	const dataplane, controlPlane = "docs/performance/dataplane.md", "docs/performance/measurements.md"
	adds := func(name string) []string { return row(t, dataplane, "### ClusterIP, from a pod", name) }
	with10000 := func(heading string) []string {
		column := slices.Index(row(t, controlPlane, heading, "Services"), "10,000")
		_, unit, _ := strings.Cut(heading, ", ")
		if at := strings.LastIndex(unit, ", "); at >= 0 {
			unit = unit[at+2:]
		}
		var out []string
		for _, name := range []string{"kube-ipvs, route", ipvs, nftables} {
			out = append(out, row(t, controlPlane, heading, name)[column]+" "+unit)
		}
		return out
	}
	want := map[string][]string{
		"upstream's sig-network tests":                 {judged(t, "kube-ipvs"), judged(t, "kube-proxy-ipvs"), judged(t, "kube-proxy-nftables")},
		"first sync, 10,000 Services":                  with10000("### Cold start, s"),
		"one endpoint change, 10,000 Services, median": with10000("### One endpoint changed, median, ms"),
		"memory after the start, 10,000 Services":      with10000("### Memory after the start, MB"),
		"instructions that a ClusterIP adds to a round trip, on a node without load balancer IPs": {
			added(adds("kube-ipvs")[2]), added(adds(ipvs)[2]), added(adds(nftables)[2])},
		"instructions that a ClusterIP adds to a new connection, on such a node": {
			added(adds("kube-ipvs")[1]), added(adds(ipvs)[1]), added(adds(nftables)[1])},
		"of the connections tested beside CNIs, policy engines and firewalls, those worse than with kube-proxy's IPVS mode": {
			neighbours(t), "0 by definition", "not run"},
	}
	for name, figures := range want {
		if !slices.Equal(found[name], figures) {
			t.Errorf("README.md says %q of %q, the page that it links to %q", found[name], name, figures)
		}
	}
	if len(measurements) != len(want)+1 { // and the head of the table
		t.Errorf("the README's table has %d rows, %d are compared", len(measurements)-1, len(want))
	}
}

// rows returns the cells of the tables below a heading, up to the next heading.
func rows(t *testing.T, page, heading string) (out [][]string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", page))
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut("\n"+string(text), "\n"+heading+"\n")
	if !ok {
		t.Fatalf("%s has no %q", page, heading)
	}
	section, _, _ = strings.Cut(section, "\n#")
	for line := range strings.SplitSeq(section, "\n") {
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "|---") {
			continue
		}
		var cells []string
		for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
			cells = append(cells, strings.TrimSpace(cell))
		}
		out = append(out, cells)
	}
	return out
}

// row returns the row below a heading that begins with these cells.
func row(t *testing.T, page, heading string, begin ...string) []string {
	t.Helper()
	for _, cells := range rows(t, page, heading) {
		if len(cells) > len(begin) && slices.Equal(cells[:len(begin)], begin) {
			return cells
		}
	}
	t.Fatalf("%s, %q has no row %q", page, heading, begin)
	return nil
}

// judged returns what the page of upstream's tests counts for a program.
func judged(t *testing.T, program string) string {
	t.Helper()
	for _, cells := range rows(t, "docs/conformance.md", "# Upstream's end-to-end tests") {
		if cells[0] != program || len(cells) != 6 {
			continue
		}
		pass, flaky, fail, skip, notRun := cells[1], cells[2], cells[3], cells[4], cells[5]
		out := pass + " passed, " + fail + " failed"
		if flaky != "0" {
			out += ", " + flaky + " flaky"
		}
		if out += ", " + skip + " skipped"; notRun != "0" {
			out += ", " + notRun + " not run"
		}
		return out
	}
	t.Fatalf("docs/conformance.md does not count %s", program)
	return ""
}

// neighbours returns how many cells of all set-ups are worse.
func neighbours(t *testing.T) string {
	t.Helper()
	cells, worse := 0, 0
	for _, row := range rows(t, "docs/neighbours.md", "## Summary")[1:] {
		for column, sum := range map[int]*int{1: &cells, 4: &worse} {
			n, err := strconv.Atoi(row[column])
			if err != nil {
				t.Fatal(err)
			}
			*sum += n
		}
	}
	return fmt.Sprintf("%d of %d,%03d", worse, cells/1000, cells%1000)
}

var number = regexp.MustCompile(`^\+([0-9,]*[0-9])`)

// added returns the first number of a cell such as "+57,063 / +52,079, 1.10".
func added(cell string) string {
	if match := number.FindStringSubmatch(cell); match != nil {
		return match[1]
	}
	return cell
}
