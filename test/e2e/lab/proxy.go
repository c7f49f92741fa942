package lab

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"time"
)

// ownFiles prepares a process's mount namespace: /sys shows the node's interfaces, and
// /run is the node's, with its iptables lock and the state that the proxy keeps there for
// its next process.
const ownFiles = `mount -t sysfs sys /sys && mount --bind "$0" /run && `

// readOnlySysctls mounts /proc/sys read-only, as in most containers.
const readOnlySysctls = `mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys && `

// proxyReadyLimit is long, because an emulated node starts a large program slowly.
const proxyReadyLimit = 3 * time.Minute

// Program is the path of the kube-ipvs binary under test.
func Program() string {
	if path := os.Getenv("LAB_KUBE_IPVS"); path != "" {
		return path
	}
	return filepath.Join(os.Getenv("LAB_SRC"), "bin/kube-ipvs")
}

// Peer is the path of a peer program, such as kube-proxy.
func Peer(name string) string { return filepath.Join(os.Getenv("LAB_CACHE"), "peers", name) }

// Kubeconfig is the path of the client configuration for the lab's API server. Nodes
// reach that server if their fabric has an Uplink.
func Kubeconfig() string { return os.Getenv("LAB_KUBECONFIG") }

var kubeconfigServer = regexp.MustCompile(`(?m)^\s*server: (\S+)$`)

// APIServer is the URL of the lab's API server.
func APIServer(t testing.TB) string {
	t.Helper()
	config, err := os.ReadFile(Kubeconfig())
	if err != nil {
		t.Fatalf("lab: the API server's address: %v", err)
	}
	server := kubeconfigServer.FindSubmatch(config)
	if server == nil {
		t.Fatalf("lab: %s names no server", Kubeconfig())
	}
	return string(server[1])
}

// StartProxy runs kube-ipvs on the node and waits until ready returns nil. Its
// log is part of the node's dump.
func (n *Node) StartProxy(ready func(*Process) error, args ...string) *Process {
	n.lab.t.Helper()
	return n.StartProgram(ready, Program(), args...)
}

// StartProgram is StartProxy for another program, such as a peer.
func (n *Node) StartProgram(ready func(*Process) error, program string, args ...string) *Process {
	n.lab.t.Helper()
	return n.startReady(ready, program, n.inOwnMounts(program, args))
}

func (n *Node) startReady(ready func(*Process) error, program string, cmd *exec.Cmd) *Process {
	n.lab.t.Helper()
	p := n.start(filepath.Base(program), cmd)
	n.proxies = append(n.proxies, p)
	n.lab.Eventually(proxyReadyLimit, n.Name+": "+p.Name+" is ready", func() error {
		select {
		case <-p.Done():
			n.lab.t.Fatalf("%s: %s ended with exit code %d:\n%s", n.Name, p.Name, p.ExitCode(), p.Log())
		default:
		}
		return ready(p)
	})
	return p
}

// RunProxy runs kube-ipvs on the node, waits for its end, and returns its exit code and
// output.
func (n *Node) RunProxy(args ...string) (exitCode int, output string) {
	n.lab.t.Helper()
	return n.runToEnd(Program(), n.inOwnMounts(Program(), args))
}

func (n *Node) runToEnd(program string, cmd *exec.Cmd) (exitCode int, output string) {
	n.lab.t.Helper()
	p := n.start(filepath.Base(program), cmd)
	n.proxies = append(n.proxies, p)
	return p.ExitCode(), p.Log()
}

func (n *Node) inOwnMounts(program string, args []string) *exec.Cmd {
	script := ownFiles
	if n.readOnlySysctls {
		script += readOnlySysctls
	}
	words := append([]string{program}, args...)
	cmd := exec.Command("sh", append([]string{"-c", script + `exec "$@"`, n.runDir}, words...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	return cmd
}
