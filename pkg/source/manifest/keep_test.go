package manifest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// restart reads a folder as a new process does, and returns its calls.
func restart(t *testing.T, dir, state string) (*reader, *recorder) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	sink := newRecorder()
	r := New(dir, "n1", state).reader(sink)
	r.update(ctx)
	return r, sink
}

func expectCalls(t *testing.T, sink *recorder, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, sink.soFar()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

const sliceOfA = `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a-1, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.1.0.1]}]
---
apiVersion: v1
kind: Node
metadata: {name: n1}
spec: {podCIDR: 10.1.0.0/24}
`

// TestInvalidFileOverRestarts breaks a file in several ways. Each of several processes serves
// what the file had when it was last valid.
func TestInvalidFileOverRestarts(t *testing.T) {
	valid := manifestOf("a", "10.0.0.1") + sliceOfA
	all := []string{"set Node n1", "set EndpointSlice default/a-1", "set Service default/a"}
	for name, invalid := range map[string]string{
		"syntax":           "{",
		"one field":        manifestOf("a", "10.0.0.x") + sliceOfA,
		"another document": manifestOf("a", "10.0.0.1") + "---\n{\n" + sliceOfA,
		"all documents":    manifestOf("a", "10.0.0.x") + "---\n{",
	} {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			dir, state := t.TempDir(), t.TempDir()
			write(t, dir, "a.yaml", valid)
			r, sink := restart(t, dir, state)
			expectCalls(t, sink, all...)
			if files, err := os.ReadDir(state); err != nil || len(files) > 0 {
				t.Errorf("valid files are stored: %v, %v", files, err)
			}
			write(t, dir, "a.yaml", invalid)
			r.update(ctx)
			expectCalls(t, sink)
			for range 2 {
				r, sink = restart(t, dir, state)
				expectCalls(t, sink, all...)
				if r.folder.unread() {
					t.Error("the content of the file counts as unknown")
				}
			}
			if s := sink.last(t).(*corev1.Service); s.Spec.ClusterIP != "10.0.0.1" {
				t.Errorf("cluster IP %s", s.Spec.ClusterIP)
			}

			write(t, dir, "a.yaml", manifestOf("a", "10.0.0.2"))
			r.update(ctx)
			expectCalls(t, sink, "set Service default/a", "delete Node", "delete EndpointSlice default/a-1")
			write(t, dir, "a.yaml", "{")
			_, sink = restart(t, dir, state)
			expectCalls(t, sink) // what was stored is obsolete
		})
	}
}

func TestUnreadableFileOverRestart(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	dir, state := t.TempDir(), t.TempDir()
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	r, _ := restart(t, dir, state)
	remove(t, filepath.Join(dir, "a.yaml"))
	link(t, "absent", filepath.Join(dir, "a.yaml"))
	r.update(ctx)
	_, sink := restart(t, dir, state)
	expectCalls(t, sink, "set Service default/a")
}

// TestStoredFileOfRemovedOne removes an invalid file while no process runs. When it appears
// again, what it had before is obsolete.
func TestStoredFileOfRemovedOne(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	dir, state := t.TempDir(), t.TempDir()
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	write(t, dir, "b.yaml", manifestOf("b", "10.0.0.2"))
	r, _ := restart(t, dir, state)
	write(t, dir, "a.yaml", "{")
	write(t, dir, "b.yaml", "{")
	r.update(ctx)
	remove(t, filepath.Join(dir, "a.yaml"))
	_, sink := restart(t, dir, state)
	expectCalls(t, sink, "set Service default/b")
	write(t, dir, "a.yaml", "{")
	_, sink = restart(t, dir, state)
	expectCalls(t, sink, "set Service default/b")
	if err := Forget(state); err != nil {
		t.Error(err)
	}
	_, sink = restart(t, dir, state)
	expectCalls(t, sink)
}

// TestStoredFilesOfOtherFolder has a file of the same name in another folder.
func TestStoredFilesOfOtherFolder(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	dir, state := t.TempDir(), t.TempDir()
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	r, _ := restart(t, dir, state)
	write(t, dir, "a.yaml", "{")
	r.update(ctx)
	other := t.TempDir()
	write(t, other, "a.yaml", "{")
	_, sink := restart(t, other, state)
	expectCalls(t, sink)
}

// TestStateCannotBeStored: the process serves on.
func TestStateCannotBeStored(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "file")
	write(t, filepath.Dir(state), "file", "")
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	r, sink := restart(t, dir, state)
	write(t, dir, "a.yaml", "{")
	write(t, dir, "b.yaml", manifestOf("b", "10.0.0.2"))
	r.update(ctx)
	expectCalls(t, sink, "set Service default/a", "set Service default/b")
	if !r.unstored {
		t.Error("no failure")
	}
}

// TestInvalidFileIsStoredFirst restarts as soon as an error is reported.
func TestInvalidFileIsStoredFirst(t *testing.T) {
	dir, state := t.TempDir(), t.TempDir()
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	r, _ := restart(t, dir, state)
	write(t, dir, "a.yaml", "{")
	var next *recorder
	logger := funcr.New(func(string, string) {
		if next == nil {
			_, next = restart(t, dir, state)
		}
	}, funcr.Options{})
	r.update(klog.NewContext(t.Context(), logger))
	expectCalls(t, next, "set Service default/a")
}
