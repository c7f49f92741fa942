package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/vm"
)

// Config describes the cluster.
type Config struct {
	// Source is the checkout, with deploy/base.
	Source string
	// Cache holds the lab's kernel, built programs, and the state of the running cluster.
	Cache string
	// Served describes what serves the Services.
	Served Served
	// Image is the archive with kube-ipvs's image, tagged imageTag.
	Image string
	// Extra are archives of additional images for the nodes.
	Extra []string
	// Nodes is the number of nodes.
	Nodes int
	Log   vm.Logf
}

// Served is what serves a cluster's Services.
type Served struct {
	// Proxy is one of Proxies.
	Proxy   string `json:"proxy"`
	Version string `json:"version"`
	// Build identifies the build.
	Build string `json:"build"`
}

func (c *Config) peers() string    { return filepath.Join(c.Cache, "peers") }
func (c *Config) programs() string { return filepath.Join(c.Cache, "upstream") }
func (c *Config) images() string   { return filepath.Join(c.Cache, "cluster") }
func (c *Config) state() string    { return filepath.Join(c.images(), "running") }

// Kubeconfig is the client configuration for use on this machine, InsideKubeconfig that
// for programs in the cluster's network namespace.
func (c *Config) Kubeconfig() string       { return filepath.Join(c.state(), "kubeconfig") }
func (c *Config) InsideKubeconfig() string { return filepath.Join(c.state(), "kubeconfig.inside") }

// Kubectl is the path of kubectl.
func (c *Config) Kubectl() string { return filepath.Join(c.peers(), "kubectl") }

// nodeMemory is enough for the Pods of some tests at once.
const nodeMemory = "2560M"

// Up starts the cluster and returns when its nodes and its proxy are ready. The cluster
// continues to run after this process has ended, until Down.
func (c *Config) Up(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("only root may make the cluster's network")
	}
	if pid, err := c.pid(); err == nil {
		return fmt.Errorf("a cluster is running already (process %d): end it with `make cluster-down`", pid)
	}
	prepared, err := c.prepare(ctx)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(c.state()); err != nil {
		return err
	}
	if err := os.MkdirAll(c.state(), 0o755); err != nil {
		return err
	}
	if err := c.startSupervisor(ctx, prepared); err != nil {
		return errors.Join(err, c.Down())
	}
	served, err := json.Marshal(c.Served)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.state(), servedFile), served, 0o644)
}

// servedFile exists while a cluster runs.
const servedFile = "served.json"

// Running returns what serves the Services of the running cluster; the error is
// fs.ErrNotExist if there is none.
func (c *Config) Running() (served Served, err error) {
	if _, err := c.pid(); err != nil {
		return served, err
	}
	text, err := os.ReadFile(filepath.Join(c.state(), servedFile))
	if err != nil {
		return served, err
	}
	return served, json.Unmarshal(text, &served)
}

// Prepare builds everything that Up would build first.
func (c *Config) Prepare(ctx context.Context) error {
	_, err := c.prepare(ctx)
	return err
}

// prepared is everything that is built before the cluster starts.
type prepared struct {
	disk     string
	archives []string
}

func (c *Config) prepare(ctx context.Context) (p prepared, err error) {
	lab, err := c.lab(ctx)
	if err != nil {
		return p, err
	}
	if err := os.MkdirAll(c.images(), 0o755); err != nil {
		return p, err
	}
	if p.disk, err = c.ensureDisk(ctx, lab, c.images()); err != nil {
		return p, err
	}
	archive, err := c.proxyArchive(ctx)
	p.archives = append([]string{archive}, c.Extra...)
	return p, err
}

// lab is the configuration with which guests boot. Nodes are always guests: kubelets need
// machines.
func (c *Config) lab(ctx context.Context) (*vm.Lab, error) {
	return vm.PrepareGuest(ctx, vm.Config{Source: c.Source, Cache: c.Cache, Memory: nodeMemory, Log: c.Log})
}

// startSupervisor runs this program again in a new network namespace and waits until it
// reports that the cluster is ready.
func (c *Config) startSupervisor(ctx context.Context, p prepared) error {
	// Created here, the socket is in this machine's network, for clients on it.
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()
	door, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer door.Close()
	progress, said, err := os.Pipe()
	if err != nil {
		return err
	}
	defer progress.Close()
	arguments := []string{"-source", c.Source, "-cache", c.Cache, "-proxy", c.Served.Proxy,
		"-nodes", strconv.Itoa(c.Nodes), "supervise", listener.Addr().String(), p.disk}
	cmd := exec.Command("/proc/self/exe", append(arguments, p.archives...)...)
	cmd.ExtraFiles = []*os.File{door, said}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Setsid: true}
	if cmd.Stderr, err = os.Create(filepath.Join(c.state(), "log")); err != nil {
		return err
	}
	err = cmd.Start()
	said.Close()
	if err != nil {
		return err
	}
	return c.followProgress(ctx, progress)
}

// ready reads the supervisor's report to the process that started it.
const ready = "ready"

func (c *Config) followProgress(ctx context.Context, progress *os.File) error {
	stop := context.AfterFunc(ctx, func() { progress.SetReadDeadline(time.Now()) })
	defer stop()
	lines := bufio.NewScanner(progress)
	for lines.Scan() {
		if lines.Text() == ready {
			return nil
		}
		c.Log("%s", lines.Text())
	}
	log, err := os.ReadFile(filepath.Join(c.state(), "log"))
	return errors.Join(fmt.Errorf("the cluster did not come up:\n%s", log), err, ctx.Err())
}

// pid returns the supervisor's PID if it runs.
func (c *Config) pid() (int, error) {
	text, err := os.ReadFile(filepath.Join(c.state(), "pid"))
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, err
	}
	// It may have ended, and another process may have its PID. A zombie has an empty
	// command line.
	command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return 0, err
	}
	if !strings.Contains(string(command), "supervise") {
		return 0, fs.ErrNotExist
	}
	return pid, nil
}

// downLimit limits the wait for the end of killed processes.
const downLimit = 30 * time.Second

// Down stops the cluster and removes everything: guests, control plane and network end
// with the supervisor.
func (c *Config) Down() error {
	if pid, err := c.pid(); err == nil {
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
			return err
		}
		if err := c.awaitEnd(); err != nil {
			return err
		}
	}
	return os.RemoveAll(c.state())
}

func (c *Config) awaitEnd() error {
	for end := time.Now().Add(downLimit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, err := c.pid(); err != nil {
			return nil
		}
	}
	return fmt.Errorf("the cluster did not end within %s", downLimit)
}

// Inside returns a command that runs in the cluster's network namespace.
func (c *Config) Inside(ctx context.Context, program string, args ...string) (*exec.Cmd, error) {
	pid, err := c.pid()
	if err != nil {
		return nil, fmt.Errorf("no cluster is running: %w", err)
	}
	return exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(pid), "-n", program}, args...)...), nil
}
