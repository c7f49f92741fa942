package sysctl

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Proc accesses the kernel's parameters. Those of the network belong to the network
// namespace of the calling thread. It may be used concurrently.
type Proc struct{ root string }

// In a container that is not privileged, runtimes mount ownRoot read-only. The DaemonSet's pod has
// the node's parameters of the network below hostRoot, where they can be written.
const ownRoot, hostRoot = "/proc/sys", "/host/proc/sys"

// New returns the parameters at /proc/sys, or those at /host/proc/sys if only these can be written.
func New() *Proc { return newAt(NewAt(ownRoot), NewAt(hostRoot)) }

func newAt(own, host *Proc) *Proc {
	const key = "net/ipv4/ip_forward" // every kernel has it
	if !own.Writable(key) && host.Writable(key) {
		return host
	}
	return own
}

// NewAt returns the parameters at another root, such as a host's /proc/sys mounted
// elsewhere. Keys that are not below it do not exist.
func NewAt(root string) *Proc { return &Proc{root: root} }

// Observe reads the keys. If a key does not exist (ENOENT, with the fix) or cannot be
// read, it returns an error and no values. Call Exists first for keys that some kernels
// do not have.
func (p *Proc) Observe(keys []string) (State, error) { return observe(p, keys) }

// Exists reports whether the running kernel has a key.
func (p *Proc) Exists(key string) (bool, error) { return exists(p, key) }

// Writable reports whether a key exists and can be written: many containers mount
// /proc/sys read-only.
func (p *Proc) Writable(key string) bool {
	return checkKey(key) == nil && unix.Access(filepath.Join(p.root, key), unix.W_OK) == nil
}

// Apply writes every change and returns those that failed: ENOENT for a missing key,
// EINVAL for an invalid value, EROFS or EACCES in an unprivileged container.
func (p *Proc) Apply(changes []Change) []Failure { return apply(p, changes) }

func (p *Proc) read(key string) (string, error) {
	value, err := os.ReadFile(filepath.Join(p.root, key))
	return string(value), err
}

// write never creates a file: impossible in /proc, and on another file system it would
// hide that the key is missing.
func (p *Proc) write(key, value string) error {
	f, err := os.OpenFile(filepath.Join(p.root, key), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(value + "\n"); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}
