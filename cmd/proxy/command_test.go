package main

import (
	"context"
	"io"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/version"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
)

// called runs a command line and returns its result.
func called(t *testing.T, run func(context.Context, config.Config) error, out io.Writer, args ...string) error {
	t.Helper()
	defer func() { _ = logsapi.ResetForTest(nil) }() // it can be configured once
	cmd := newCommand(run)
	cmd.SetOut(out)
	cmd.SetArgs(args)
	return cmd.ExecuteContext(t.Context())
}

func TestVersion(t *testing.T) {
	defer func() { _ = newCommand(nil).Flag("version").Value.Set("false") }() // the library has one for all commands
	var out strings.Builder
	if err := called(t, nil, &out, "--version"); err != nil || !strings.HasPrefix(out.String(), "kube-ipvs v") {
		t.Errorf("%v, %q", err, out.String())
	}
}

// TestEmptyArguments: kube-proxy ignores them.
func TestEmptyArguments(t *testing.T) {
	keep := func(context.Context, config.Config) error { return nil }
	if err := called(t, keep, nil, "--hostname-override=node1", "", "--cluster-cidr=10.244.0.0/16", ""); err != nil {
		t.Error(err)
	}
	if err := called(t, keep, nil, "--hostname-override=node1", "", "more"); err == nil || !strings.Contains(err.Error(), `"more"`) {
		t.Errorf("%v does not name the argument", err)
	}
}

// TestVersionIsLogged: a log without the version helps little.
func TestVersionIsLogged(t *testing.T) {
	defer func() { _ = logsapi.ResetForTest(nil) }()
	var log strings.Builder
	logger := funcr.New(func(_, line string) { log.WriteString(line + "\n") }, funcr.Options{})
	cmd := newCommand(func(context.Context, config.Config) error { return nil })
	cmd.SetArgs([]string{"--hostname-override=node1"})
	if err := cmd.ExecuteContext(klog.NewContext(t.Context(), logger)); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), version.Get().GitVersion) {
		t.Error(log.String())
	}
}

// Pages that Kubernetes has behind feature gates need the same gates here.
func TestPages(t *testing.T) {
	configured := func(args ...string) (cfg config.Config) {
		keep := func(_ context.Context, c config.Config) error {
			cfg = c
			return nil
		}
		if err := called(t, keep, nil, append(args, "--hostname-override=node1", "--cluster-cidr=10.244.0.0/16")...); err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	cfg := configured("--profiling")
	p := pages(&cfg)
	if !p.Profiling || !p.Status || p.Flags["cluster-cidr"] != "10.244.0.0/16" || p.Flags["ipvs-sync-period"] != "30s" {
		t.Errorf("%+v", p)
	}
	cfg = configured("--feature-gates=ComponentFlagz=false,ComponentStatusz=false")
	if p := pages(&cfg); p.Status || p.Flags != nil || len(cfg.Notices) > 0 {
		t.Errorf("%+v, %v", p, cfg.Notices)
	}
}

// TestCompletion: each shell has a script that gets its words from the program.
func TestCompletion(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"completion", "bash"}, []string{"complete -o default", "kube-ipvs"}},
		{[]string{"completion", "zsh"}, []string{"#compdef kube-ipvs"}},
		{[]string{"completion", "fish"}, []string{"complete -c kube-ipvs"}},
		{[]string{"--help"}, []string{"\n  status ", "\n  doctor ", "\n  trace ", "\n  get ", "\n  sysdump ", "--claim-mark"}},
		{[]string{"completion", "--help"}, []string{"kube-ipvs completion [command]"}},
		{[]string{"__complete", ""}, []string{"completion", "doctor", "get", "trace"}},
		{[]string{"__complete", "get", ""}, []string{"endpoints", "sets", "snat", "virtualservers"}},
		{[]string{"__complete", "get", "sets", "--output", ""}, []string{"json", "table", "wide", "yaml"}},
		{[]string{"__complete", "trace", "--output", "j"}, []string{"json"}},
	} {
		var out strings.Builder
		if err := called(t, nil, &out, c.args...); err != nil {
			t.Errorf("%q: %v", c.args, err)
		}
		for _, want := range c.want {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%q: %q is not in\n%s", c.args, want, out.String())
			}
		}
	}
}
