package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/apiserver"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/manifest"
)

// settingsFlags are those of every command that looks at a node: how the proxy on it is
// configured, and where the Services' names come from.
type settingsFlags struct {
	config, kubeconfig, manifests string

	proc string // /proc
}

func (o *settingsFlags) addFlags(fs *pflag.FlagSet) {
	o.proc = "/proc"
	fs.StringVar(&o.config, "config", "", "the proxy's configuration file; default: that of the proxy that runs on this node, or "+podConfig)
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server; default: as the proxy does")
	fs.StringVar(&o.manifests, "manifests", "", "the folder that the Services come from, in place of the API server")
}

// podConfig is where the DaemonSet has the configuration.
const podConfig = "/var/lib/kube-ipvs/config.yaml"

// settings is a proxy's configuration, and where it was found.
type settings struct {
	config.Config
	Args   []string // the flags that give it
	Origin string
	PID    int // of the proxy that runs with it; 0: none was found
}

// settings finds the configuration of the proxy on this node: --config's, else that of
// the process that serves this network namespace, else the DaemonSet's, else the
// defaults. Flags for the source win over all of them. Notes say what was tried and
// cannot be used.
func (o *settingsFlags) settings() (s settings, notes []string, err error) {
	try := func(origin string, pid int, args []string) bool {
		if s.Config, err = parseArgs(args); err != nil {
			notes = append(notes, fmt.Sprintf("cannot use the configuration of %s: %v", origin, err))
			return false
		}
		s.Origin, s.PID, s.Args = origin, pid, args
		return true
	}
	running := runningProxies(o.proc, os.Getpid())
	switch {
	case o.config != "":
		if !try(o.config, 0, []string{"--config=" + o.config}) {
			return s, nil, err
		}
		if len(running) > 0 {
			s.PID = running[0].pid
		}
	case slices.ContainsFunc(running, func(p process) bool { return try("process "+strconv.Itoa(p.pid), p.pid, p.args) }):
	case exists(podConfig) && try(podConfig, 0, []string{"--config=" + podConfig}):
	case !try("the defaults", 0, nil):
		return s, notes, err
	}
	s.override(o)
	return s, notes, nil
}

// override lays the flags for the source over what was found.
func (s *settings) override(o *settingsFlags) {
	if o.kubeconfig != "" {
		s.Source.Kubeconfig, s.Source.Master, s.Source.Manifests = o.kubeconfig, "", ""
	}
	if o.manifests != "" {
		s.Source.Manifests = o.manifests
	}
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// parseArgs reads a command line as the proxy does.
func parseArgs(args []string) (config.Config, error) {
	opts := config.NewOptions()
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	for _, section := range opts.Flags().FlagSets {
		fs.AddFlagSet(section)
	}
	if err := fs.Parse(args); err != nil {
		return config.Config{}, err
	}
	return opts.Complete()
}

// process is a proxy that runs on this node.
type process struct {
	pid  int
	args []string // without the program's name
}

// runningProxies finds the processes of this program, but for one, that serve this
// network namespace, as far as they can be seen.
func runningProxies(proc string, self int) []process {
	var out []process
	here, _ := os.Readlink(filepath.Join(proc, "self/ns/net"))
	files, _ := filepath.Glob(filepath.Join(proc, "[0-9]*", "comm"))
	for _, file := range files {
		folder := filepath.Dir(file)
		pid, _ := strconv.Atoi(filepath.Base(folder))
		name, err := os.ReadFile(file)
		if err != nil || pid == self || strings.TrimSpace(string(name)) != "kube-ipvs" {
			continue
		}
		if there, err := os.Readlink(filepath.Join(folder, "ns/net")); err == nil && there != here {
			continue
		}
		line, err := os.ReadFile(filepath.Join(folder, "cmdline"))
		if err != nil || len(line) == 0 {
			continue
		}
		args := strings.Split(string(bytes.TrimRight(line, "\x00")), "\x00")[1:]
		if serves(args) {
			out = append(out, process{pid, args})
		}
	}
	slices.SortFunc(out, func(a, b process) int { return a.pid - b.pid })
	return out
}

// serves reports whether a command line is the proxy's, and not that of a command which
// ends by itself.
func serves(args []string) bool {
	return !slices.ContainsFunc(args, func(arg string) bool {
		name, _, _ := strings.Cut(arg, "=")
		return !strings.HasPrefix(arg, "-") && commandNames[arg] || slices.Contains([]string{"--once", "--cleanup", "--init-only", "--help", "-h", "--version"}, name)
	})
}

// source makes what the Services are read from, once; nil where there is none: outside
// a cluster, with neither folder nor kubeconfig.
func (s *settings) source() (source.Loader, error) {
	if s.Source.Manifests != "" {
		return manifest.NewWhole(s.Source.Manifests, s.Plan.NodeName), nil
	}
	if _, err := rest.InClusterConfig(); err != nil && s.Source.Kubeconfig == "" && s.Source.Master == "" {
		return nil, nil
	}
	client, err := newClient(&s.Source)
	if err != nil {
		return nil, err
	}
	return apiserver.NewListing(client, s.Plan.NodeName), nil
}

// namesLimit is how long the Services' names are waited for. It is short: a node that
// does not reach the API server is one to be looked at, and its kernel tells everything
// except the names.
const namesLimit = 5 * time.Second

// names reads the Services. That they cannot be read is no reason to show nothing: the
// names are then empty, and a note says why.
func (s *settings) names(ctx context.Context, notes io.Writer) *inspect.Names {
	names, err := s.load(ctx)
	if err != nil {
		fmt.Fprintf(notes, "Showing addresses in place of names: %v\n", err)
	}
	return names
}

func (s *settings) load(ctx context.Context) (*inspect.Names, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, namesLimit, fmt.Errorf("no answer within %s", namesLimit))
	defer cancel()
	from, err := s.source()
	if err != nil {
		none, _ := inspect.Load(ctx, nil)
		return none, err
	}
	names, err := inspect.Load(ctx, from)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = errors.Join(cause, err)
	}
	if err != nil {
		err = fmt.Errorf("reading the Services: %w", err)
	}
	return names, err
}

// found is what the settings flags lead to. Notes go to the error output.
func (o *settingsFlags) found(notes io.Writer) (settings, error) {
	s, more, err := o.settings()
	for _, note := range more {
		fmt.Fprintln(notes, "Note:", note)
	}
	return s, err
}
