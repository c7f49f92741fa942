package ipset

import (
	"errors"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestFake(t *testing.T) {
	for _, tt := range allTests {
		t.Run(tt.name, func(t *testing.T) {
			tt.test(t, func(testing.TB) (*client, references) {
				f := NewFake()
				return &f.client, f
			})
		})
	}
}

func TestTransientErrorsAreRetried(t *testing.T) {
	f := NewFake()
	want := state(contents(vips4, "10.0.0.1,tcp:1"))
	f.FailNext(unix.ENOBUFS, nil, unix.EINTR)
	mustApply(t, &f.client, Diff(nil, want))
	failures := 0
	f.FailObserve = func() error {
		if failures++; failures < 3 {
			return unix.EINTR
		}
		return nil
	}
	wantState(t, &f.client, want)
	f.FailObserve = func() error { return unix.EINTR }
	if got, err := f.Observe(nil); got != nil || !errors.Is(err, unix.EINTR) {
		t.Errorf("after too many interruptions: %v, %v", got, err)
	}
}

// TestObserveIsNeverPartial fails each dump in turn. A set that is deleted before its
// members are read is not an error.
func TestObserveIsNeverPartial(t *testing.T) {
	for fail := range 3 {
		f := NewFake()
		mustApply(t, &f.client, Diff(nil, state(contents(vips4), contents(nets4))))
		dumps := 0
		failWith := func(err error) func() error {
			return func() error {
				if dumps++; dumps == fail+1 {
					return err
				}
				return nil
			}
		}
		f.FailObserve = failWith(unix.EPERM)
		if got, err := f.Observe(nil); got != nil || !errors.Is(err, unix.EPERM) {
			t.Errorf("dump %d failed: %v, %v", fail, got, err)
		}
		dumps, f.FailObserve = 0, failWith(unix.ENOENT)
		if got, err := f.Observe(nil); fail > 0 && (len(got) != 1 || err != nil) {
			t.Errorf("set %d is gone: %v, %v", fail, got, err)
		}
	}
}

func TestGrowFails(t *testing.T) {
	f := NewFake()
	if err := f.kernel.create(vips4, 1); err != nil {
		t.Fatal(err)
	}
	changes := []Change{
		{Op: AddEntry, Set: vips4, Entry: entry("10.0.0.1,tcp:1")},
		{Op: AddEntry, Set: vips4, Entry: entry("10.0.0.2,tcp:2")},
	}
	f.Refuse = func(c Change) error {
		if c.Op == AddEntry && c.Set.Name != vips4.Name {
			return unix.ENOMEM
		}
		return nil
	}
	failures := f.Apply(changes)
	if len(failures) != 1 || !errors.Is(failures[0], ErrFull) || !errors.Is(failures[0], unix.ENOMEM) {
		t.Errorf("%v", failures)
	}
	if d := cmp.Diff("create vips hash:ip,port family inet\nadd vips 10.0.0.1,tcp:1\n", f.Dump()); d != "" {
		t.Errorf("the temporary set still exists: %s", d)
	}
	f.Refuse = nil
	mustApply(t, &f.client, changes)
}

func TestCounts(t *testing.T) {
	f := NewFake()
	mustApply(t, &f.client, Diff(nil, everything()))
	if d := cmp.Diff(map[Op]int{CreateSet: 13, AddEntry: 22}, f.Counts()); d != "" {
		t.Error(d)
	}
	mustApply(t, &f.client, Diff(everything(), nil))
	if d := cmp.Diff(map[Op]int{DestroySet: 13}, f.Counts()); d != "" {
		t.Error(d)
	}
}

func TestErrorsNameTheFix(t *testing.T) {
	f := NewFake()
	f.FailNext(ErrNoType, unix.EPERM)
	want := []string{
		`create set vips: hash:ip,port: the kernel has no such set type; load it with "modprobe ip_set_hash_ipport" on the node`,
		"create set nets: operation not permitted; sets need CAP_NET_ADMIN",
	}
	for i, f := range f.Apply([]Change{{Op: CreateSet, Set: vips4}, {Op: CreateSet, Set: nets4}}) {
		if d := cmp.Diff(want[i], f.Error()); d != "" {
			t.Error(d)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	f := NewFake()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			mustApply(t, &f.client, Diff(nil, everything()))
			if _, err := f.Observe(nil); err != nil {
				t.Error(err)
			}
			_ = f.Dump()
		})
	}
	wg.Wait()
}
