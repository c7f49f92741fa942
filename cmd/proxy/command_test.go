package main

import (
	"context"
	"strings"
	"testing"

	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
)

// execute runs a command line and gives its configuration, if it gets so far,
// and what it prints.
func execute(t *testing.T, args ...string) (cfg *config.Config, output string) {
	t.Helper()
	cmd := newCommand(func(_ context.Context, c config.Config) error {
		cfg = &c
		return nil
	})
	var out strings.Builder
	cmd.SetOut(&out)
	cmd.SetArgs(args)
	defer func() { _ = logsapi.ResetForTest(nil) }() // it can be configured once
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	return cfg, out.String()
}

func TestVersion(t *testing.T) {
	defer func() { _ = newCommand(nil).Flag("version").Value.Set("false") }() // the library has one for all commands
	if cfg, output := execute(t, "--version"); cfg != nil || !strings.HasPrefix(output, "kube-ipvs v") {
		t.Errorf("%v, %q", cfg, output)
	}
}

// The pages that Kubernetes has behind feature gates are behind the same here.
func TestPages(t *testing.T) {
	cfg, _ := execute(t, "--hostname-override=node1", "--cluster-cidr=10.244.0.0/16", "--profiling")
	p := pages(cfg)
	if !p.Profiling || !p.Status || p.Flags["cluster-cidr"] != "10.244.0.0/16" || p.Flags["ipvs-sync-period"] != "30s" {
		t.Errorf("%+v", p)
	}
	cfg, _ = execute(t, "--hostname-override=node1", "--feature-gates=ComponentFlagz=false,ComponentStatusz=false")
	if p := pages(cfg); p.Status || p.Flags != nil || len(cfg.Notices) > 1 { // one is about --cluster-cidr
		t.Errorf("%+v, %v", p, cfg.Notices)
	}
}
