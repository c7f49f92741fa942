package cluster

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/control"
)

//go:embed kube-proxy.yaml
var kubeProxyManifest string

// supervisor is the process with which the cluster ends.
type supervisor struct {
	config *Config
	dir    string
	disk   string
	// archives are the images that the nodes import when they start.
	archives []string
	// authorized is the nodes' authorized_keys line.
	authorized string
	server     *control.Server
	machines   []*machine
	say        func(format string, args ...any)
}

// upLimit is long enough for emulated nodes on a busy machine; on an idle one they take a
// minute.
const upLimit = 15 * time.Minute

// Supervise runs the cluster in the network namespace of this process until ctx ends.
// door is an open socket in the machine's network, through which its clients reach the
// API server at the address. progress gets lines for the user.
func (c *Config) Supervise(ctx context.Context, disk string, archives []string, address string, door net.Listener, progress io.Writer) error {
	s := &supervisor{config: c, dir: c.state(), disk: disk, archives: archives}
	s.say = func(format string, args ...any) { fmt.Fprintf(progress, format+"\n", args...) }
	if err := os.WriteFile(filepath.Join(s.dir, "pid"), fmt.Appendln(nil, os.Getpid()), 0o644); err != nil {
		return err
	}
	if err := s.start(ctx, address, door); err != nil {
		return err
	}
	defer s.server.Stop()
	limited, cancel := context.WithTimeout(ctx, upLimit)
	defer cancel()
	if err := s.awaitReady(limited); err != nil {
		return err
	}
	s.say(ready)
	<-ctx.Done()
	return nil
}

func (s *supervisor) start(ctx context.Context, address string, door net.Listener) (err error) {
	nodes := nodesUpTo(s.config.Nodes)
	if err := setUpNetwork(nodes); err != nil {
		return err
	}
	if s.server, err = s.config.startControlPlane(ctx); err != nil {
		return err
	}
	s.say("the control plane runs")
	if err := s.writeKubeconfigs(address); err != nil {
		return err
	}
	go forward(door, strings.TrimPrefix(s.server.URL(), "https://"))
	if err := s.applyObjects(ctx, nodes); err != nil {
		return err
	}
	if s.authorized, err = s.config.writeSSHKey(); err != nil {
		return err
	}
	lab, err := s.config.lab(ctx)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		m := &machine{supervisor: s, node: n, lab: lab, others: nodes}
		if err := m.boot(ctx); err != nil {
			return fmt.Errorf("%s: %w", n.name(), err)
		}
		s.machines = append(s.machines, m)
	}
	return nil
}

func (s *supervisor) writeKubeconfigs(address string) error {
	inside := s.server.Kubeconfig()
	outside := s.server.KubeconfigFor(control.Admin.Name, "https://"+address)
	if err := os.WriteFile(s.config.InsideKubeconfig(), inside, 0o600); err != nil {
		return err
	}
	return os.WriteFile(s.config.Kubeconfig(), outside, 0o600)
}

// applyObjects creates the objects that the cluster has from the start.
func (s *supervisor) applyObjects(ctx context.Context, nodes []node) error {
	objects := dnsService
	for _, n := range nodes {
		objects += n.object()
	}
	// The API server creates it soon after it is ready.
	if err := s.kubectl(ctx, nil, "wait", "--for=create", "namespace/kube-system", "--timeout=1m"); err != nil {
		return err
	}
	if err := s.kubectl(ctx, []byte(objects), "apply", "-f", "-"); err != nil {
		return err
	}
	return s.deployProxy(ctx)
}

// awaitReady waits for the nodes, and for the proxy on each node.
func (s *supervisor) awaitReady(ctx context.Context) error {
	if err := s.awaitNodes(ctx); err != nil {
		return err
	}
	s.say("%d nodes are ready", s.config.Nodes)
	if err := s.kubectl(ctx, nil, "-n", "kube-system", "rollout", "status", "daemonset",
		proxyImage(s.config.Served.Proxy), "--timeout="+upLimit.String()); err != nil {
		pods, listErr := s.ask(ctx, "-n", "kube-system", "get", "pods", "-o", "wide")
		return errors.Join(err, errors.New(pods), listErr)
	}
	s.say("%s runs on each of them", s.config.Served.Proxy)
	return nil
}

func (s *supervisor) kubectl(ctx context.Context, input []byte, args ...string) error {
	cmd := exec.CommandContext(ctx, s.config.Kubectl(),
		append([]string{"--kubeconfig", s.config.InsideKubeconfig()}, args...)...)
	cmd.Stdin = bytes.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// ask returns what kubectl prints, for the report of a failure: it does not matter that
// ctx may have ended.
func (s *supervisor) ask(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, s.config.Kubectl(),
		append([]string{"--kubeconfig", s.config.InsideKubeconfig()}, args...)...).Output()
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

// forward carries connections from the machine into the cluster's network.
func forward(door net.Listener, address string) {
	for {
		client, err := door.Accept()
		if err != nil {
			return
		}
		go func() {
			defer client.Close()
			server, err := net.Dial("tcp", address)
			if err != nil {
				return
			}
			defer server.Close()
			go func() { _, _ = io.Copy(server, client); _ = server.(*net.TCPConn).CloseWrite() }()
			_, _ = io.Copy(client, server)
		}()
	}
}

// run runs a command that is killed when the thread that starts it ends.
func run(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, out)
	}
	return nil
}

// withEndOf adds the last lines of a log to an error.
func withEndOf(log string, err error) error {
	text, readErr := os.ReadFile(log)
	if readErr != nil {
		return fmt.Errorf("%w (and no %s: %w)", err, filepath.Base(log), readErr)
	}
	return fmt.Errorf("%w\nend of %s:\n%s", err, filepath.Base(log), lastLines(string(text), 20))
}

func lastLines(text string, count int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-count):], "\n")
}
