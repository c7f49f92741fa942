package sysctl

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// LinkKey returns the key of a parameter of an interface, such as
// "net/ipv4/conf/eth0/rp_filter". Besides interfaces the kernel has "all" and
// "default".
func LinkKey(family ip.Family, link, parameter string) string {
	version := "ipv4"
	if family == ip.IPv6 {
		version = "ipv6"
	}
	return "net/" + version + "/conf/" + link + "/" + parameter
}

// store is what differs between the real parameters and the Fake. Keys have been
// checked. Errors wrap the kernel's errno.
type store interface {
	read(key string) (string, error)
	write(key, value string) error
}

// ObserveReadable reads parameters one by one with observe, which is Observe of any of this
// package's types, and leaves out those that cannot be read. It never fails.
func ObserveReadable(observe func(keys []string) (State, error), keys iter.Seq[string]) State {
	state := State{}
	for key := range keys {
		if one, err := observe([]string{key}); err == nil {
			state[key] = one[key]
		}
	}
	return state
}

// observe reads all keys. If any cannot be read it returns no values, and an error that
// names all of them.
func observe(s store, keys []string) (State, error) {
	state := make(State, len(keys))
	var errs []error
	for _, key := range keys {
		value, err := readKey(s, key)
		if err != nil {
			errs = append(errs, fmt.Errorf("read sysctl %s: %w", key, err))
			continue
		}
		state[key] = value
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return state, nil
}

func exists(s store, key string) (bool, error) {
	_, err := readKey(s, key)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

func readKey(s store, key string) (string, error) {
	if err := checkKey(key); err != nil {
		return "", err
	}
	value, err := s.read(key)
	if err != nil {
		return "", explain(key, err)
	}
	return normal(value), nil
}

func apply(s store, changes []Change) []Failure {
	var failures []Failure
	for _, c := range changes {
		if err := writeKey(s, c.Key, c.Value); err != nil {
			failures = append(failures, Failure{Change: c, Err: err})
		}
	}
	return failures
}

// writeKey also reads the value back: the kernel accepts some values but stores others
// (it rounds up net/netfilter/nf_conntrack_buckets), without an error.
func writeKey(s store, key, value string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if err := s.write(key, value); err != nil {
		return explain(key, err)
	}
	kept, err := readKey(s, key)
	if err != nil {
		return err
	}
	if kept != normal(value) {
		return fmt.Errorf("the kernel stored the value %q: %w", kept, unix.EINVAL)
	}
	return nil
}

// checkKey rejects keys that do not name a file below the root.
func checkKey(key string) error {
	if !fs.ValidPath(key) || key == "." || !filepath.IsLocal(key) {
		return fmt.Errorf("key %q is not a path below /proc/sys: %w", key, unix.EINVAL)
	}
	return nil
}

// explain adds the fix to an error; errors.Is still finds the errno.
func explain(key string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w (%s)", err, missing(key))
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w (/proc/sys is mounted read-only: mount the node's /proc/sys/net at /host/proc/sys/net, or run the container privileged)", err)
	case kernel.IsPermission(err):
		return fmt.Errorf("%w (the process needs root and CAP_NET_ADMIN)", err)
	}
	return err
}

// providers maps prefixes of keys to what provides the keys.
var providers = []struct{ prefix, fix string }{
	{"net/ipv4/vs/", "modprobe ip_vs; if it is loaded, this kernel has no such parameter"},
	{"net/netfilter/nf_conntrack_", "modprobe nf_conntrack; if it is loaded, this kernel has no such parameter"},
	{"net/bridge/", "modprobe br_netfilter"},
	{"net/ipv4/conf/", "no such interface, or no such parameter in this kernel"},
	{"net/ipv6/conf/", "no such interface, or IPv6 is disabled in this kernel"},
	{"net/ipv6/", "IPv6 is disabled in this kernel"},
}

func missing(key string) string {
	for _, p := range providers {
		if strings.HasPrefix(key, p.prefix) {
			return p.fix
		}
	}
	return "no such parameter in this kernel"
}
