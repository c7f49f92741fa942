// Command fuzz makes figures of what `go test -fuzz` has written, a file for each
// target, named after it and its package: fuzz VERSION OUT LOG...
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: fuzz VERSION OUT LOG...")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(1)
	}
}

func run(version, out string, logs []string) error {
	p := reliability.Part{Test: "make fuzz", Version: version, Kernel: "no kernel"}
	for _, log := range logs {
		f, took, err := figure(log)
		if err != nil {
			return err
		}
		info, err := os.Stat(log)
		if err != nil {
			return err
		}
		if at := info.ModTime().UTC().Truncate(time.Second); at.After(p.Date) {
			p.Date = at
		}
		p.Seconds += took.Seconds()
		p.Figures = append(p.Figures, f)
	}
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(text, '\n'), 0o644)
}

var lastLine = regexp.MustCompile(`elapsed: (\S+), execs: (\d+) .*\(total: (\d+)\)`)

// figure reads how a target has ended. One that has found something is an error:
// there is nothing to be told of it before that is mended.
func figure(log string) (reliability.Figure, time.Duration, error) {
	var none reliability.Figure
	text, err := os.ReadFile(log)
	if err != nil {
		return none, 0, err
	}
	lines := lastLine.FindAllStringSubmatch(string(text), -1)
	if len(lines) == 0 || !strings.Contains(string(text), "\nPASS\n") {
		return none, 0, fmt.Errorf("%s: not to the end", log)
	}
	last := lines[len(lines)-1]
	took, err := time.ParseDuration(last[1])
	if err != nil {
		return none, 0, err
	}
	inputs, err := strconv.Atoi(last[2])
	if err != nil {
		return none, 0, err
	}
	name, _ := strings.CutSuffix(filepath.Base(log), ".log")
	return reliability.Figure{
		Name: "`" + name + "`", Value: float64(inputs), Unit: "inputs",
		Shows: fmt.Sprintf("in %s; a corpus of %s", took.Round(time.Second), last[3]),
	}, took, nil
}
