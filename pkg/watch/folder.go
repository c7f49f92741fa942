// Package watch reports changes of the files in a folder.
package watch

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

const (
	// settle is how long the folder must be unchanged before it is read, because writers
	// touch a file several times. settleAtMost limits the wait.
	settle       = 100 * time.Millisecond
	settleAtMost = time.Second
	// recheck is how often the folder is read without a notification: links may point
	// to files that are not watched.
	recheck = 30 * time.Second
)

// Folder waits for changes in a folder. The folder, or a link to it, may be replaced,
// so its parent is watched too.
type Folder struct {
	dir     string
	open    func() (*fsnotify.Watcher, error) // fsnotify.NewWatcher
	watcher *fsnotify.Watcher                 // nil while the kernel refuses one
	watched os.FileInfo                       // the directory when dir was last added
}

// NewFolder returns an error if the folder does not exist. On many nodes other programs use up
// the kernel's limit of watchers (fs.inotify.max_user_instances, 128): then the folder is read
// periodically until a watcher is free.
func NewFolder(dir string) (*Folder, error) { return newFolder(dir, fsnotify.NewWatcher) }

func newFolder(dir string, open func() (*fsnotify.Watcher, error)) (*Folder, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(dir); err != nil {
		return nil, err
	}
	w := &Folder{dir: dir, open: open}
	_ = w.add() // Wait tries again
	return w, nil
}

// Close releases the watches.
func (w *Folder) Close() {
	if w.watcher != nil {
		_ = w.watcher.Close()
	}
}

// add watches the folder, again if it has been replaced.
func (w *Folder) add() error {
	info, err := os.Stat(w.dir)
	if err != nil {
		return err
	}
	if w.watcher == nil {
		watcher, err := w.open()
		if err != nil {
			return err
		}
		w.watcher = watcher
		// Without a watch of the parent, a replaced folder is only noticed later.
		_ = watcher.Add(filepath.Dir(w.dir))
	}
	if w.watched != nil && os.SameFile(info, w.watched) {
		return nil
	}
	// Fails if the old folder was removed together with its watch.
	_ = w.watcher.Remove(w.dir)
	if err := w.watcher.Add(w.dir); err != nil {
		return err
	}
	w.watched = info
	return nil
}

// Wait returns true when the folder may have changed and is quiet, and false when the
// context has ended.
func (w *Folder) Wait(ctx context.Context) bool {
	logger := klog.FromContext(ctx)
	quiet, latest := time.NewTimer(recheck), time.NewTimer(recheck)
	defer quiet.Stop()
	defer latest.Stop()
	var events <-chan fsnotify.Event
	var errs <-chan error
	if w.watcher != nil {
		events, errs = w.watcher.Events, w.watcher.Errors
	}
	for settling := false; ; {
		select {
		case <-ctx.Done():
			return false
		case event := <-events:
			if !w.concerns(event) {
				continue
			}
			quiet.Reset(settle)
			if !settling {
				latest.Reset(settleAtMost)
				settling = true
			}
		case err := <-errs:
			// Events were lost, so anything may have changed.
			logger.V(2).Info("Watching a folder failed, reading it again", "folder", w.dir, "err", err)
			return true
		case <-quiet.C:
			return w.renew(logger)
		case <-latest.C:
			return w.renew(logger)
		}
	}
}

// concerns reports whether an event is about the folder. Events of the parent may be
// about other entries.
func (w *Folder) concerns(event fsnotify.Event) bool {
	if event.Name == w.dir && !event.Has(fsnotify.Chmod) {
		// Created, removed or replaced: a new folder may have the old inode number.
		w.watched = nil
		return true
	}
	return filepath.Dir(event.Name) == w.dir
}

// renew watches the current folder. If it does not exist, reading it reports that.
func (w *Folder) renew(logger klog.Logger) bool {
	if err := w.add(); err != nil {
		logger.V(2).Info("Cannot watch a folder, reading it periodically", "folder", w.dir, "err", err)
	}
	return true
}
