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

// errConfigChanged ends the program, so that whoever runs it starts it again with
// the new configuration. kube-proxy does the same. Nothing is lost: what is in the
// kernel goes on serving meanwhile.
var errConfigChanged = errors.New("the configuration file has changed, start again")

// untilConfigChanges ends the context when the file says something else than it
// does now, and says it rightly: with a file that cannot be used a new process
// could not begin, and nobody would follow the Services.
func untilConfigChanges(ctx context.Context, file string, check func() (config.Config, error)) (context.Context, error) {
	before, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	// A ConfigMap's files are links to a folder that is replaced, beside them.
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
				continue // it is being replaced, or something else in the folder has changed
			}
			last = now
			if bytes.Equal(now, before) {
				continue
			}
			if _, err := check(); err != nil {
				klog.FromContext(ctx).Error(err, "The configuration file has changed and cannot be used, going on with what it said before")
				continue
			}
			cancel(errConfigChanged)
			return
		}
	}()
	return ctx, nil
}
