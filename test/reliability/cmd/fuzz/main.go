// Command fuzz turns the output of `go test -fuzz` into figures: fuzz VERSION OUT LOG...
// Each log belongs to one target and is named after it and its package. Figures of other
// targets in OUT are kept.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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
	p, err := read(out)
	if err != nil {
		return err
	}
	p.Test, p.Version, p.Kernel = "make fuzz", version, "no kernel"
	for _, log := range logs {
		f, at, err := figure(version, log)
		if err != nil {
			return err
		}
		if at.After(p.Date) {
			p.Date = at
		}
		p.Figures = append(slices.DeleteFunc(p.Figures, func(old reliability.Figure) bool { return old.Name == f.Name }), f)
	}
	slices.SortFunc(p.Figures, func(a, b reliability.Figure) int { return strings.Compare(a.Name, b.Name) })
	if p.Seconds, err = seconds(p.Figures); err != nil {
		return err
	}
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(text, '\n'), 0o644)
}

// read returns the recorded figures, if any.
func read(file string) (p reliability.Part, err error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	return p, err
}

// seconds returns the total duration of the last runs of all targets.
func seconds(figures []reliability.Figure) (sum float64, err error) {
	for _, f := range figures {
		words := strings.FieldsFunc(f.Shows, func(r rune) bool { return r == ' ' || r == ';' })
		took, err := time.ParseDuration(words[1])
		if err != nil {
			return 0, fmt.Errorf("%s: %w", f.Name, err)
		}
		sum += took.Seconds()
	}
	return sum, nil
}

var lastLine = regexp.MustCompile(`elapsed: (\S+), execs: (\d+) .*\(total: (\d+)\)`)

// figure reads the result of a target and its time. A target that found a failure is an
// error: fix it before its figure is published.
func figure(version, log string) (f reliability.Figure, at time.Time, err error) {
	text, err := os.ReadFile(log)
	if err != nil {
		return f, at, err
	}
	info, err := os.Stat(log)
	if err != nil {
		return f, at, err
	}
	at = info.ModTime().UTC().Truncate(time.Second)
	lines := lastLine.FindAllStringSubmatch(string(text), -1)
	if len(lines) == 0 || !strings.Contains(string(text), "\nPASS\n") {
		return f, at, fmt.Errorf("%s: not to the end", log)
	}
	last := lines[len(lines)-1]
	took, err := time.ParseDuration(last[1])
	if err != nil {
		return f, at, err
	}
	inputs, err := strconv.Atoi(last[2])
	if err != nil {
		return f, at, err
	}
	name, _ := strings.CutSuffix(filepath.Base(log), ".log")
	return reliability.Figure{
		Name: "`" + name + "`", Value: float64(inputs), Unit: "inputs",
		Shows: fmt.Sprintf("in %s; a corpus of %s; on %s, %s", took.Round(time.Second), last[3], at.Format(time.DateOnly), version),
	}, at, nil
}
