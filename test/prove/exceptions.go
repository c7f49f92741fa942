//go:build prove

package prove

import (
	"fmt"
	"os"
	"regexp"

	"sigs.k8s.io/yaml"
)

// Exception is a known disagreement with its reason.
type Exception struct {
	Check  string // classes, foreign, updates, histories or necessity
	What   string // the connections, or the part of a rule or set, in words
	Match  string // a regular expression for the failure's text
	Reason string

	match *regexp.Regexp
	used  int
}

// Exceptions are the entries of a file; see docs/proof.md.
type Exceptions []*Exception

// ReadExceptions reads exceptions.yaml.
func ReadExceptions(file string) (Exceptions, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var out Exceptions
	if err := yaml.UnmarshalStrict(text, &out); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for _, e := range out {
		if e.match, err = regexp.Compile("(?s)" + e.Match); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if e.Reason == "" || e.What == "" {
			return nil, fmt.Errorf("%s: %q has no reason, or does not say what it is about", file, e.Match)
		}
	}
	return out, nil
}

// Has reports whether a failure is known.
func (x Exceptions) Has(check, text string) bool {
	for _, e := range x {
		if e.Check == check && e.match.MatchString(text) {
			e.used++
			return true
		}
	}
	return false
}

// Unused returns the exceptions of a check that matched no failure.
func (x Exceptions) Unused(check string) []string {
	var out []string
	for _, e := range x {
		if e.Check == check && e.used == 0 {
			out = append(out, e.Match)
		}
	}
	return out
}
