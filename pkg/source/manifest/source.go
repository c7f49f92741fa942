// Package manifest delivers Services, EndpointSlices and the own Node from a
// folder of YAML and JSON files, so that the proxy runs without a cluster.
//
// Files are *.yaml, *.yml and *.json, of one or more documents, and Lists. A
// document that is broken is reported and does not touch the others; what it
// said when it was good stays until it is good again or gone. Where nobody but
// the administrator writes the folder, files should be replaced by renaming:
// half of a file may be well formed.
package manifest

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/watch"
)

// Source is a folder of manifests. It implements source.Source and
// source.Loader.
type Source struct {
	dir, nodeName string
	whole         bool
}

var (
	_ source.Source = (*Source)(nil)
	_ source.Loader = (*Source)(nil)
)

// New reads the folder dir and, of the Nodes in it, only the one with the
// given name.
func New(dir, nodeName string) *Source {
	return &Source{dir: dir, nodeName: nodeName}
}

// NewWhole is New, and leaves in what source.Trim takes out, such as the names of pods.
func NewWhole(dir, nodeName string) *Source {
	return &Source{dir: dir, nodeName: nodeName, whole: true}
}

// Load delivers the folder's content once, and Synced. The error joins one for
// each document that could not be used, which the rest has been delivered
// without; if the folder cannot be read, nothing has been delivered.
func (s *Source) Load(ctx context.Context, sink source.Sink) error {
	r := s.reader(sink)
	if err := r.folder.scan(); err != nil {
		return fmt.Errorf("manifests: %w", err)
	}
	v := r.folder.view()
	r.notice(klog.FromContext(ctx), v)
	r.delivery.deliver(v.objects)
	sink.Synced()
	return errors.Join(v.errs...)
}

// Run delivers the folder's content, Synced, and then every change until the
// context ends. It fails if the folder cannot be read or watched at the start.
// What is wrong in it is logged, once for as long as it is so.
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
	sink.Synced()
	for w.Wait(ctx) {
		r.update(ctx)
	}
	return nil
}

func (s *Source) reader(sink source.Sink) *reader {
	return &reader{
		folder:   folder{dir: s.dir, nodeName: s.nodeName, whole: s.whole},
		delivery: delivery{sink: sink},
		noticed:  map[string]bool{},
	}
}

// reader brings what a folder says to a sink.
type reader struct {
	folder   folder
	delivery delivery
	reported map[string]bool // errors of the last time
	noticed  map[string]bool // kinds that are ignored
}

// update reads what has changed. A folder that cannot be read is one of which
// nothing is known: all stays.
func (r *reader) update(ctx context.Context) {
	if err := r.folder.scan(); err != nil {
		r.report(klog.FromContext(ctx), []error{fmt.Errorf("%w; what was last good stays", err)})
		return
	}
	r.show(ctx)
}

// show reports and delivers what the folder says.
func (r *reader) show(ctx context.Context) {
	logger := klog.FromContext(ctx)
	v := r.folder.view()
	r.notice(logger, v)
	r.report(logger, v.errs)
	r.delivery.deliver(v.objects)
}

// report logs the errors that were not there the last time.
func (r *reader) report(logger klog.Logger, errs []error) {
	reported := map[string]bool{}
	for _, err := range errs {
		if text := err.Error(); !reported[text] {
			reported[text] = true
			if !r.reported[text] {
				logger.Error(err, "Manifest is not used")
			}
		}
	}
	r.reported = reported
}

// notice logs, once for each, the kinds that are not read.
func (r *reader) notice(logger klog.Logger, v view) {
	for _, kind := range v.ignored {
		if !r.noticed[kind] {
			r.noticed[kind] = true
			logger.Info("Manifests of this kind are ignored", "kind", kind)
		}
	}
}
