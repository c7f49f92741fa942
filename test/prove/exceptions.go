//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"sync"

	"sigs.k8s.io/yaml"
)

// Exception is a known disagreement with its reason.
type Exception struct {
	Check  string // classes, foreign, random, updates, histories or necessity
	What   string // the connections, or the part of a rule or set, in words
	Match  string // a regular expression for the failure's text
	Reason string
	// Of necessity: a test that shows what the rule or condition is needed for, or the kind of
	// reason, one of Whys.
	Test, Why string

	match *regexp.Regexp
	used  int
}

// Whys lists the accepted reasons why no packet class needs a rule, with their meaning.
var Whys = map[string]string{
	"performance":       "it spares packets rules or conditions that do not change their result",
	"kube-proxy has it": "users and tools know it from there",
	"equivalent":        "the packets that reach it have the same result with the edit",
	"no class":          "the scenarios lack the packets or the state that it is for",
	"excluded":          "the kernel, or rules before it, exclude the packets to which the edit matters",
	"general":           "the plan cannot distinguish it from members of the set that classes need",
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
		if _, known := Whys[e.Why]; e.Why != "" && !known || (e.Check == "necessity") != (e.Test != "" || e.Why != "") {
			return nil, fmt.Errorf("%s: %q: an entry of necessity, and no other, names a test or one of the kinds of reasons %v", file, e.Match, slices.Sorted(maps.Keys(Whys)))
		}
	}
	return out, nil
}

// Has reports whether a failure is known.
func (x Exceptions) Has(check, text string) bool { return x.Of(check, text) != nil }

// Of returns the entry of a failure, or nil. With PROVE_LOG=FILE it also appends the failure to the
// file, after the entry that it matches.
func (x Exceptions) Of(check, text string) *Exception {
	i := slices.IndexFunc(x, func(e *Exception) bool { return e.Check == check && e.match.MatchString(text) })
	what := "not in exceptions.yaml"
	var out *Exception
	if i >= 0 {
		out = x[i]
		out.used++
		what = out.What
	}
	logFailure(fmt.Sprintf("%s: %s\n%s\n", check, what, text))
	return out
}

var logging sync.Mutex // checks run concurrently

func logFailure(text string) {
	name := os.Getenv("PROVE_LOG")
	if name == "" {
		return
	}
	logging.Lock()
	defer logging.Unlock()
	file, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = file.WriteString(text)
		err = cmp.Or(err, file.Close())
	}
	if err != nil {
		panic(err)
	}
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
