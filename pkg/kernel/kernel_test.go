package kernel

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

type change string

func (c change) String() string { return string(c) }

func TestFailure(t *testing.T) {
	f := Failure[change]{Change: "add x", Err: fmt.Errorf("netlink: %w", unix.EBUSY)}
	if got, want := f.Error(), "add x: netlink: device or resource busy"; got != want {
		t.Errorf("Error() = %q, want %q", got, want)
	}
	if !errors.Is(f, unix.EBUSY) {
		t.Error("the errno is not found in a Failure")
	}
}

func TestJoin(t *testing.T) {
	if err := Join[change](nil); err != nil {
		t.Errorf("no failures join to %v", err)
	}
	err := Join([]Failure[change]{{"add x", unix.EPERM}, {"delete y", unix.ENOENT}})
	if got, want := err.Error(), "add x: operation not permitted\ndelete y: no such file or directory"; got != want {
		t.Errorf("joined to %q, want %q", got, want)
	}
	if !errors.Is(err, unix.EPERM) || !errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) {
		t.Error("a joined error must match each of its errnos, and no other")
	}
	var f Failure[change]
	if !errors.As(err, &f) || f.Change != "add x" {
		t.Errorf("the first Failure is not found in the joined error, but %v", f)
	}
}

// Each errno belongs to at most one class, also when it is wrapped.
func TestErrorClasses(t *testing.T) {
	kinds := map[string]func(error) bool{
		"not exist":  IsNotExist,
		"exist":      IsExist,
		"transient":  IsTransient,
		"permission": IsPermission,
	}
	for _, tc := range []struct {
		err  error
		kind string
	}{
		{unix.ENOENT, "not exist"},
		{unix.ESRCH, "not exist"},
		{unix.EADDRNOTAVAIL, "not exist"},
		{unix.ENODEV, "not exist"},
		{unix.EEXIST, "exist"},
		{unix.EINTR, "transient"},
		{unix.EAGAIN, "transient"},
		{unix.ENOBUFS, "transient"},
		{unix.EBUSY, "transient"},
		{unix.EPERM, "permission"},
		{unix.EACCES, "permission"},
		{unix.EINVAL, ""},
		{errors.New("file exists"), ""},
		{nil, ""},
	} {
		for kind, is := range kinds {
			if got, want := is(tc.err), kind == tc.kind; got != want {
				t.Errorf("%v is %s: %t, want %t", tc.err, kind, got, want)
			}
			if tc.err == nil {
				continue
			}
			if got, want := is(fmt.Errorf("call: %w", tc.err)), kind == tc.kind; got != want {
				t.Errorf("wrapped %v is %s: %t, want %t", tc.err, kind, got, want)
			}
		}
	}
}

func TestRetry(t *testing.T) {
	for _, tc := range []struct {
		name    string
		answers []error // one for each call
		want    error
	}{
		{"success at once", []error{nil}, nil},
		{"success after a transient error", []error{unix.EINTR, nil}, nil},
		{"success with the last call", []error{unix.EINTR, unix.EAGAIN, unix.ENOBUFS, nil}, nil},
		{"gives up", []error{unix.EINTR, unix.EINTR, unix.EINTR, unix.EBUSY}, unix.EBUSY},
		{"not for what stays", []error{unix.EPERM}, unix.EPERM},
		{"not for what stays, after a transient error", []error{unix.EINTR, unix.EINVAL}, unix.EINVAL},
	} {
		t.Run(tc.name, func(t *testing.T) {
			calls := 0
			err := Retry(func() error {
				calls++
				return tc.answers[calls-1]
			})
			if !errors.Is(err, tc.want) || calls != len(tc.answers) {
				t.Errorf("%v after %d calls, want %v after %d", err, calls, tc.want, len(tc.answers))
			}
		})
	}
}
