package manifest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// manifestOf returns a Service with one address.
func manifestOf(name, clusterIP string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {clusterIP: %s, ports: [{port: 80}]}\n", name, clusterIP)
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// replace replaces a file atomically.
func replace(t *testing.T, dir, name, text string) {
	t.Helper()
	write(t, dir, ".new", text)
	rename(t, filepath.Join(dir, ".new"), filepath.Join(dir, name))
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

func mkdir(t *testing.T, path string) {
	t.Helper()
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
}

// link creates a link, or replaces what exists, atomically.
func link(t *testing.T, to, path string) {
	t.Helper()
	if err := os.Symlink(to, path+".tmp"); err != nil {
		t.Fatal(err)
	}
	rename(t, path+".tmp", path)
}

// run runs a source until the test ends.
func run(t *testing.T, dir string) *recorder {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	r, done := newRecorder(), make(chan error)
	go func() { done <- New(dir, "n1", "").Run(ctx, r) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if calls := r.soFar(); len(calls) > 0 {
			t.Errorf("unexpected calls: %q", calls)
		}
	})
	return r
}

func TestRunFollowsFiles(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	r := run(t, dir)
	r.expect(t, "set Service default/a", "synced")

	replace(t, dir, "b.yaml", manifestOf("b", "10.0.0.2"))
	r.expect(t, "set Service default/b")

	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.3"))
	r.expect(t, "set Service default/a")
	if s := r.last(t).(*corev1.Service); s.Spec.ClusterIP != "10.0.0.3" {
		t.Errorf("cluster IP %s", s.Spec.ClusterIP)
	}

	// A file that is only rewritten has not changed, so there is no call for a.
	rename(t, filepath.Join(dir, "a.yaml"), filepath.Join(dir, "c.yml"))
	write(t, dir, "d.yaml", manifestOf("d", "10.0.0.4"))
	r.expect(t, "set Service default/d")

	remove(t, filepath.Join(dir, "c.yml"))
	r.expect(t, "delete Service default/a")
}

// TestRunAwaitsReadableFiles: what a file had is not known yet, so it must not count as absent:
// the kernel may serve it from before.
func TestRunAwaitsReadableFiles(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	link(t, "..data/b.yaml", filepath.Join(dir, "b.yaml"))
	r := run(t, dir)
	mkdir(t, filepath.Join(dir, "..1"))
	write(t, filepath.Join(dir, "..1"), "b.yaml", manifestOf("b", "10.0.0.2"))
	link(t, "..1", filepath.Join(dir, "..data"))
	r.expect(t, "set Service default/a", "set Service default/b", "synced")
}

func TestRunCoalesces(t *testing.T) {
	dir := t.TempDir()
	r := run(t, dir)
	r.expect(t, "synced")
	for i := range 50 {
		replace(t, dir, "a.yaml", manifestOf("a", fmt.Sprintf("10.0.0.%d", i+1)))
	}
	for set := 1; ; set++ {
		r.expect(t, "set Service default/a")
		// The object of this call: that of the next one may have arrived, too.
		if (<-r.objects).(*corev1.Service).Spec.ClusterIP == "10.0.0.50" {
			if set > 10 {
				t.Errorf("%d calls for 50 changes at once", set)
			}
			return
		}
	}
}

// TestRunConfigMap replaces the link through which all files of a mounted ConfigMap are
// read.
func TestRunConfigMap(t *testing.T) {
	dir := t.TempDir()
	mkdir(t, filepath.Join(dir, "..1"))
	write(t, filepath.Join(dir, "..1"), "a.yaml", manifestOf("a", "10.0.0.1"))
	link(t, "..1", filepath.Join(dir, "..data"))
	link(t, "..data/a.yaml", filepath.Join(dir, "a.yaml"))
	r := run(t, dir)
	r.expect(t, "set Service default/a", "synced")

	mkdir(t, filepath.Join(dir, "..2"))
	write(t, filepath.Join(dir, "..2"), "a.yaml", manifestOf("a", "10.0.0.2"))
	link(t, "..2", filepath.Join(dir, "..data"))
	remove(t, filepath.Join(dir, "..1"))
	r.expect(t, "set Service default/a")
	if s := r.last(t).(*corev1.Service); s.Spec.ClusterIP != "10.0.0.2" {
		t.Errorf("cluster IP %s", s.Spec.ClusterIP)
	}
}

// TestRunLostFolder removes the folder: nothing is deleted, and the next folder with that
// name is read.
func TestRunLostFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	mkdir(t, dir)
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	write(t, dir, "b.yaml", manifestOf("b", "10.0.0.2"))
	r := run(t, dir)
	r.expect(t, "set Service default/a", "set Service default/b", "synced")

	rename(t, dir, dir+".away")
	mkdir(t, dir+".next")
	write(t, dir+".next", "b.yaml", manifestOf("b", "10.0.0.2"))
	write(t, dir+".next", "c.yaml", manifestOf("c", "10.0.0.3"))
	rename(t, dir+".next", dir)
	r.expect(t, "set Service default/c", "delete Service default/a")

	// The new folder is watched, too.
	write(t, dir, "d.yaml", manifestOf("d", "10.0.0.4"))
	r.expect(t, "set Service default/d")
}

