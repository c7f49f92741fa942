package manifest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// folder is the content of a directory's files. A file that has become unreadable keeps
// its last readable version.
type folder struct {
	dir, nodeName string
	whole         bool
	files         map[string]*file
	keeper        keeper
}

// file is one file. An unreadable file keeps the objects it had.
type file struct {
	hash    [sha256.Size]byte
	objects []object
	errs    []error
	ignored []metav1.TypeMeta
	unread  bool // its content is unknown
}

// view is the content of a folder at one time.
type view struct {
	objects map[key]metav1.Object // those that the proxy needs
	errs    []error               // sorted by file
	ignored []string              // kinds that are not read
}

// scan reads changed files. If the directory cannot be read it returns an error and
// changes nothing.
func (f *folder) scan() error {
	names, err := f.list()
	if err != nil {
		return err
	}
	files := make(map[string]*file, len(names))
	for _, name := range names {
		if file := f.read(name); file != nil {
			files[name] = file
		}
	}
	f.files = files
	return nil
}

// list returns the names of the manifests, including links. It skips hidden files:
// editors create them, and the links of a ConfigMap point to them.
func (f *folder) list() ([]string, error) {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name)) {
			continue
		}
		if info, err := os.Stat(filepath.Join(f.dir, name)); err == nil && info.IsDir() {
			continue
		}
		names = append(names, name)
	}
	return names, nil
}

// read returns a file's new state, or nil if the file was removed.
func (f *folder) read(name string) *file {
	path, old := filepath.Join(f.dir, name), f.files[name]
	p := parser{nodeName: f.nodeName, whole: f.whole}
	if old == nil {
		old = f.keeper.load(name, p)
	}
	text, err := readRegular(path)
	if errors.Is(err, fs.ErrNotExist) {
		// A dangling link exists, and is an error.
		if _, linkErr := os.Lstat(path); errors.Is(linkErr, fs.ErrNotExist) {
			return nil
		}
	}
	if err != nil {
		return unreadable(path, err, old)
	}
	hash := sha256.Sum256(text)
	if old != nil && old.hash == hash {
		return old
	}
	return renewed(path, hash, p.parse(text), old)
}

// errNotRegular is the error for a pipe, a socket or a device, which is never read: a pipe would
// block all manifests until another program writes to it, and a device may have no end.
var errNotRegular = errors.New("not a regular file")

func readRegular(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errNotRegular
	}
	return os.ReadFile(path)
}

// unreadable keeps a file's objects. It clears the hash, so that the file is parsed as
// soon as it is readable.
func unreadable(path string, err error, old *file) *file {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		err = pathErr.Err
	}
	if old == nil || len(old.objects) == 0 {
		return &file{unread: !errors.Is(err, errNotRegular), errs: []error{fmt.Errorf("cannot read %s: %w", path, err)}}
	}
	return &file{
		objects: old.objects,
		errs:    []error{fmt.Errorf("cannot read %s: %w; keeping its last valid content", path, err)},
	}
}

// renewed returns a file after a change. It keeps the last valid version of every
// object that is invalid now, and of every object that an unreadable document may
// contain: a typo must not remove a Service.
func renewed(path string, hash [sha256.Size]byte, p parsed, old *file) *file {
	f := &file{hash: hash, objects: p.objects, ignored: p.ignored}
	here := map[key]bool{}
	for _, o := range p.objects {
		here[o.key] = true
	}
	for _, problem := range p.problems {
		kept := old.missing(here, problem)
		for _, o := range kept {
			here[o.key] = true
		}
		f.objects = append(f.objects, kept...)
		f.errs = append(f.errs, problem.errorf(path, len(kept) > 0))
	}
	return f
}

// missing lists the objects that a problem may hide.
func (f *file) missing(here map[key]bool, p problem) []object {
	if f == nil {
		return nil
	}
	var hidden []object
	for _, o := range f.objects {
		if !here[o.key] && (!p.known || o.key == p.key) {
			hidden = append(hidden, o)
		}
	}
	return hidden
}

// unread reports whether the content of any file is unknown.
func (f *folder) unread() bool {
	for _, file := range f.files {
		if file.unread {
			return true
		}
	}
	return false
}

// view combines the files. If several define an object, the first one counts, by name
// of the file and position in it.
func (f *folder) view() view {
	v := view{objects: map[key]metav1.Object{}}
	first := map[key]string{}
	for _, name := range slices.Sorted(maps.Keys(f.files)) {
		file, path := f.files[name], filepath.Join(f.dir, name)
		v.errs = append(v.errs, file.errs...)
		for _, o := range file.objects {
			where := fmt.Sprintf("%s: %s", path, o.where)
			if other, ok := first[o.key]; ok {
				v.errs = append(v.errs, fmt.Errorf("%s: ignoring %s, which is already defined in %s", where, o.key, other))
				continue
			}
			first[o.key] = where
			if o.meta != nil {
				v.objects[o.key] = o.meta
			}
		}
		for _, kind := range file.ignored {
			v.ignored = append(v.ignored, strings.TrimPrefix(kind.APIVersion+" "+kind.Kind, " "))
		}
	}
	return v
}
