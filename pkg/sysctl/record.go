package sysctl

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Parameters is a Proc or a Fake.
type Parameters interface {
	Observe(keys []string) (State, error)
	Exists(key string) (bool, error)
	Apply([]Change) []Failure
}

// Recorded is parameters of which each value that Apply replaces is kept in a
// file, so that Restore can put it back, in a later process too. It is for one
// goroutine.
type Recorded struct {
	Parameters
	path string
	book book
}

// book is the file's content.
type book struct {
	// Of tells whose parameters these are. Values of another boot or another
	// network namespace, which a shared folder may hold, are not put back.
	Of     string            `json:"of"`
	Values map[string]record `json:"values"`
}

// record is one parameter: what others had set, and what we did.
type record struct {
	Before string `json:"before"`
	Set    string `json:"set"`
}

// Record keeps what stood before in a file below a folder, which it makes.
// The identity is that of whose parameters they are; see Identity. It fails if
// the file can be neither read nor written.
func Record(p Parameters, folder, identity string) (*Recorded, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	r := &Recorded{Parameters: p, path: filepath.Join(folder, "sysctls.json")}
	text, err := os.ReadFile(r.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err == nil {
		if err := json.Unmarshal(text, &r.book); err != nil {
			return nil, fmt.Errorf("%s: %w", r.path, err)
		}
	}
	if r.book.Of != identity || r.book.Values == nil {
		r.book = book{Of: identity, Values: map[string]record{}}
	}
	return r, r.save()
}

// Identity tells this boot and the calling thread's network namespace from
// others.
func Identity() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	namespace, err := os.Readlink("/proc/thread-self/ns/net")
	return normal(string(boot)) + " " + namespace, err
}

// Apply is like the parameters' own. What stands in a key is recorded before
// it is written, so that a crash between leaves no doubt; what cannot be
// recorded is not written.
func (r *Recorded) Apply(changes []Change) []Failure {
	if err := r.note(changes); err != nil {
		var failures []Failure
		for _, c := range changes {
			failures = append(failures, Failure{Change: c, Err: fmt.Errorf("recording the value before: %w", err)})
		}
		return failures
	}
	return r.Parameters.Apply(changes)
}

// note takes down the keys whose value will change. A value that is neither
// the one before nor ours is somebody's since, and becomes the one before. A
// key that cannot be read is left to Apply to complain about.
func (r *Recorded) note(changes []Change) error {
	noted := false
	for _, c := range changes {
		present, ok := r.present(c.Key)
		if !ok || present == normal(c.Value) {
			continue
		}
		known, ours := r.book.Values[c.Key]
		if !ours || present != known.Set {
			known.Before = present
		}
		known.Set = normal(c.Value)
		r.book.Values[c.Key] = known
		noted = true
	}
	if !noted {
		return nil
	}
	return r.save()
}

func (r *Recorded) present(key string) (string, bool) {
	state, err := r.Observe([]string{key})
	return state[key], err == nil
}

// Restore puts back what stood before in every key that still has the value
// which Apply gave it, and forgets it. A key that somebody else has set since,
// or that is gone, is left. What cannot be put back stays recorded, and so does what
// is used by somebody else.
func (r *Recorded) Restore(used func(key string) bool) error {
	var changes []Change
	kept := map[string]record{}
	for _, key := range slices.Sorted(maps.Keys(r.book.Values)) {
		if used(key) {
			kept[key] = r.book.Values[key]
		} else if present, ok := r.present(key); ok && present == r.book.Values[key].Set {
			changes = append(changes, Change{Key: key, Value: r.book.Values[key].Before})
		}
	}
	failures := r.Parameters.Apply(changes)
	for _, f := range failures {
		kept[f.Change.Key] = r.book.Values[f.Change.Key]
	}
	r.book.Values = kept
	if len(kept) > 0 {
		return errors.Join(kernel.Join(failures), r.save())
	}
	return unlessGone(os.Remove(r.path))
}

func unlessGone(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// save replaces the file as a whole.
func (r *Recorded) save() error {
	text, err := json.MarshalIndent(r.book, "", "  ")
	if err != nil {
		return err
	}
	next := r.path + ".new"
	if err := os.WriteFile(next, append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(next, r.path)
}
