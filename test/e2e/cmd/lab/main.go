// Command lab runs a command on a kernel that supports nodes: in QEMU, or on the machine
// itself if its kernel suffices. It exits with the command's exit code, or with 125 if
// the lab itself failed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/control"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/vm"
)

// exitLab is the exit code for a failure of the lab itself.
const exitLab = 125

const usage = `usage: lab [flags] [--] command [argument...]

Runs the command as root with a kernel that has IPVS, with the checkout as its
directory.

`

func main() {
	code, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		code = exitLab
	}
	os.Exit(code)
}

type options struct {
	config    vm.Config
	out       string
	limit     time.Duration
	apiserver bool
	deps      bool
	prepare   bool
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
	if opts.prepare {
		_, err := vm.Prepare(ctx, opts.config)
		return 0, err
	}
	return runCommand(ctx, opts)
}

func runCommand(ctx context.Context, opts *options) (exitCode int, err error) {
	lab, err := vm.Prepare(ctx, opts.config)
	if err != nil {
		return 0, err
	}
	if lab.Way() == vm.Host && !vm.Inside() {
		return vm.Reenter(ctx)
	}
	out := opts.out
	if out == "" {
		if out, err = os.MkdirTemp(opts.config.Cache, "out-"); err != nil {
			return 0, err
		}
		defer removeUnlessUsed(out, opts.config.Log)
	}
	env := map[string]string{}
	if opts.apiserver {
		server, err := startControl(ctx, opts, lab.Way())
		if err != nil {
			return 0, err
		}
		defer server.Stop()
		if err := os.WriteFile(filepath.Join(out, kubeconfig), server.Kubeconfig(), 0o600); err != nil {
			return 0, err
		}
		env["LAB_ETCD"] = "http://" + net.JoinHostPort(loopback(lab.Way()), server.EtcdPort())
		env["LAB_KUBECONFIG"] = filepath.Join(lab.Visible(out), kubeconfig)
	}
	return runLimited(ctx, opts, lab, out, env)
}

// kubeconfig is the name of the client configuration in the output directory.
const kubeconfig = "kubeconfig"

// loopback is the address by which the command reaches servers on the loopback address
// here.
func loopback(way vm.Way) string {
	if way == vm.Host {
		return "127.0.0.1"
	}
	return vm.HostAddress
}

func startControl(ctx context.Context, opts *options, way vm.Way) (*control.Server, error) {
	begin := time.Now()
	listen := "127.0.0.1"
	if way == vm.Host {
		// Inside the lab's namespaces, which no other process can reach.
		listen = "0.0.0.0"
	}
	config := control.Config{
		Peers: filepath.Join(opts.config.Cache, "peers"), Listen: listen, Address: vm.HostAddress,
		Arguments: control.WithoutControllers,
	}
	server, err := control.Start(ctx, config)
	if err != nil && ctx.Err() == nil {
		// No test has begun, and another process may have taken one of the ports.
		opts.config.Log("%v; trying once more", err)
		server, err = control.Start(ctx, config)
	}
	if err == nil {
		opts.config.Log("the API server is ready after %.1f s", time.Since(begin).Seconds())
	}
	return server, err
}

func runLimited(ctx context.Context, opts *options, lab *vm.Lab, out string, env map[string]string) (int, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, opts.limit,
		fmt.Errorf("the command was stopped: it took longer than %s (see -limit)", opts.limit))
	defer cancel()
	begin := time.Now()
	opts.config.Log("running on %s: %s", lab.Way(), strings.Join(opts.config.Command, " "))
	code, err := lab.Run(ctx, out, env)
	if err == nil {
		opts.config.Log("exit code %d after %.1f s", code, time.Since(begin).Seconds())
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
	flag.StringVar(&opts.out, "out", "", "directory that the command finds in $LAB_OUT (default: a new one in the cache)")
	flag.StringVar(&opts.config.Shared, "shared", "", "directory that the command finds in $LAB_SHARED, for several labs in common (default: the one of -out)")
	flag.BoolVar(&opts.config.CountInstructions, "icount", false, "emulate one processor, with a clock that counts its instructions; implies -way tcg")
	flag.BoolVar(&opts.config.CoarseTimers, "coarse-timers", false, "emulate timers of 4 ms, which takes less time; for commands that do not measure time")
	flag.StringVar(&opts.config.Kernel, "kernel", os.Getenv("LAB_KERNEL"), "package of the guest's kernel, such as linux-image-6.12-amd64 (default: the distribution's stock kernel)")
	flag.Func("without", "module that the guest's kernel cannot load; may be repeated", func(module string) error {
		opts.config.Without = append(opts.config.Without, module)
		return nil
	})
	flag.StringVar(&opts.config.Memory, "memory", "4G", "memory of a guest")
	flag.DurationVar(&opts.limit, "limit", 20*time.Minute, "time that the command may take")
	flag.BoolVar(&opts.apiserver, "apiserver", false, "run an API server, which the command finds by $LAB_KUBECONFIG")
	flag.BoolVar(&opts.deps, "deps", false, "only install what the machine lacks for building and testing")
	flag.BoolVar(&opts.prepare, "prepare", false, "only prepare what a later command needs: programs, image, kind of guest")
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
	if len(opts.config.Command) == 0 && !opts.deps && !opts.prepare {
		flag.Usage()
		return nil, errors.New("no command")
	}
	opts.config.Way = vm.Way(*way)
	if opts.config.CountInstructions {
		opts.config.Way = vm.TCG
	}
	switch opts.config.Way {
	case "", vm.Host, vm.KVM, vm.TCG:
	default:
		return nil, fmt.Errorf("unknown way %q: not host, kvm or tcg", *way)
	}
	return opts, resolveDirectories(&opts.config, &opts.out, &opts.config.Shared)
}

// resolveDirectories makes the directories' names absolute. optional ones may be unset.
func resolveDirectories(config *vm.Config, optional ...*string) (err error) {
	if config.Source, err = filepath.Abs(config.Source); err != nil {
		return err
	}
	if config.Cache == "" {
		config.Cache = filepath.Join(config.Source, ".cache")
	}
	for _, dir := range append(optional, &config.Cache) {
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

// removeUnlessUsed removes the output directory if it has only the runner's own files,
// and otherwise prints its name.
func removeUnlessUsed(dir string, log vm.Logf) {
	for _, own := range append([]string{kubeconfig}, vm.OwnFiles...) {
		if err := os.Remove(filepath.Join(dir, own)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log("%v", err)
		}
	}
	if os.Remove(dir) != nil {
		log("the command left files in %s", dir)
	}
}
