// Package kernel holds what the kernel packages share: the failure of a change, and
// classes of errnos. Package nlmsg sends and parses netlink messages, package generation
// distinguishes our nf_tables transactions from those of other programs, and package
// program runs programs.
//
// The kernel packages (ipvs, ipset, nat, routing, sysctl) have the same shape. Observe
// reads the kernel's state into plain values, and Apply makes changes and returns those
// that the kernel refused. Each has a real implementation and a Fake that keeps state
// and refuses what the kernel refuses.
package kernel

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Failure is a change that the kernel refused, with the reason.
type Failure[C fmt.Stringer] struct {
	Change C
	Err    error
}

func (f Failure[C]) Error() string { return fmt.Sprintf("%s: %v", f.Change, f.Err) }

// Unwrap lets errors.Is find the errno.
func (f Failure[C]) Unwrap() error { return f.Err }

// Join joins all failures in one error, or returns nil if there are none.
func Join[C fmt.Stringer](failures []Failure[C]) error {
	errs := make([]error, len(failures))
	for i, f := range failures {
		errs[i] = f
	}
	return errors.Join(errs...)
}

// IsNotExist reports whether the object of a change does not exist. IPVS returns ESRCH
// for a missing virtual server and ENOENT for a missing real server; addresses return
// EADDRNOTAVAIL, links ENODEV.
func IsNotExist(err error) bool {
	return isAny(err, unix.ENOENT, unix.ESRCH, unix.EADDRNOTAVAIL, unix.ENODEV)
}

// IsExist reports whether an object to be added already exists.
func IsExist(err error) bool { return isAny(err, unix.EEXIST) }

// IsTransient reports whether the same call may succeed if it is repeated immediately: a
// dump that raced with a change, an interrupted call, a full socket buffer.
func IsTransient(err error) bool {
	return isAny(err, unix.EINTR, unix.EAGAIN, unix.ENOBUFS, unix.EBUSY)
}

// attempts is the maximum number of calls by Retry.
const attempts = 4

// Retry calls f until it succeeds or fails with an error that is not transient, at most
// four times, and returns the last error. It does not pause: transient errors pass
// immediately or not at all.
func Retry(f func() error) error {
	var err error
	for range attempts {
		if err = f(); err == nil || !IsTransient(err) {
			break
		}
	}
	return err
}

// IsPermission reports whether the process lacks a capability (CAP_NET_ADMIN).
func IsPermission(err error) bool { return isAny(err, unix.EPERM, unix.EACCES) }

func isAny(err error, nums ...unix.Errno) bool {
	for _, n := range nums {
		if errors.Is(err, n) {
			return true
		}
	}
	return false
}
