// Package watch tells when the files of a folder have changed.
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
	// settle is how long the folder must be quiet before it is read, and
	// settleAtMost how long that is waited for: writers touch a file more than
	// once.
	settle       = 100 * time.Millisecond
	settleAtMost = time.Second
	// recheck is how often the folder is read without having been told of a
	// change: links may lead to where nothing is watched.
	recheck = 30 * time.Second
)

// Folder waits for changes in a folder. The folder itself may be replaced, as
// may be a link to it: so its parent is watched too.
type Folder struct {
	dir     string
	watcher *fsnotify.Watcher
	watched os.FileInfo // the directory that dir was when it was last added
}

// NewFolder fails if the folder is not there or the kernel's limits on watches
// are reached.
func NewFolder(dir string) (*Folder, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	w := &Folder{dir: dir, watcher: watcher}
	if err := w.add(); err != nil {
		w.Close()
		return nil, err
	}
	// That the parent cannot be watched only delays how soon it is seen that
	// the folder has been replaced.
	_ = watcher.Add(filepath.Dir(w.dir))
	return w, nil
}

// Close frees the watches. What is lost with them is of no use to anyone.
func (w *Folder) Close() { _ = w.watcher.Close() }

// add watches the folder, and again if it is not the one that it was.
func (w *Folder) add() error {
	info, err := os.Stat(w.dir)
	if err != nil {
		return err
	}
	if w.watched != nil && os.SameFile(info, w.watched) {
		return nil
	}
	// Fails if the old folder is gone, and its watch with it.
	_ = w.watcher.Remove(w.dir)
	if err := w.watcher.Add(w.dir); err != nil {
		return err
	}
	w.watched = info
	return nil
}

// Wait returns when the folder may have changed and has come to rest. It is
// false when the context has ended.
func (w *Folder) Wait(ctx context.Context) bool {
	logger := klog.FromContext(ctx)
	quiet, latest := time.NewTimer(recheck), time.NewTimer(recheck)
	defer quiet.Stop()
	defer latest.Stop()
	for settling := false; ; {
		select {
		case <-ctx.Done():
			return false
		case event := <-w.watcher.Events:
			if !w.concerns(event) {
				continue
			}
			quiet.Reset(settle)
			if !settling {
				latest.Reset(settleAtMost)
				settling = true
			}
		case err := <-w.watcher.Errors:
			// Events are lost, so anything may have changed.
			logger.V(2).Info("Watching a folder failed; it is read again", "folder", w.dir, "err", err)
			return true
		case <-quiet.C:
			return w.renew(logger)
		case <-latest.C:
			return w.renew(logger)
		}
	}
}

// concerns says whether an event is about the folder: the parent's are about
// its other entries too.
func (w *Folder) concerns(event fsnotify.Event) bool {
	if event.Name == w.dir && !event.Has(fsnotify.Chmod) {
		// Come, gone or replaced: a new folder may have the old one's number.
		w.watched = nil
		return true
	}
	return filepath.Dir(event.Name) == w.dir
}

// renew makes sure that it is the present folder that is watched. If there is
// none, reading it says so.
func (w *Folder) renew(logger klog.Logger) bool {
	if err := w.add(); err != nil {
		logger.V(2).Info("A folder cannot be watched; it is read from time to time", "folder", w.dir, "err", err)
	}
	return true
}
