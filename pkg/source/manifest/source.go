// Package manifest delivers Services, EndpointSlices and this node's Node from a folder of
// YAML and JSON files, so that the proxy runs without a cluster.
//
// Files are *.yaml, *.yml and *.json with one or more documents, and Lists. An invalid
// document is reported and does not affect the others; its last valid version is kept
// until it is valid again or removed, also across a restart. Replace files by renaming: a
// partially written file may be well formed.
package manifest

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/watch"
)

// Source is a folder of manifests. It implements source.Source and source.Loader.
type Source struct {
	dir, nodeName, stateDir string
	whole                   bool
}

var (
	_ source.Source = (*Source)(nil)
	_ source.Loader = (*Source)(nil)
)

// New returns a source that reads the folder dir. Of Nodes it delivers only the one
// with the given name. Run stores the last valid content of invalid files in stateDir; with ""
// a restart loses it.
func New(dir, nodeName, stateDir string) *Source {
	return &Source{dir: dir, nodeName: nodeName, stateDir: stateDir}
}

// NewWhole is like New, but keeps what source.Trim removes, such as the names of pods.
func NewWhole(dir, nodeName, stateDir string) *Source {
	return &Source{dir: dir, nodeName: nodeName, stateDir: stateDir, whole: true}
}

// Load delivers the folder's content once and calls Synced. The error joins an error
// for each unusable document; the rest has been delivered. If a file cannot be read, it
// does not call Synced. If the folder cannot be read, nothing has been delivered.
func (s *Source) Load(ctx context.Context, sink source.Sink) error {
	r := s.reader(sink)
	if err := r.folder.scan(); err != nil {
		return fmt.Errorf("manifests: %w", err)
	}
	v := r.folder.view()
	r.notice(klog.FromContext(ctx), v)
	r.delivery.deliver(v.objects)
	if !r.folder.unread() { // else the content is incomplete
		sink.Synced()
	}
	return errors.Join(v.errs...)
}

// Run delivers the folder's content, calls Synced, and delivers changes until the
// context ends. It returns an error if the folder cannot be read at the start. It logs each
// error once, as long as it persists.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	w, err := watch.NewFolder(s.dir)
	if err != nil {
		return fmt.Errorf("manifests: %w", err)
	}
	defer w.Close()
	r := s.reader(sink)
	if err := r.folder.scan(); err != nil {
		return fmt.Errorf("manifests: %w", err)
	}
	r.show(ctx)
	// After Synced the sink deletes what it has not received, such as the objects of an unreadable
	// file. Wait once for a change of the folder, or half a minute: the other files must not
	// wait forever.
	if r.folder.unread() && w.Wait(ctx) {
		r.update(ctx)
	}
	if ctx.Err() != nil {
		return nil
	}
	sink.Synced()
	for w.Wait(ctx) {
		r.update(ctx)
	}
	return nil
}

func (s *Source) reader(sink source.Sink) *reader {
	return &reader{
		folder:   folder{dir: s.dir, nodeName: s.nodeName, whole: s.whole, keeper: newKeeper(s.stateDir, s.dir)},
		delivery: delivery{sink: sink},
		noticed:  map[string]bool{},
	}
}

// reader passes a folder's content to a sink.
type reader struct {
	folder   folder
	delivery delivery
	reported map[string]bool // errors of the previous reading
	noticed  map[string]bool // ignored kinds that have been logged
	unstored bool            // the last valid content could not be stored, which has been logged
}

// update reads changes. If the folder cannot be read, the delivered state remains.
func (r *reader) update(ctx context.Context) {
	if err := r.folder.scan(); err != nil {
		r.report(klog.FromContext(ctx), []error{fmt.Errorf("%w; keeping the last valid content", err)})
		return
	}
	r.show(ctx)
}

// show reports errors and delivers the folder's content. It first stores the last valid
// objects of invalid files, because the process may end at any time.
func (r *reader) show(ctx context.Context) {
	logger := klog.FromContext(ctx)
	err := r.folder.keeper.store(r.folder.files)
	if err != nil && !r.unstored {
		logger.Error(err, "Cannot store the last valid content of manifests in --state-dir, a restart loses it")
	}
	r.unstored = err != nil
	v := r.folder.view()
	r.notice(logger, v)
	r.report(logger, v.errs)
	r.delivery.deliver(v.objects)
}

// report logs errors that are new since the last reading.
func (r *reader) report(logger klog.Logger, errs []error) {
	reported := map[string]bool{}
	for _, err := range errs {
		if text := err.Error(); !reported[text] {
			reported[text] = true
			if !r.reported[text] {
				logger.Error(err, "Cannot use manifest")
			}
		}
	}
	r.reported = reported
}

// notice logs each ignored kind once.
func (r *reader) notice(logger klog.Logger, v view) {
	for _, kind := range v.ignored {
		if !r.noticed[kind] {
			r.noticed[kind] = true
			logger.Info("Ignoring manifests of this kind", "kind", kind)
		}
	}
}
