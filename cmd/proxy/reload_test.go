package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
)

// writeConfigMap writes a file as the kubelet does: through a link to a folder that is
// replaced by renaming.
func writeConfigMap(t *testing.T, dir, version, text string) (file string) {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(filepath.Join(dir, version), 0o755))
	must(os.WriteFile(filepath.Join(dir, version, "config.conf"), []byte(text), 0o600))
	must(os.Symlink(version, filepath.Join(dir, "..data_tmp")))
	must(os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	file = filepath.Join(dir, "config.conf")
	if _, err := os.Lstat(file); err != nil {
		must(os.Symlink(filepath.Join("..data", "config.conf"), file))
	}
	return file
}

const reloadLimit = 30 * time.Second

func TestConfigChangeEndsTheProgram(t *testing.T) {
	dir := t.TempDir()
	file := writeConfigMap(t, dir, "1", "first")
	checks := make(chan string, 8)
	ctx, err := untilConfigChanges(t.Context(), file, func() (config.Config, error) {
		text, err := os.ReadFile(file)
		checks <- string(text)
		if string(text) == "wrong" {
			err = errors.New("wrong")
		}
		return config.Config{}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "other"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	writeConfigMap(t, dir, "2", "wrong")
	select {
	case got := <-checks:
		if got != "wrong" {
			t.Errorf("%q was checked although it has not changed", got)
		}
	case <-time.After(reloadLimit):
		t.Fatal("the change was not seen")
	}
	if ctx.Err() != nil {
		t.Fatal("an invalid file ends the process")
	}
	writeConfigMap(t, dir, "3", "second")
	select {
	case <-ctx.Done():
	case <-time.After(reloadLimit):
		t.Fatal("the change does not end the process")
	}
	if !errors.Is(context.Cause(ctx), errConfigChanged) {
		t.Error(context.Cause(ctx))
	}
}

// The command returns the error, so that the exit code is not 0 and a supervisor restarts
// the process.
func TestConfigChangeIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	const text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nhostnameOverride: node1\nmode: "
	if err := os.WriteFile(file, []byte(text+"ipvs\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := called(t, func(ctx context.Context, _ config.Config) error {
		if err := os.WriteFile(file, []byte(text+"ipvs\nclusterCIDR: 10.244.0.0/16\n"), 0o600); err != nil {
			return err
		}
		<-ctx.Done()
		return context.Cause(ctx)
	}, nil, "--config="+file)
	if !errors.Is(err, errConfigChanged) {
		t.Error(err)
	}
}
