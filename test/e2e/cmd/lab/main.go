// Command lab runs a command with a kernel that can be a node's: in QEMU, or on
// the machine itself where its kernel is good enough. It ends with the command's
// exit code, or with 125 if the lab itself failed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/vm"
)

// exitLab is the exit code for a failure of the lab itself.
const exitLab = 125

const usage = `usage: lab [flags] [--] command [argument...]

Runs the command as root with a kernel that has IPVS, with the checkout as its
directory.

`

func main() {
	if len(os.Args) == 3 && os.Args[1] == vm.HostSetup {
		fail(vm.EnterHostLab(os.Args[2]))
	}
	code, err := run()
	if err != nil {
		fail(err)
	}
	os.Exit(code)
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "lab:", err)
	os.Exit(exitLab)
}

type options struct {
	config vm.Config
	limit  time.Duration
	deps   bool
}

func run() (exitCode int, err error) {
	opts, err := parseFlags()
	if err != nil {
		return 0, err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if opts.deps {
		return 0, vm.InstallDependencies(ctx, opts.config.Log)
	}
	return runCommand(ctx, opts)
}

func runCommand(ctx context.Context, opts *options) (exitCode int, err error) {
	config := opts.config
	lab, err := vm.Prepare(ctx, config)
	if err != nil {
		return 0, err
	}
	if config.Out == "" {
		if config.Out, err = os.MkdirTemp(config.Cache, "out-"); err != nil {
			return 0, err
		}
		defer removeUnlessUsed(config.Out, config.Log)
	}
	lab.SetOut(config.Out)
	ctx, cancel := context.WithTimeoutCause(ctx, opts.limit,
		fmt.Errorf("the command was stopped: it took longer than %s (see -limit)", opts.limit))
	defer cancel()
	begin := time.Now()
	config.Log("running on %s: %s", lab.Way(), strings.Join(config.Command, " "))
	code, err := lab.Run(ctx, nil)
	if err == nil {
		config.Log("exit code %d after %.1f s", code, time.Since(begin).Seconds())
	}
	return code, err
}

func parseFlags() (*options, error) {
	opts := &options{config: vm.Config{Stdout: os.Stdout, Log: logger(time.Now())}}
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), usage)
		flag.PrintDefaults()
	}
	way := flag.String("way", os.Getenv("LAB"), "kernel to use: host, kvm or tcg; the best that works if empty")
	flag.StringVar(&opts.config.Source, "src", ".", "checkout that the command works in")
	flag.StringVar(&opts.config.Cache, "cache", os.Getenv("KUBE_IPVS_CACHE"), "directory for images (default .cache in the checkout)")
	flag.StringVar(&opts.config.Out, "out", "", "directory that the command finds in $LAB_OUT (default: a new one in the cache)")
	flag.StringVar(&opts.config.Memory, "memory", "4G", "memory of a guest")
	flag.DurationVar(&opts.limit, "limit", 20*time.Minute, "time that the command may take")
	flag.BoolVar(&opts.deps, "deps", false, "only install what the machine lacks for building and testing")
	opts.config.Env = map[string]string{}
	flag.Func("env", "NAME=VALUE for the command; may be repeated", func(text string) error {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return fmt.Errorf("%q is not NAME=VALUE", text)
		}
		opts.config.Env[name] = value
		return nil
	})
	flag.Parse()

	opts.config.Command = flag.Args()
	if len(opts.config.Command) == 0 && !opts.deps {
		flag.Usage()
		return nil, errors.New("no command")
	}
	opts.config.Way = vm.Way(*way)
	switch opts.config.Way {
	case "", vm.Host, vm.KVM, vm.TCG:
	default:
		return nil, fmt.Errorf("unknown way %q: not host, kvm or tcg", *way)
	}
	return opts, resolveDirectories(&opts.config)
}

func resolveDirectories(config *vm.Config) (err error) {
	if config.Source, err = filepath.Abs(config.Source); err != nil {
		return err
	}
	if config.Cache == "" {
		config.Cache = filepath.Join(config.Source, ".cache")
	}
	for _, dir := range []*string{&config.Cache, &config.Out} {
		if *dir == "" {
			continue
		}
		if *dir, err = filepath.Abs(*dir); err != nil {
			return err
		}
		if err = os.MkdirAll(*dir, 0o755); err != nil {
			return err
		}
	}
	return nil
}

func logger(begin time.Time) vm.Logf {
	return func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "lab: [%5.1fs] %s\n", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
	}
}

// removeUnlessUsed removes the output directory if it holds only the runner's
// own files, and otherwise says where it is.
func removeUnlessUsed(dir string, log vm.Logf) {
	for _, own := range vm.OwnFiles {
		if err := os.Remove(filepath.Join(dir, own)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log("%v", err)
		}
	}
	if os.Remove(dir) != nil {
		log("the command left files in %s", dir)
	}
}
