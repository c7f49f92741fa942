//go:build prove

package prove

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// What runs, by the environment: nothing said, a part that takes seconds; PROVE=fixed,
// all fixed scenarios; PROVE=DURATION, random ones for so long.
var prove = os.Getenv("PROVE")

// quickly are the scenarios of the part that always runs, besides their classes.
var quickly = []string{"aws-vpc", "external-local", "volcano auto"}

func scenarios(t testing.TB, all bool) []*Scenario {
	t.Helper()
	var out []*Scenario
	for _, dir := range []string{"testdata", "../../pkg/plan/testdata"} {
		list, err := LoadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, list...)
	}
	if only := os.Getenv("PROVE_ONLY"); only != "" || !all {
		names := strings.Split(only, ",")
		if only == "" {
			names = quickly
		}
		out = slices.DeleteFunc(out, func(s *Scenario) bool { return !slices.Contains(names, s.Name) })
	}
	return out
}

func subjects(t testing.TB, all bool) []*Subject {
	t.Helper()
	var out []*Subject
	for _, s := range scenarios(t, all) {
		for _, f := range s.Config.Families {
			sub, err := NewSubject(s, f)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, sub)
		}
	}
	return out
}

func exceptions(t testing.TB) Exceptions {
	t.Helper()
	x, err := ReadExceptions("exceptions.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// reported gathers failures that are alike, and prints one of each kind.
type reported struct {
	check string
	known Exceptions
	kinds map[string][]Failure
	order []string
	count int // those that are excepted
}

func (r *reported) add(kind string, f Failure) {
	if r.known.Has(r.check, f.String()) {
		r.count++
		return
	}
	if r.kinds == nil {
		r.kinds = map[string][]Failure{}
	}
	if r.kinds[kind] == nil {
		r.order = append(r.order, kind)
	}
	r.kinds[kind] = append(r.kinds[kind], f)
}

func (r *reported) print(t *testing.T, all bool) {
	t.Helper()
	for i, kind := range r.order {
		list := r.kinds[kind]
		if i < 20 {
			t.Errorf("%d classes, such as\n%s\n%s", len(list), list[0], list[0].Path)
		} else {
			t.Errorf("%d classes: %s: %s", len(list), kind, list[0].Class)
		}
	}
	if !all || os.Getenv("PROVE_ONLY") != "" {
		return
	}
	for _, e := range r.known.Unused(r.check) {
		t.Errorf("exceptions.yaml: nothing needs %q any more", e)
	}
}

func figure(name string, value int, shows string) reliability.Figure {
	return reliability.Figure{Name: name, Value: float64(value), Shows: shows}
}

// TestClasses judges every class of every scenario.
func TestClasses(t *testing.T) {
	record := reliability.Begin(t, reliability.Packets, "classes")
	r := reported{check: "classes", known: exceptions(t)}
	classes, combinations, list := 0, 0, subjects(t, true)
	for _, s := range list {
		classes, combinations = classes+len(s.Classes), combinations+s.Combinations
		for _, f := range s.Check() {
			r.add(f.Subject+f.Got, f)
		}
	}
	r.print(t, true)
	record(
		figure("configurations", len(list), "scenarios in each SNAT mode and family"),
		figure("packet classes", classes, "judged by the oracle"),
		figure("combinations of values", combinations, "that these classes represent"),
		figure("known disagreements", r.count, "in test/prove/exceptions.yaml"),
	)
}

// TestBesideOtherPrograms has every other program act at every point.
func TestBesideOtherPrograms(t *testing.T) {
	all := prove != ""
	record := reliability.Begin(t, reliability.Packets, "foreign")
	r := reported{check: "foreign", known: exceptions(t)}
	acts, judged := 0, 0
	for _, s := range subjects(t, all) {
		for _, f := range Foreigns(s.Points()) {
			acts++
			failures, n := s.CheckForeign(f)
			judged += n
			for _, bad := range failures {
				r.add(f.Name, bad)
			}
		}
	}
	r.print(t, all)
	record(
		figure("acts of other programs", acts, "a write to a mark at one point of the way, or a rule that accepts early"),
		figure("packet classes beside them", judged, "right, or as under kube-proxy"),
		figure("known exceptions", r.count, "in test/prove/exceptions.yaml"),
	)
}

// TestNecessity removes each rule, and each member of a set.
func TestNecessity(t *testing.T) {
	if prove == "" {
		t.Skip("takes half a minute; PROVE=fixed runs it")
	}
	record := reliability.Begin(t, reliability.Packets, "necessity")
	known := exceptions(t)
	y := NewNecessity()
	for _, s := range subjects(t, true) {
		y.Check(s)
	}
	unneeded, tried, members := 0, 0, 0
	for _, rule := range y.Unneeded() {
		if !known.Has("necessity", rule) {
			t.Errorf("no class needs it: %s", rule)
		}
		unneeded++
	}
	for _, n := range y.Rules {
		tried += n.Tried
	}
	for name, n := range y.Sets {
		members += n.Tried
		if n.Tried > 0 && n.By == "" && !known.Has("necessity", "set "+name) {
			t.Errorf("no class needs a member of %s", name)
		}
	}
	if os.Getenv("PROVE_ONLY") == "" {
		for _, e := range known.Unused("necessity") {
			t.Errorf("exceptions.yaml: nothing needs %q any more", e)
		}
	}
	record(
		figure("rules removed, one at a time", tried, "in each configuration and five environments"),
		figure("different rules", len(y.Rules), "interfaces and addresses left out"),
		figure("needed by a packet class", len(y.Rules)-unneeded, "the others are in test/prove/exceptions.yaml, with a reason"),
		figure("members of sets removed", members, ""),
		figure("neighbours swapped", y.Swaps, ""),
		figure("swaps that a packet class shows", y.Ordered, "the others may stand in either order"),
	)
}

// TestUpdates judges every class after each write of every change.
func TestUpdates(t *testing.T) {
	if prove == "" {
		t.Skip("takes minutes; PROVE=fixed runs it")
	}
	record := reliability.Begin(t, reliability.Packets, "updates")
	r := reported{check: "updates", known: exceptions(t)}
	states, changes := 0, 0
	for _, s := range scenarios(t, true) {
		for _, u := range Updates {
			for _, f := range s.Config.Families {
				bad, n, err := CheckUpdate(s, u, f)
				if err != nil {
					t.Errorf("%s: %s: %v", s.Name, u.Name, err)
				}
				if states += n; n > 0 {
					changes++
				}
				for _, b := range bad {
					r.add(s.Name+u.Name, b)
				}
			}
		}
	}
	r.print(t, true)
	record(
		figure("changes of a configuration", changes, "endpoints, policies, ports, addresses, ENIs"),
		figure("states between two writes", states, "in each of them, every packet class has the result from before or from after the change"),
		figure("known exceptions", r.count, "packet classes in a state, listed in test/prove/exceptions.yaml"),
	)
}

// TestRandom draws scenarios. Rapid makes a failing one small and keeps it in
// testdata/rapid.
func TestRandom(t *testing.T) {
	known := exceptions(t)
	check := func(t *rapid.T) {
		s, err := NewSubject(Draw(t), 4)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range s.Check() {
			if !known.Has("classes", f.String()) {
				t.Fatalf("%s\n%s", f, f.Path)
			}
		}
		acts := Foreigns(s.Points())
		for range min(len(acts), 5) {
			f := acts[rapid.IntRange(0, len(acts)-1).Draw(t, "act")]
			failures, _ := s.CheckForeign(f)
			for _, bad := range failures {
				if !known.Has("foreign", bad.String()) {
					t.Fatalf("%s\n%s", bad, bad.Path)
				}
			}
		}
	}
	limit, err := time.ParseDuration(prove)
	if err != nil {
		rapid.Check(t, check)
		return
	}
	for began, rounds := time.Now(), 0; time.Since(began) < limit && !t.Failed(); {
		rapid.Check(t, check)
		rounds++
		fmt.Printf("%s of %s: %d rounds of random configurations\n", time.Since(began).Round(time.Second), limit, rounds)
	}
}