// TestRunRemovedFolder creates a new folder after the old one is removed; file systems
// often give it the same inode number.
func TestRunRemovedFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	mkdir(t, dir)
	r := run(t, dir)
	r.expect(t, "synced")
	for i := range 3 {
		remove(t, dir)
		mkdir(t, dir+".next")
		write(t, dir+".next", "a.yaml", manifestOf("a", fmt.Sprintf("10.0.0.%d", i+1)))
		rename(t, dir+".next", dir)
		r.expect(t, "set Service default/a")
		write(t, dir, "b.yaml", manifestOf("b", "10.0.1.1"))
		r.expect(t, "set Service default/b")
		remove(t, filepath.Join(dir, "b.yaml"))
		r.expect(t, "delete Service default/b")
	}
}

// TestUnchangedFileCostsNothing checks that an unchanged file is not parsed again.
func TestUnchangedFileCostsNothing(t *testing.T) {
	dir := t.TempDir()
	f := folder{dir: dir, nodeName: "n1"}
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	for range 2 {
		if err := f.scan(); err != nil {
			t.Fatal(err)
		}
	}
	before := f.files["a.yaml"]
	replace(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	if err := f.scan(); err != nil {
		t.Fatal(err)
	}
	if f.files["a.yaml"] != before {
		t.Error("the same text was parsed again")
	}
}

// TestRunLinkedFolder replaces a link to the folder.
func TestRunLinkedFolder(t *testing.T) {
	top := t.TempDir()
	for _, rev := range []string{"1", "2"} {
		mkdir(t, filepath.Join(top, rev))
		write(t, filepath.Join(top, rev), "a.yaml", manifestOf("a"+rev, "10.0.0."+rev))
	}
	link(t, "1", filepath.Join(top, "now"))
	r := run(t, filepath.Join(top, "now"))
	r.expect(t, "set Service default/a1", "synced")
	link(t, "2", filepath.Join(top, "now"))
	r.expect(t, "set Service default/a2", "delete Service default/a1")
	write(t, filepath.Join(top, "2"), "b.yaml", manifestOf("b", "10.0.0.3"))
	r.expect(t, "set Service default/b")
}

func TestRunNoFolder(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	if err := New(filepath.Join(t.TempDir(), "none"), "n1", "").Run(ctx, newRecorder()); err == nil {
		t.Error("no error")
	}
}

// TestLastValidVersionIsKept covers everything that must not count as a deletion. Each step
// changes the folder and reads it again.
func TestLastValidVersionIsKept(t *testing.T) {
	dir := t.TempDir()
	a, b := manifestOf("a", "10.0.0.1"), manifestOf("b", "10.0.0.2")
	c := manifestOf("c", "10.0.0.3")
	bad := func(name string) string {
		return strings.Replace(manifestOf(name, "10.0.0.9"), "port: 80", "port: 0", 1)
	}
	_, ctx := ktesting.NewTestContext(t)
	sink := newRecorder()
	r := New(dir, "n1", "").reader(sink)

	for _, step := range []struct {
		name   string
		change func()
		calls  []string
		errs   []string // one substring of each error
	}{
		{"two good", func() { write(t, dir, "x.yaml", a+"---\n"+b) }, []string{"set Service default/a", "set Service default/b"}, nil},
		{"one bad, one new", func() { write(t, dir, "x.yaml", bad("a")+"---\n"+b+"---\n"+c) }, []string{"set Service default/c"},
			[]string{"document 1 (line 1): Service default/a: spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive; keeping its last valid version"}},
		{"another document gone", func() { write(t, dir, "x.yaml", bad("a")+"---\n"+c) }, []string{"delete Service default/b"}, []string{"default/a"}},
		{"good again", func() { write(t, dir, "x.yaml", a+"---\n"+c) }, nil, nil},
		{"no YAML", func() { write(t, dir, "x.yaml", "metadata: [\n---\n"+c) }, nil, []string{"document 1 (line 1): "}},
		{"nothing at all is YAML", func() { write(t, dir, "x.yaml", "metadata: [\n") }, nil, []string{"keeping its last valid version"}},
		{"cannot be read", func() { remove(t, filepath.Join(dir, "x.yaml")); link(t, "nowhere", filepath.Join(dir, "x.yaml")) }, nil,
			[]string{"x.yaml: no such file or directory; keeping its last valid content"}},
		{"a folder that is gone", func() { rename(t, dir, dir+".away") }, nil, []string{"keeping the last valid content"}},
		{"and back", func() { rename(t, dir+".away", dir) }, nil, []string{"cannot read"}},
		{"bad in another file", func() { write(t, dir, "y.yaml", bad("d")) }, nil, []string{"cannot read", "default/d: spec.ports[0].port"}},
		{"good, and the first of two", func() { replace(t, dir, "x.yaml", a); write(t, dir, "y.yaml", manifestOf("a", "10.0.0.7")) },
			[]string{"delete Service default/c"}, []string{"y.yaml: document 1 (line 1): ignoring Service default/a, which is already defined in "}},
		{"the second takes over", func() { remove(t, filepath.Join(dir, "x.yaml")) }, []string{"set Service default/a"}, nil},
		{"headless is no Service of ours", func() { write(t, dir, "y.yaml", manifestOf("a", "None")) }, []string{"delete Service default/a"}, nil},
		{"empty", func() { write(t, dir, "y.yaml", "") }, nil, nil},
	} {
		step.change()
		r.update(ctx)
		if diff := cmp.Diff(step.calls, sink.soFar()); diff != "" {
			t.Errorf("%s: calls (-want +got):\n%s", step.name, diff)
		}
		if len(r.reported) != len(step.errs) {
			t.Errorf("%s: errors: %v", step.name, r.reported)
		}
		for _, want := range step.errs {
			found := false
			for got := range r.reported {
				found = found || strings.Contains(got, want)
			}
			if !found {
				t.Errorf("%s: no error with %q: %v", step.name, want, r.reported)
			}
		}
	}
}

// TestReportOnce counts log lines.
func TestReportOnce(t *testing.T) {
	dir := t.TempDir()
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	r := New(dir, "n1", "").reader(newRecorder())
	write(t, dir, "a.yaml", "apiVersion: v1\nkind: Secret\n---\nkind: [\n---\napiVersion: v1\nkind: Secret\n")
	lines := func() int {
		r.show(klog.NewContext(t.Context(), logger))
		return len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data())
	}
	if err := r.folder.scan(); err != nil {
		t.Fatal(err)
	}
	if n := lines(); n != 2 {
		t.Errorf("%d lines at first, want one for the kind and one for the document", n)
	}
	if n := lines(); n != 2 {
		t.Errorf("%d lines after reading again, want no more", n)
	}
}
