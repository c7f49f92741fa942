package sysctl

import (
	"encoding/json"
	"errors"
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

// Recorded records in a file each value that Apply replaces, so that Restore can
// restore it, also in a later process. It must not be used concurrently.
type Recorded struct {
	Parameters
	// Unrecorded, unless nil, is called once if the file cannot be written.
	Unrecorded func(error)

	path    string
	book    book
	unsaved bool // the file lacks values of book
	told    bool // Unrecorded was called
}

// book is the content of the file.
type book struct {
	// Of identifies the boot and network namespace of these parameters. Values of another
	// one, which a shared folder may contain, are not restored.
	Of     string            `json:"of"`
	Values map[string]record `json:"values"`
}

// record is one parameter: the previous value, and ours.
type record struct {
	Before string `json:"before"`
	Set    string `json:"set"`
}

// Record stores previous values in a file below a folder, which it creates. identity
// identifies the owner of the parameters; see Identity. A file that a crash of the machine has
// left incomplete is replaced: its values were of an earlier boot. It returns an error if the
// file cannot be read or written.
func Record(p Parameters, folder, identity string) (*Recorded, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	r := &Recorded{Parameters: p, path: filepath.Join(folder, "sysctls.json")}
	text, err := os.ReadFile(r.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if json.Unmarshal(text, &r.book) != nil {
		r.book = book{}
	}
	if r.book.Of != identity || r.book.Values == nil {
		r.book = book{Of: identity, Values: map[string]record{}}
	}
	return r, r.save()
}

// Identity identifies this boot and the calling thread's network namespace.
func Identity() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	namespace, err := os.Readlink("/proc/thread-self/ns/net")
	return normal(string(boot)) + " " + namespace, err
}

// Apply is like the parameters' own Apply. It records a key's value before writing it,
// so a crash in between is harmless. If the file cannot be written, it calls Unrecorded
// and writes the keys nevertheless, because Services need them. Every later call tries to
// record them again.
func (r *Recorded) Apply(changes []Change) []Failure {
	if err := r.note(changes); err != nil && !r.told && r.Unrecorded != nil {
		r.told = true
		r.Unrecorded(err)
	}
	return r.Parameters.Apply(changes)
}

// note records the keys whose value will change. A value that is neither the recorded
// one nor ours was set by another program, and replaces the recorded one. Apply reports
// keys that cannot be read.
func (r *Recorded) note(changes []Change) error {
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
		r.unsaved = true
	}
	if !r.unsaved {
		return nil
	}
	err := r.save()
	r.unsaved = err != nil
	return err
}

func (r *Recorded) present(key string) (string, bool) {
	state, err := r.Observe([]string{key})
	return state[key], err == nil
}

// Restore restores the recorded value of every key that still has our value, and
// removes the record. Keys that another program has set since, or that no longer exist,
// are not changed. Values that cannot be restored, or that another program still needs,
// stay recorded.
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
	return ignoreMissing(os.Remove(r.path))
}

func ignoreMissing(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// save replaces the file atomically.
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
