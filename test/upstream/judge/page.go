package judge

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

const pageHead = `# Upstream's end-to-end tests

This page is written by ` + "`make e2e-upstream`" + `; do not edit. It shows the results of Kubernetes' own sig-network
tests on a cluster of QEMU guests with kubelet and containerd (` + "`test/upstream`" + `). The program of each column
serves the cluster's Services. A spec that failed was repeated up to three times. If it then passed, it is
flaky, which does not count as a pass. An empty cell means that the spec was not run. A version after a result
means that an older build was tested. The cluster had two nodes, unless a number of nodes follows the result.

`

// Page returns a page with the result of each spec under each of the proxies that have
// results in the directory.
func Page(dir string, proxies []string) (string, error) {
	var columns []*Results
	for _, proxy := range proxies {
		results, err := Read(filepath.Join(dir, proxy+".json"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("results of %s: %w", proxy, err)
		}
		columns = append(columns, results)
	}
	return pageOf(columns), nil
}

// pageOf formats results side by side.
func pageOf(columns []*Results) string {
	page := &strings.Builder{}
	page.WriteString(pageHead)
	writeVersions(page, columns)
	writeCounts(page, columns)
	writeSpecs(page, columns)
	writeReasons(page, columns)
	return page.String()
}

func writeVersions(page *strings.Builder, columns []*Results) {
	page.WriteString("| | version | Kubernetes and its tests | nodes | last run |\n|---|---|---|---|---|\n")
	for _, c := range columns {
		fmt.Fprintf(page, "| %s | %s | %s | %s | %s |\n", c.Proxy, c.Version, c.Kubernetes, c.Nodes, c.Date)
	}
}

func writeCounts(page *strings.Builder, columns []*Results) {
	page.WriteString("\n| | pass | flaky | fail | skip | not run |\n|---|---|---|---|---|---|\n")
	all := len(names(columns))
	for _, c := range columns {
		counts := map[State]int{}
		for _, verdict := range c.Specs {
			counts[verdict.State()]++
		}
		fmt.Fprintf(page, "| %s | %d | %d | %d | %d | %d |\n", c.Proxy,
			counts[Passed], counts[Flaky], counts[Failed], counts[Skipped], all-len(c.Specs))
	}
}

func writeSpecs(page *strings.Builder, columns []*Results) {
	page.WriteString("\n## Specs\n\n| spec |")
	for _, c := range columns {
		fmt.Fprintf(page, " %s |", c.Proxy)
	}
	page.WriteString("\n|---|" + strings.Repeat("---|", len(columns)) + "\n")
	for _, name := range names(columns) {
		fmt.Fprintf(page, "| %s |", cell(name))
		for _, c := range columns {
			fmt.Fprintf(page, " %s |", c.inAWord(name))
		}
		page.WriteString("\n")
	}
}

// inAWord returns the verdict on a spec, with the version if it differs from that of the
// others.
func (r *Results) inAWord(name string) string {
	verdict, ran := r.Specs[name]
	switch {
	case !ran:
		return ""
	}
	var notes []string
	if nodes := verdict.Attempts[len(verdict.Attempts)-1].Nodes; nodes > usualNodes {
		notes = append(notes, fmt.Sprintf("%d nodes", nodes))
	}
	if verdict.Build != r.Build {
		notes = append(notes, verdict.Version)
	}
	if len(notes) == 0 {
		return string(verdict.State())
	}
	return fmt.Sprintf("%s (%s)", verdict.State(), strings.Join(notes, ", "))
}

// usualNodes is the number of nodes that the page does not mention.
const usualNodes = 2

// writeReasons writes why specs did not pass.
func writeReasons(page *strings.Builder, columns []*Results) {
	for _, c := range columns {
		fmt.Fprintf(page, "\n## Why not, under %s\n\n| spec | | reason |\n|---|---|---|\n", c.Proxy)
		for _, name := range names([]*Results{c}) {
			if verdict, ran := c.Specs[name]; ran && verdict.State() != Passed {
				fmt.Fprintf(page, "| %s | %s | %s |\n", cell(name), verdict.State(), cell(strings.Join(verdict.Reasons(), "; ")))
			}
		}
	}
}

func names(columns []*Results) []string {
	all := map[string]bool{}
	for _, c := range columns {
		for name := range c.Specs {
			all[name] = true
		}
		for _, name := range c.Applies {
			all[name] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// cell escapes a text for a cell of a table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(text)
}
