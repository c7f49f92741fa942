package ipvs

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestFake(t *testing.T) {
	for _, tt := range allTests {
		t.Run(tt.name, func(t *testing.T) {
			tt.test(t, func(testing.TB) *client { return &NewFake().client })
		})
	}
}

func TestTransientErrorsAreRetried(t *testing.T) {
	f := NewFake()
	want := State{tcp1: service("rr", "192.0.2.1:80")}
	f.FailNext(unix.ENOBUFS, nil, unix.EINTR)
	mustApply(t, &f.client, Diff(nil, want))
	failures := 0
	f.FailObserve = func() error {
		if failures++; failures < 3 {
			return unix.EINTR
		}
		return nil
	}
	got, err := f.Observe()
	if err != nil || got.String() != want.String() {
		t.Errorf("%v, %v", got, err)
	}
	f.FailObserve = func() error { return unix.EINTR }
	if got, err := f.Observe(); got != nil || !errors.Is(err, unix.EINTR) {
		t.Errorf("after too many interruptions: %v, %v", got, err)
	}
}

// TestObserveIsNeverPartial fails each dump in turn.
func TestObserveIsNeverPartial(t *testing.T) {
	for fail := range 3 {
		f := NewFake()
		mustApply(t, &f.client, Diff(nil, State{tcp1: service("rr"), tcp2: service("rr")}))
		f.Unlisted = func(Key) bool { return true }
		dumps := 0
		f.FailObserve = func() error {
			if dumps++; dumps == fail+1 {
				return unix.EPERM
			}
			return nil
		}
		if got, err := f.Observe(); got != nil || !errors.Is(err, unix.EPERM) {
			t.Errorf("dump %d failed: %v, %v", fail, got, err)
		}
	}
}

func TestFailures(t *testing.T) {
	f := NewFake()
	f.Refuse = func(c Change) error {
		if c.Key == tcp2 {
			return unix.EPERM
		}
		return nil
	}
	changes := Diff(nil, State{tcp1: service("rr", "192.0.2.1:80"), tcp2: service("rr")})
	failures := f.Apply(changes)
	if len(failures) != 1 || failures[0].Change.Key != tcp2 || !errors.Is(failures[0], unix.EPERM) {
		t.Errorf("%v", failures)
	}
	if d := cmp.Diff("-A -t 10.96.0.1:443 -s rr\n-a -t 10.96.0.1:443 -r 192.0.2.1:80 -m -w 1\n", f.Dump()); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(map[Op]int{AddVirtualServer: 2, AddRealServer: 1}, f.Counts()); d != "" {
		t.Error(d)
	}
	if counts := f.Counts(); len(counts) > 0 {
		t.Errorf("the last call did not reset the counts: %v", counts)
	}
}

func TestSetConnections(t *testing.T) {
	f := NewFake()
	dest := netip.MustParseAddrPort("192.0.2.1:80")
	mustApply(t, &f.client, Diff(nil, State{tcp1: service("rr", "192.0.2.1:80")}))
	f.SetConnections(tcp1, dest, Connections{Active: 2, Inactive: 1})
	f.SetConnections(tcp2, dest, Connections{Active: 9})
	mustApply(t, &f.client, []Change{{Op: UpdateRealServer, Key: tcp1, Dest: dest}})
	got, err := f.Connections(tcp1)
	if err != nil || got[dest] != (Connections{Active: 2, Inactive: 1}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestConcurrentUse(t *testing.T) {
	f := NewFake()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			mustApply(t, &f.client, Diff(nil, State{tcp1: service("rr", "192.0.2.1:80")}))
			if _, err := f.Observe(); err != nil {
				t.Error(err)
			}
			if _, err := f.Connections(tcp1); err != nil {
				t.Error(err)
			}
			_ = f.Dump()
		})
	}
	wg.Wait()
}

// TestNothingWaitsForObserve makes a change while Observe reads everything, which may
// take long.
func TestNothingWaitsForObserve(t *testing.T) {
	f := NewFake()
	mustApply(t, &f.client, Diff(nil, State{tcp1: service("rr", "192.0.2.1:80"), tcp2: service("rr")}))
	asked, written := make(chan bool), make(chan bool)
	first := true
	f.FailObserve = func() error {
		if first {
			first = false
			close(asked)
			<-written
		}
		return nil
	}
	observed := make(chan State)
	go func() {
		state, _ := f.Observe()
		observed <- state
	}()
	<-asked
	go func() {
		f.Apply([]Change{{Op: AddRealServer, Key: tcp1, Dest: netip.MustParseAddrPort("192.0.2.2:80"), RealServer: RealServer{Weight: 1}}})
		close(written)
	}()
	select {
	case state := <-observed:
		if len(state[tcp1].RealServers) != 2 {
			t.Errorf("the concurrent write is missing: %v", state)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a change waits for Observe")
	}
}
