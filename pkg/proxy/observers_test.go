package proxy

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// recorded is an Observer that records its calls.
type recorded struct{ events []string }

func (o *recorded) note(format string, args ...any) {
	o.events = append(o.events, fmt.Sprintf(format, args...))
}

func (o *recorded) Queued()                                { o.note("queued") }
func (o *recorded) Idle()                                  { o.note("idle") }
func (o *recorded) Serving()                               { o.note("serving") }
func (o *recorded) Passed(took time.Duration, s, p int)    { o.note("passed %s %d %d", took, s, p) }
func (o *recorded) Compared(took time.Duration, diffs int) { o.note("compared %s %d", took, diffs) }
func (o *recorded) Failing(node bool, s, all int)          { o.note("failing %t %d %d", node, s, all) }
func (o *recorded) Held(v, r, d int)                       { o.note("held %d %d %d", v, r, d) }
func (o *recorded) Conflicts(n int)                        { o.note("conflicts %d", n) }
func (o *recorded) Node(exists, deleting, excluded bool) {
	o.note("node %t %t %t", exists, deleting, excluded)
}

func TestObservers(t *testing.T) {
	var a, b recorded
	o := Observers{&a, &b}
	o.Queued()
	o.Idle()
	o.Serving()
	o.Passed(time.Second, 1, 2)
	o.Failing(true, 1, 9)
	o.Compared(time.Minute, 3)
	o.Held(4, 5, 6)
	o.Conflicts(7)
	o.Node(true, false, true)
	want := []string{"queued", "idle", "serving", "passed 1s 1 2", "failing true 1 9", "compared 1m0s 3", "held 4 5 6", "conflicts 7", "node true false true"}
	for name, got := range map[string][]string{"first": a.events, "second": b.events} {
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
