package watch

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// Other programs on a node may use up the kernel's limit of watchers. The folder is then read
// periodically, and each time a watcher is tried again.
func TestWithoutWatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		w, err := newFolder(t.TempDir(), func() (*fsnotify.Watcher, error) {
			tries++
			return nil, unix.EMFILE
		})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		began := time.Now()
		for range 3 {
			if !w.Wait(t.Context()) {
				t.Fatal("the context has not ended")
			}
		}
		if took := time.Since(began); took != 3*recheck || tries != 4 {
			t.Errorf("%s for three rounds, %d tries, want %s and 4", took, tries, 3*recheck)
		}
	})
}

func TestNoFolder(t *testing.T) {
	if _, err := NewFolder(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("no error")
	}
}
