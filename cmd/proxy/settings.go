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

// settingsFlags are the flags of every command that inspects a node: the proxy's
// configuration, and the source of Service names.
type settingsFlags struct {
	config, kubeconfig, manifests, hostname string

	proc string // /proc
}

func (o *settingsFlags) addFlags(fs *pflag.FlagSet) {
	o.proc = "/proc"
	fs.StringVar(&o.config, "config", "", "the proxy's configuration file; default: that of the proxy that runs on this node, or "+podConfig)
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig of the API server; default: the proxy's")
	fs.StringVar(&o.manifests, "manifests", "", "folder of manifests to read Services from, instead of the API server")
	fs.StringVar(&o.hostname, "hostname-override", "", "name of this node's Node object; default: the proxy's, or the host name")
}

// podConfig is the path of the configuration in the DaemonSet.
const podConfig = "/var/lib/kube-ipvs/config.yaml"

// settings is a proxy's configuration and where it was found.
type settings struct {
	config.Config
	Args   []string // the corresponding flags
	Origin string
	PID    int // of the running proxy; 0: none was found
}

// settings finds the configuration of the proxy on this node: that of --config, else of
// the process that serves this network namespace, else of the DaemonSet, else the
// defaults. Flags for the source take precedence over all. The notes name
// configurations that cannot be used.
func (o *settingsFlags) settings() (s settings, notes []string, err error) {
	try := func(origin string, pid int, args []string) bool {
		if o.hostname != "" {
			args = append(slices.Clip(args), "--hostname-override="+o.hostname)
		}
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

// override applies the flags for the source.
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

// parseArgs parses a command line as the proxy does.
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
	args []string // without the name of the program
}

// runningProxies returns the visible processes of this program, except one, that serve
// this network namespace.
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

// serves reports whether a command line is that of a serving proxy, not of a command
// that exits by itself.
func serves(args []string) bool {
	return !slices.ContainsFunc(args, func(arg string) bool {
		name, _, _ := strings.Cut(arg, "=")
		return !strings.HasPrefix(arg, "-") && commandNames[arg] || slices.Contains([]string{"--once", "--cleanup", "--init-only", "--help", "-h", "--version"}, name)
	})
}

// source creates the source of Services for a single read. It returns nil if there is
// none: outside a cluster, with neither folder nor kubeconfig.
func (s *settings) source() (source.Loader, error) {
	if s.Source.Manifests != "" {
		return manifest.NewWhole(s.Source.Manifests, s.Plan.NodeName, s.StateDir), nil
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

// namesLimit limits the wait for the names of Services. It is short: a node that cannot
// reach the API server is one to be inspected, and the kernel has everything except the
// names.
const namesLimit = 5 * time.Second

// names reads the names of Services. If that fails it returns no names and a note, so
// that the command can still show addresses.
func (s *settings) names(ctx context.Context, notes io.Writer) *inspect.Names {
	names, err := s.load(ctx)
	switch {
	case err != nil && names.Complete():
		fmt.Fprintf(notes, "Note: %v\n", err)
	case err != nil:
		fmt.Fprintf(notes, "Showing addresses instead of names: %v\n", err)
	}
	return names
}

func (s *settings) load(ctx context.Context) (*inspect.Names, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, namesLimit, fmt.Errorf("no reply within %s", namesLimit))
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

// found returns the result of the settings flags. Notes go to the error output.
func (o *settingsFlags) found(notes io.Writer) (settings, error) {
	s, more, err := o.settings()
	for _, note := range more {
		fmt.Fprintln(notes, "Note:", note)
	}
	return s, err
}
