//go:build prove

package prove

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// PROVE in the environment selects what runs: unset, a part that takes seconds;
// PROVE=fixed, all fixed scenarios; PROVE=short, these with a third of the changes;
// PROVE=DURATION, random ones for that time.
var prove = os.Getenv("PROVE")

func init() { debug.SetGCPercent(400) } // little memory is in use

// quickly names the scenarios that always run.
var quickly = []string{"aws-vpc", "external-local", "volcano auto"}

func scenarios(t testing.TB, all bool) []*Scenario {
	t.Helper()
	return scenariosIn(t, all, "testdata", "../../pkg/plan/testdata")
}

// scenariosIn returns the scenarios of directories.
func scenariosIn(t testing.TB, all bool, dirs ...string) []*Scenario {
	t.Helper()
	var out []*Scenario
	for _, dir := range dirs {
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

// forNecessity has scenarios for rules that the others do not need. TestUpdates and
// TestBesideOtherPrograms do not run them.
const forNecessity = "testdata/necessity"

func subjects(t testing.TB, all bool) []*Subject {
	t.Helper()
	return subjectsOf(t, scenarios(t, all))
}

func subjectsOf(t testing.TB, list []*Scenario) []*Subject {
	t.Helper()
	var out []*Subject
	for _, s := range list {
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

// reported groups similar failures, and prints one of each group.
type reported struct {
	check string
	known Exceptions
	kinds map[string][]Failure
	order []string
	count int // known exceptions
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
		t.Errorf("exceptions.yaml: no failure matches %q", e)
	}
}

func figure(name string, value int, shows string) reliability.Figure {
	return reliability.Figure{Name: name, Value: float64(value), Shows: shows}
}

// TestClasses evaluates every class of every scenario.
func TestClasses(t *testing.T) {
	record := reliability.Begin(t, reliability.Packets, "classes")
	r := reported{check: "classes", known: exceptions(t)}
	classes, combinations, list := 0, 0, subjectsOf(t, append(scenarios(t, true), scenariosIn(t, true, forNecessity)...))
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

// TestBesideOtherPrograms applies every foreign action at every hook.
func TestBesideOtherPrograms(t *testing.T) {
	t.Parallel()
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

// TestNecessity removes and edits each rule, removes each set member, and swaps
// neighboring rules.
func TestNecessity(t *testing.T) {
	t.Parallel()
	if prove == "" {
		t.Skip("takes half a minute; PROVE=fixed runs it")
	}
	record := reliability.Begin(t, reliability.Packets, "necessity")
	known := exceptions(t)
	y := NewNecessity()
	for _, s := range subjectsOf(t, append(scenarios(t, true), scenariosIn(t, true, forNecessity)...)) {
		if err := y.Check(s); err != nil {
			t.Fatal(err)
		}
	}
	var figures []reliability.Figure
	tried, caught, listed := 0, 0, 0
	for _, kind := range []struct {
		name, of, shows string
		needs           map[string]*Need
	}{
		{"no rule", "rules removed, one at a time", fmt.Sprintf("interfaces and addresses left out; in each configuration and up to %d environments", len(Environments)+2), y.Rules},
		{"edited", "edits of rules", "a condition left out, negated, narrower or wider; a bit of a mark that is set left out", y.Edits},
		{"swapped", "neighboring rules swapped", "those that some packet matches both of", y.Orders},
		{"no member", "members removed from sets, one at a time", "of every configuration", y.Members},
	} {
		unneeded := Unneeded(kind.needs)
		for _, what := range unneeded {
			n := kind.needs[what]
			text := fmt.Sprintf("%s: %s\n  a packet reaches it: %t, is matched against more rules or conditions: %t", kind.name, what, n.Reached, n.Costs)
			e := known.Of("necessity", text)
			if e == nil {
				t.Errorf("no class shows it: %s", text)
				continue
			}
			if why := n.contradicts(e); why != "" || e.Why == "general" && !y.needsOther(what) {
				why = cmp.Or(why, "no other member of the set is needed")
				t.Errorf("exceptions.yaml: %s: %s: %s", e.What, why, text)
			}
		}
		figures = append(figures, figure(kind.of, len(kind.needs), kind.shows),
			figure("of these, shown by a packet class", len(kind.needs)-len(unneeded), "the others are in test/prove/exceptions.yaml, with a reason"))
		tried, caught, listed = tried+len(kind.needs), caught+len(kind.needs)-len(unneeded), listed+len(unneeded)
	}
	if os.Getenv("PROVE_ONLY") == "" {
		for _, e := range known.Unused("necessity") {
			t.Errorf("exceptions.yaml: no failure matches %q", e)
		}
	}
	record(append(figures,
		figure("mutations in all", tried, ""),
		figure("caught", caught, "by a packet class that gets another result"),
		figure("not caught", listed, "in test/prove/exceptions.yaml, with a reason"),
		figure("neighboring rules that may stand in either order", y.Apart, "no packet matches both, or both do the same; in all configurations"))...)
}

// TestUpdates evaluates every class after each write of every change.
func TestUpdates(t *testing.T) {
	t.Parallel()
	if prove == "" {
		t.Skip("takes minutes; PROVE=fixed runs it")
	}
	record := reliability.Begin(t, reliability.Packets, "updates")
	r := reported{check: "updates", known: exceptions(t)}
	var all UpdateResult
	changes := 0
	var mu sync.Mutex
	one := func(s *Scenario, u Update, f ip.Family) {
		x, err := CheckUpdate(s, u, f)
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			t.Errorf("%s: %s: %v", s.Name, u.Name, err)
		}
		if x.States > 0 {
			changes++
		}
		all.States, all.Opened, all.Crashes = all.States+x.States, all.Opened+x.Opened, all.Crashes+x.Crashes
		for _, bad := range x.Failures {
			r.add(s.Name+u.Name, bad)
		}
	}
	work := make(chan func())
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for do := range work {
				do()
			}
		})
	}
	only := regexp.MustCompile(os.Getenv("PROVE_UPDATE"))
	for _, c := range allChanges(scenarios(t, true)) {
		if !only.MatchString(c.Name) {
			continue
		}
		for _, f := range c.scenario.Config.Families {
			work <- func() { one(c.scenario, c.Update, f) }
		}
	}
	close(work)
	workers.Wait()
	r.print(t, only.String() == "")
	record(
		figure("changes of a configuration", changes, "endpoints, policies, ports, addresses, ENIs"),
		figure("states between two writes", all.States, "in each of them, every packet class has the result from before or from after the change"),
		figure("open connections", all.Opened, "that both sides of a change have; in each state, the next packet and its reply arrive"),
		figure("crashes", all.Crashes, "one after each write; the next start ends in the state of a node that has only had the new configuration"),
		figure("known exceptions", r.count, "packet classes in a state, listed in test/prove/exceptions.yaml"),
	)
}

// scenarioChange is a change of one scenario.
type scenarioChange struct {
	scenario *Scenario
	Update
}

// allChanges returns the changes that apply to scenarios.
func allChanges(list []*Scenario) []scenarioChange {
	var out []scenarioChange
	for _, s := range list {
		for _, u := range updatesOf(s) {
			if _, _, ok := u.sides(s); ok {
				out = append(out, scenarioChange{s, u})
			}
		}
	}
	return out
}

// rounds repeats a property of random scenarios. Rapid shrinks a failing one and keeps it in
// testdata/rapid. With a duration, it runs rounds of rapid's number of checks, and prints the
// progress. SEED is the seed of the first round, and increases by one for each further round.
// It returns the seeds, or "" without a duration.
func rounds(t *testing.T, check func(*rapid.T), progress func() string) (seeds string) {
	t.Helper()
	limit, err := time.ParseDuration(prove)
	if err != nil {
		rapid.Check(t, check)
		return ""
	}
	first, err := strconv.ParseUint(cmp.Or(os.Getenv("SEED"), "1"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	seed := first
	for began := time.Now(); time.Since(began) < limit && !t.Failed(); seed++ {
		if err := flag.Set("rapid.seed", strconv.FormatUint(seed, 10)); err != nil {
			t.Fatal(err)
		}
		rapid.Check(t, check)
		fmt.Printf("%s of %s: seed %d, %s\n", time.Since(began).Round(time.Second), limit, seed, progress())
	}
	return fmt.Sprintf("with the seeds %d to %d", first, seed-1)
}

// TestRandom evaluates every class of random scenarios, alone and beside other programs.
func TestRandom(t *testing.T) {
	record := reliability.Begin(t, reliability.Packets, "random")
	known := exceptions(t)
	configurations, classes, judged := 0, 0, 0
	seeds := rounds(t, func(t *rapid.T) {
		s, err := NewSubject(Draw(t))
		if err != nil {
			t.Fatal(err)
		}
		configurations, classes = configurations+1, classes+len(s.Classes)
		for _, f := range s.Check() {
			if !known.Has("classes", f.String()) {
				t.Fatalf("%s\n%s", f, f.Path)
			}
		}
		acts := Foreigns(s.Points())
		for range min(len(acts), 5) {
			f := acts[rapid.IntRange(0, len(acts)-1).Draw(t, "act")]
			failures, n := s.CheckForeign(f)
			judged += n
			for _, bad := range failures {
				if !known.Has("foreign", bad.String()) && !known.Has("random", bad.String()) {
					t.Fatalf("%s\n%s", bad, bad.Path)
				}
			}
		}
	}, func() string {
		return fmt.Sprintf("%d configurations, %d classes, %d beside other programs", configurations, classes, judged)
	})
	if seeds == "" {
		return
	}
	record(
		figure("random configurations", configurations, seeds),
		figure("packet classes of random configurations", classes, "judged by the oracle"),
		figure("packet classes of random configurations beside other programs", judged, "five acts in each configuration"),
	)
}

// TestRandomHistories evaluates every class of random scenarios between the writes of random
// changes, restarts and crashes, and compares the final states. See history.
func TestRandomHistories(t *testing.T) {
	record := reliability.Begin(t, reliability.Packets, "histories")
	known := exceptions(t)
	var all counts
	seeds := rounds(t, func(t *rapid.T) {
		h, err := newHistory(Draw(t))
		if err != nil {
			t.Fatal(err)
		}
		for range rapid.IntRange(1, 4).Draw(t, "events") {
			failures, err := h.event(t)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range failures {
				if !known.Has("updates", f.String()) && !known.Has("histories", f.String()) {
					t.Fatalf("%s\n%s", f, f.Path)
				}
			}
		}
		all.add(h.counts)
	}, func() string {
		return fmt.Sprintf("%d histories, %d changes, %d crashes, %d members removed", all.histories, all.changes, all.crashes, all.removed)
	})
	if seeds == "" {
		return
	}
	record(
		figure("random histories", all.histories, seeds),
		figure("changes and restarts in random histories", all.changes, "of Services, the network and the configuration"),
		figure("crashes in random histories", all.crashes, "the next start ends in the right state"),
		figure("members of sets that another program removed", all.removed, "the next comparison restores them"),
		figure("states between two writes in random histories", all.states, "every packet class has the result from before or from after"),
		figure("open connections in random histories", all.opened, "continue in all of these states"),
	)
}
