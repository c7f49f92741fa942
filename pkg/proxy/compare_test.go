package proxy

import (
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
)

// TestChangeDoesNotWaitForAComparison has a Service change while what was read of
// thousands is being compared.
func TestChangeDoesNotWaitForAComparison(t *testing.T) {
	p, w := still(t, 3000)
	ctx := klog.NewContext(t.Context(), klog.Background())
	if !p.prepare(ctx) {
		t.Fatal("the kernel cannot be read")
	}
	p.start(ctx)
	p.observe()
	p.compare(ctx, <-p.observed)
	defer p.endComparing()
	turn := func() { p.turn(ctx, time.Now()) }
	turn()
	w.slice("web7", "10.244.0.2", "10.244.1.1")
	turn()
	if p.adoption == nil || w.compare > 0 || !strings.Contains(w.ipvs.Dump(), "-a -t 10.96.0.8:80 -r 10.244.1.1:8000 -m -w 1") {
		t.Errorf("the comparison goes on: %t; web7 is:\n%s", p.adoption != nil, grep(w.ipvs.Dump(), "10.96.0.8:80"))
	}
	w.taken()
	turns := 2
	for ; p.adoption != nil; turns++ {
		if p.nextWake().After(time.Now()) {
			t.Fatal("the comparison is left alone")
		}
		turn()
	}
	if w.compare != 1 || turns < 10 {
		t.Errorf("%d comparisons, in %d turns", w.compare, turns)
	}
	if got := w.taken(); len(got) > 0 {
		t.Errorf("what was written meanwhile was taken for a difference: %q", got)
	}
}

func grep(text, what string) string {
	var out []string
	for _, line := range strings.Split(text, "\n") {
		if strings.Contains(line, what) {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}

// TestRulesOfOthersChangeAllTheTime has another program change its rules again and
// again: after a few comparisons in vain there are fewer, until one finds something,
// or something else of ours may be gone.
func TestRulesOfOthersChangeAllTheTime(t *testing.T) {
	p, w := still(t, 1)
	ctx := klog.NewContext(t.Context(), klog.Background())
	if !p.prepare(ctx) {
		t.Fatal("the kernel cannot be read")
	}
	p.start(ctx)
	now := time.Now()
	// compared has rules changed every second for a while, and counts comparisons.
	compared := func(seconds int) int {
		before := w.compare
		for range seconds {
			now = now.Add(time.Second)
			p.inbox.rulesChanged()
			p.turn(ctx, now)
			if p.observed == nil {
				continue
			}
			p.compare(ctx, <-p.observed)
			p.comparedAt, p.compareAt = now, now.Add(p.compareAt.Sub(p.comparedAt))
			for p.adoption != nil {
				p.goOnComparing(ctx)
			}
		}
		return w.compare - before
	}
	if n := compared(60); n < 4 || n > 9 {
		t.Errorf("%d comparisons in a minute", n)
	}
	if n := compared(60); n > 4 {
		t.Errorf("%d comparisons in the next one", n)
	}
	p.inbox.deleted()
	if n := compared(6); n < 2 {
		t.Errorf("%d comparisons when something is gone", n)
	}
}
