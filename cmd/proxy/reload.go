package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/watch"
)

// errConfigChanged ends the process so that its supervisor restarts it with the new
// configuration, as kube-proxy does. The kernel continues to serve meanwhile.
var errConfigChanged = errors.New("the configuration file has changed: exiting, so that a restart applies it")

// untilConfigChanges cancels the context when the file changes and is valid. An invalid file
// is ignored: a new process could not start with it, and changes of Services would no longer
// be programmed.
func untilConfigChanges(ctx context.Context, file string, check func() (config.Config, error)) (context.Context, error) {
	before, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	// A ConfigMap's files are links into a folder that is replaced.
	folder, err := watch.NewFolder(filepath.Dir(file))
	if err != nil {
		return nil, fmt.Errorf("watching --config: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		defer folder.Close()
		last := before
		for folder.Wait(ctx) {
			now, err := os.ReadFile(file)
			if err != nil || bytes.Equal(now, last) {
				continue // being replaced, or another file has changed
			}
			last = now
			if bytes.Equal(now, before) {
				continue
			}
			if _, err := check(); err != nil {
				klog.FromContext(ctx).Error(err, "The configuration file has changed and is invalid, keeping the previous configuration")
				continue
			}
			cancel(errConfigChanged)
			return
		}
	}()
	return ctx, nil
}
