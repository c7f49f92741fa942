package sysctl

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Proc is the kernel's parameters. Those of the network are the ones of the
// calling thread's network namespace. It is safe for concurrent use.
type Proc struct{ root string }

// New gives the parameters at /proc/sys.
func New() *Proc { return NewAt("/proc/sys") }

// NewAt gives those at another root: a host's /proc/sys mounted elsewhere.
func NewAt(root string) *Proc { return &Proc{root: root} }

// Observe reads the keys. A key that cannot be read, or is not there
// (ENOENT, with what would bring it), makes it an error without values; ask
// Exists first about keys that not every kernel has.
func (p *Proc) Observe(keys []string) (State, error) { return observe(p, keys) }

// Exists tells whether the running kernel has a key.
func (p *Proc) Exists(key string) (bool, error) { return exists(p, key) }

// Writable tells whether a key is there and could be written: /proc/sys is
// mounted read-only in many containers.
func (p *Proc) Writable(key string) bool {
	return checkKey(key) == nil && unix.Access(filepath.Join(p.root, key), unix.W_OK) == nil
}

// Apply writes every change and gives back those that failed: ENOENT for a
// key that is not there, EINVAL for a value that the kernel does not take,
// EROFS or EACCES in a container without the right.
func (p *Proc) Apply(changes []Change) []Failure { return apply(p, changes) }

func (p *Proc) read(key string) (string, error) {
	value, err := os.ReadFile(filepath.Join(p.root, key))
	return string(value), err
}

// write never creates a file: in /proc that cannot be, and on any other file
// system it would hide that the key is missing.
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
