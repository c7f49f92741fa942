// Package kernel holds what the kernel-facing packages share: how a refused
// change is reported, and how the kernel's error numbers are read.
//
// Each of those packages (ipvs, ipset, nat, routing, sysctl) has the same
// shape. Observe reads the kernel's state into plain values, Diff compares
// two states into a list of changes, Apply carries changes out and gives back
// those that the kernel refused. Each has a real implementation and a Fake
// that keeps state and refuses what the kernel refuses.
package kernel

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Failure is one change that the kernel refused, and its reason.
type Failure[C fmt.Stringer] struct {
	Change C
	Err    error
}

func (f Failure[C]) Error() string { return fmt.Sprintf("%s: %v", f.Change, f.Err) }

// Unwrap lets errors.Is find the errno.
func (f Failure[C]) Unwrap() error { return f.Err }

// Join makes one error of all failures, or nil of none.
func Join[C fmt.Stringer](failures []Failure[C]) error {
	errs := make([]error, len(failures))
	for i, f := range failures {
		errs[i] = f
	}
	return errors.Join(errs...)
}

// IsNotExist tells whether the object that a change named is not there.
// IPVS says ESRCH for a missing virtual server and ENOENT for a missing real
// server; addresses are EADDRNOTAVAIL; links ENODEV.
func IsNotExist(err error) bool {
	return isAny(err, unix.ENOENT, unix.ESRCH, unix.EADDRNOTAVAIL, unix.ENODEV)
}

// IsExist tells whether what was to be added is already there.
func IsExist(err error) bool { return isAny(err, unix.EEXIST) }

// IsTransient tells whether the same call may well succeed at once: a dump
// that raced with a change, an interrupted call, a full socket buffer.
func IsTransient(err error) bool {
	return isAny(err, unix.EINTR, unix.EAGAIN, unix.ENOBUFS, unix.EBUSY)
}

// attempts is how often Retry makes a call.
const attempts = 4

// Retry calls f until it succeeds or fails with an error that is not
// transient, four times at most, and gives its last error. It does not pause:
// what is transient here passes at once or not at all.
func Retry(f func() error) error {
	var err error
	for range attempts {
		if err = f(); err == nil || !IsTransient(err) {
			break
		}
	}
	return err
}

// IsPermission tells whether the process lacks a capability (CAP_NET_ADMIN).
func IsPermission(err error) bool { return isAny(err, unix.EPERM, unix.EACCES) }

func isAny(err error, nums ...unix.Errno) bool {
	for _, n := range nums {
		if errors.Is(err, n) {
			return true
		}
	}
	return false
}
