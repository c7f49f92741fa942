package reconcile

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// startAhead is start with FlushAhead for each Service.
func (w *world) startAhead(services ...service.Service) Problems {
	w.t.Helper()
	problems := w.startNode()
	for _, s := range services {
		w.set(s)
		problems = append(problems, w.reconciler.FlushAhead()...)
		w.checkHeld()
	}
	return append(problems, w.reconciler.Prune()...)
}

// startNode programs the node without Services.
func (w *world) startNode() Problems {
	w.t.Helper()
	if _, err := w.observe(); err != nil {
		w.t.Fatal(err)
	}
	return w.reconciler.Flush()
}

func additionsInTest() []service.Service {
	restricted := loadBalancer("restricted", "10.96.0.3", "192.0.2.3", "10.244.0.4:8000")
	restricted.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	return []service.Service{
		clusterIP("a", "10.96.0.1", "10.244.0.2:8000"),
		clusterIP("none", "10.96.0.2"),
		restricted,
		clusterIP("six", "fd00::1", "[fd01::2]:8000"),
	}
}

// TestAdditionsAreThoseOfFlush compares the writes of FlushAhead, and their order, with those of Flush.
func TestAdditionsAreThoseOfFlush(t *testing.T) {
	w, ahead := newWorld(t), newWorld(t)
	problems := append(w.startNode(), ahead.startNode()...)
	node, nodeAhead := len(w.order), len(ahead.order)
	for _, s := range additionsInTest() {
		problems = append(problems, w.apply(s)...)
		ahead.set(s)
		problems = append(problems, ahead.reconciler.FlushAhead()...)
	}
	problems = append(problems, ahead.reconciler.Flush()...)
	if err := problems.Err(); err != nil {
		t.Fatal(err)
	}
	if got, want := ahead.kernel(), w.kernel(); got != want {
		t.Errorf("the kernel has\n%s\nwant\n%s", got, want)
	}
	if got, want := ahead.order[nodeAhead:], w.order[node:]; !slices.Equal(got, want) {
		t.Errorf("written\n%q\nwant\n%q", got, want)
	}
}

// TestAdditionsAreWrittenMeanwhile checks that FlushAhead returns before it has written additions, and
// that other changes wait for them.
func TestAdditionsAreWrittenMeanwhile(t *testing.T) {
	w := newWorld(t)
	w.startNode()
	w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))

	before, begin := len(w.order), make(chan struct{})
	w.refuse = func(string) error { <-begin; return nil }
	w.set(clusterIP("b", "10.96.0.2", "10.244.0.3:8000"))
	if problems := w.reconciler.FlushAhead(); len(problems) > 0 || w.reconciler.ahead == nil {
		t.Fatalf("additions are written by Flush; problems %v", problems)
	}
	w.set(clusterIP("a", "10.96.0.1", "10.244.0.4:8000"))
	close(begin)
	if err := w.reconciler.FlushAhead().Err(); err != nil {
		t.Fatal(err)
	}
	w.checkHeld()
	t.Logf("%q", w.order[before:])
	if last, change := w.position("add address 10.96.0.2"), w.position("10.244.0.4"); w.reconciler.ahead != nil || last < before || change < last {
		t.Errorf("a change was written as an addition, or before one: %q", w.order[before:])
	}
}

// TestRefusedAdditions refuses each write of a start in turn, as
// TestEveryRefusalIsReportedAndRepaired does. A VIP must not become local without its set members.
func TestRefusedAdditions(t *testing.T) {
	services := additionsInTest()
	reference := newWorld(t)
	reference.startAhead(services...)
	want, writes := reference.kernel(), slices.Clone(reference.order)
	for _, refused := range writes {
		w := newWorld(t)
		w.refuse = func(change string) error {
			if change == refused {
				return unix.ENOMEM
			}
			return nil
		}
		problems := w.startAhead(services...)
		if len(problems) == 0 {
			t.Errorf("no problem reports that %q was refused", refused)
		}
		w.checkOthers(refused, problems, services[:1])
		for m := range w.reconciler.members.stuck {
			if set := w.reconciler.sets.list[m.set]; set.failed && !requiredSets[set.name] {
				continue
			}
			if w.position("add address "+m.addr.String()+" ") >= 0 || w.position("add local route "+m.addr.String()+"/") >= 0 {
				t.Errorf("refused %q: %s is local without its member", refused, m.addr)
			}
		}
		w.refuse = nil
		w.recover(problems)
		if got := w.kernel(); got != want {
			t.Errorf("after the refusal of %q:\n%s\nwant\n%s", refused, got, want)
		}
	}
	t.Logf("refused each of %d writes in turn", len(writes))
}

// TestRandomAdditions starts with random Services that share addresses and ports, and with random
// refusals. Afterwards the kernel has what it has after a start with Flush.
func TestRandomAdditions(t *testing.T) {
	ahead := 0
	for seed := range uint64(240) {
		claim := []plan.ClaimMode{plan.ClaimPort, plan.ClaimAddress, plan.ClaimRoute, plan.ClaimAuto}[seed%4]
		m := &soak{random: rand.New(rand.NewPCG(seed, 6))}
		services := map[string]service.Service{}
		for range 8 {
			s := m.service()
			services[s.Name.Name] = s
		}
		list := slices.Collect(maps.Values(services))
		slices.SortFunc(list, func(a, b service.Service) int { return strings.Compare(a.Name.Name, b.Name.Name) })

		want := exchangeWorld(t, claim)
		want.startNode()
		for _, s := range list {
			want.mustApply(s)
		}
		if err := want.reconciler.Prune().Err(); err != nil {
			t.Fatal(err)
		}

		w := exchangeWorld(t, claim)
		problems := w.startNode()
		accepted := map[string]bool{} // the kernel accepts again what it has accepted
		w.refuse = func(change string) error {
			if seed%8 < 4 && strings.HasPrefix(change, "add ") && !accepted[change] && m.random.IntN(12) == 0 {
				return unix.ENOMEM
			}
			accepted[change] = true
			return nil
		}
		for _, s := range list {
			w.set(s)
			problems = append(problems, w.reconciler.FlushAhead()...)
			if w.reconciler.ahead != nil {
				ahead++
			}
		}
		problems = append(problems, w.reconciler.Prune()...)
		w.checkHeld()
		w.refuse = nil
		for _, p := range problems {
			w.reconciler.retry(append(p.Owners, types.NamespacedName{})...)
		}
		if err := w.reconciler.Flush().Err(); err != nil {
			t.Fatal(err)
		}
		for _, drained := range []*world{w, want} {
			if err := drained.drain().Err(); err != nil {
				t.Fatal(err)
			}
		}
		if diff := cmp.Diff(want.kernel(), w.kernel()); diff != "" {
			t.Fatalf("claimed by %s, seed %d, after a start with Flush (-), with FlushAhead (+):\n%s", claim, seed, diff)
		}
	}
	t.Logf("%d flushes ahead", ahead)
	if ahead < 100 {
		t.Error("too few additions to test them")
	}
}
