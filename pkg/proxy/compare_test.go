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
