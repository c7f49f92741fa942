package manifest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// keeper stores the last valid objects of invalid files, so that the next process does not delete
// them. It does not store valid files, because --state-dir usually is in memory. So if a file
// becomes invalid while no process runs, its invalid objects are deleted.
type keeper struct {
	dir string // "" stores nothing
}

// newKeeper returns the keeper of a folder of manifests. State of several such folders may be
// in one stateDir.
func newKeeper(stateDir, manifests string) keeper {
	if stateDir == "" {
		return keeper{}
	}
	if abs, err := filepath.Abs(manifests); err == nil {
		manifests = abs
	}
	sum := sha256.Sum256([]byte(manifests))
	return keeper{dir: filepath.Join(stateDir, keptDir, hex.EncodeToString(sum[:8]))}
}

// keptDir is the folder in stateDir for the keepers of all folders of manifests.
const keptDir = "manifests"

// Forget deletes what Run has stored in stateDir.
func Forget(stateDir string) error {
	return os.RemoveAll(filepath.Join(stateDir, keptDir))
}

// load returns the file that an earlier process stored, or nil.
func (k *keeper) load(name string, p parser) *file {
	if k.dir == "" {
		return nil
	}
	text, err := os.ReadFile(filepath.Join(k.dir, name))
	if err != nil {
		return nil
	}
	return &file{objects: p.parse(text).objects}
}

// store stores the invalid files, and deletes what is stored of others.
func (k *keeper) store(files map[string]*file) error {
	if k.dir == "" {
		return nil
	}
	kept := map[string][]byte{}
	for name, f := range files {
		if len(f.errs) > 0 && len(f.objects) > 0 {
			text, err := json.Marshal(f.content())
			if err != nil {
				return err
			}
			kept[name] = text
		}
	}
	return k.write(kept)
}

func (k *keeper) write(kept map[string][]byte) error {
	if len(kept) == 0 {
		return os.RemoveAll(k.dir)
	}
	old, err := os.ReadDir(k.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	failures := []error{os.MkdirAll(k.dir, 0o755)}
	for _, e := range old {
		if kept[e.Name()] == nil {
			failures = append(failures, os.RemoveAll(filepath.Join(k.dir, e.Name())))
		}
	}
	for name, text := range kept {
		failures = append(failures, replaceFile(filepath.Join(k.dir, name), text))
	}
	return errors.Join(failures...)
}

// replaceFile writes a file atomically, unless it has this content.
func replaceFile(path string, text []byte) error {
	if old, err := os.ReadFile(path); err == nil && string(old) == string(text) {
		return nil
	}
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// content returns a file's objects as a List.
func (f *file) content() *metav1.List {
	list := &metav1.List{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "List"}}
	for _, o := range f.objects {
		if o.meta != nil {
			list.Items = append(list.Items, runtime.RawExtension{Object: typed(o.meta)})
		}
	}
	return list
}

// typed returns a copy of an object with its kind.
func typed(o metav1.Object) runtime.Object {
	kinds := func(o runtime.Object, kind schema.GroupVersionKind) runtime.Object {
		o.GetObjectKind().SetGroupVersionKind(kind)
		return o
	}
	switch o := o.(type) {
	case *corev1.Service:
		return kinds(o.DeepCopy(), corev1.SchemeGroupVersion.WithKind(kindService))
	case *discoveryv1.EndpointSlice:
		return kinds(o.DeepCopy(), discoveryv1.SchemeGroupVersion.WithKind(kindSlice))
	case *corev1.Node:
		return kinds(o.DeepCopy(), corev1.SchemeGroupVersion.WithKind(kindNode))
	}
	return nil
}
