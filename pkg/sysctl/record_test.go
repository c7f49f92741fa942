package sysctl

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

const forwardKey, markKey = "net/ipv4/ip_forward", "net/ipv4/conf/all/src_valid_mark"

// recorded opens the folder's record as a new process does.
func recorded(t *testing.T, f *Fake, folder, identity string) *Recorded {
	t.Helper()
	r, err := Record(f, folder, identity)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func unused(string) bool { return false }

func mustApply(t *testing.T, r *Recorded, changes ...Change) {
	t.Helper()
	if failures := r.Apply(changes); len(failures) > 0 {
		t.Fatal(failures)
	}
}

func TestRestore(t *testing.T) {
	for _, c := range []struct {
		name   string
		before string
		then   func(t *testing.T, f *Fake, open func() *Recorded)
		want   string
	}{
		{"what was changed", "0", func(*testing.T, *Fake, func() *Recorded) {}, "0"},
		{"what was right already", "1", func(*testing.T, *Fake, func() *Recorded) {}, "1"},
		{"after a restart that changed nothing", "0", func(t *testing.T, _ *Fake, open func() *Recorded) {
			mustApply(t, open(), Change{markKey, "1"})
		}, "0"},
		{"after a restart with another value", "0", func(t *testing.T, _ *Fake, open func() *Recorded) {
			mustApply(t, open(), Change{markKey, "2"})
		}, "0"},
		{"what another program set since", "0", func(_ *testing.T, f *Fake, _ func() *Recorded) { f.Set(markKey, "5") }, "5"},
		{"what another program set before we set it again", "0", func(t *testing.T, f *Fake, open func() *Recorded) {
			f.Set(markKey, "5")
			mustApply(t, open(), Change{markKey, "1"})
		}, "5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := NewFake(State{markKey: c.before, forwardKey: "0"})
			folder := t.TempDir()
			open := func() *Recorded { return recorded(t, f, folder, "me") }
			mustApply(t, open(), Change{markKey, "1"})
			c.then(t, f, open)
			f.Set(forwardKey, "1") // as another program would
			if err := open().Restore(unused); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(State{markKey: c.want, forwardKey: "1"}, f.Values()); diff != "" {
				t.Errorf("values (-want +got):\n%s", diff)
			}
			if left, _ := filepath.Glob(filepath.Join(folder, "*")); len(left) > 0 {
				t.Errorf("remaining: %v", left)
			}
		})
	}
}

// TestRestoreIgnoresAnotherNode puts another node's values into the shared folder.
func TestRestoreIgnoresAnotherNode(t *testing.T) {
	f, folder := NewFake(State{markKey: "0"}), t.TempDir()
	mustApply(t, recorded(t, f, folder, "me"), Change{markKey, "1"})
	if err := recorded(t, f, folder, "another").Restore(unused); err != nil {
		t.Fatal(err)
	}
	if got := f.Values()[markKey]; got != "1" {
		t.Errorf("%s is %s, want it unchanged", markKey, got)
	}
}

// TestRecordReplacesBrokenFile leaves what a loss of power leaves of a file on a disk.
func TestRecordReplacesBrokenFile(t *testing.T) {
	for _, text := range []string{"", "\x00\x00\x00", `{"of": "me", "values": {"`, `{"of": "me", "values": []}`} {
		f, folder := NewFake(State{markKey: "0"}), t.TempDir()
		if err := os.WriteFile(filepath.Join(folder, "sysctls.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		mustApply(t, recorded(t, f, folder, "me"), Change{markKey, "1"})
		if err := recorded(t, f, folder, "me").Restore(unused); err != nil || f.Values()[markKey] != "0" {
			t.Errorf("%q: %v, %v", text, err, f.Values())
		}
	}
}

func TestRestoreIsRetried(t *testing.T) {
	f, folder := NewFake(State{markKey: "0"}), t.TempDir()
	mustApply(t, recorded(t, f, folder, "me"), Change{markKey, "1"})
	f.Refuse = func(Change) error { return unix.EROFS }
	if err := recorded(t, f, folder, "me").Restore(unused); !errors.Is(err, unix.EROFS) {
		t.Errorf("Restore: %v, want EROFS", err)
	}
	f.Refuse = nil
	if err := recorded(t, f, folder, "me").Restore(unused); err != nil || f.Values()[markKey] != "0" {
		t.Errorf("Restore: %v, %v", err, f.Values())
	}
}

// TestRestoreKeepsValuesInUse restores a value only once no other program uses it.
func TestRestoreKeepsValuesInUse(t *testing.T) {
	f, folder := NewFake(State{markKey: "0", forwardKey: "0"}), t.TempDir()
	mustApply(t, recorded(t, f, folder, "me"), Change{markKey, "1"}, Change{forwardKey, "1"})
	for _, c := range []struct {
		used func(string) bool
		want State
	}{
		{func(key string) bool { return key == forwardKey }, State{markKey: "0", forwardKey: "1"}},
		{unused, State{markKey: "0", forwardKey: "0"}},
	} {
		if err := recorded(t, f, folder, "me").Restore(c.used); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.want, f.Values()); diff != "" {
			t.Errorf("values (-want +got):\n%s", diff)
		}
	}
}

// TestFullFolder lets the folder disappear for a while. Parameters are written, the
// failure is reported once, and the values are recorded as soon as that is possible.
func TestFullFolder(t *testing.T) {
	f, folder := NewFake(State{markKey: "0", forwardKey: "0"}), t.TempDir()
	r := recorded(t, f, folder, "me")
	var told []error
	r.Unrecorded = func(err error) { told = append(told, err) }
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	mustApply(t, r, Change{markKey, "1"})
	mustApply(t, r, Change{forwardKey, "1"})
	if diff := cmp.Diff(State{markKey: "1", forwardKey: "1"}, f.Values()); diff != "" {
		t.Errorf("values (-want +got):\n%s", diff)
	}
	if len(told) != 1 || !errors.Is(told[0], unix.ENOENT) {
		t.Errorf("reported: %v, want ENOENT once", told)
	}
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	mustApply(t, r)
	if err := recorded(t, f, folder, "me").Restore(unused); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(State{markKey: "0", forwardKey: "0"}, f.Values()); diff != "" {
		t.Errorf("restored values (-want +got):\n%s", diff)
	}
}

func TestIdentity(t *testing.T) {
	if id, err := Identity(); err != nil || id == "" {
		t.Errorf("%q, %v", id, err)
	}
}
