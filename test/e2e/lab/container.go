package lab

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Container is a root file system with the mounts of a container runtime.
type Container struct {
	Root   string
	Mounts []Mount
	Env    []string
	// Privileged keeps kernel parameters writable, and all capabilities.
	Privileged bool
	// Capabilities are the capabilities of a container that is not privileged.
	Capabilities []int
	// SystemCalls is the file with the system call filter, if there is one.
	SystemCalls string
}

// Mount is a file or folder of the host that a container sees. Paths below /run are the
// node's own.
type Mount struct {
	Host, Path string
	ReadOnly   bool
}

// StartContainer runs a program in a container with a read-only root file system, and
// waits until ready returns nil.
func (n *Node) StartContainer(c Container, ready func(*Process) error, program string, args ...string) *Process {
	n.lab.t.Helper()
	return n.startReady(ready, program, n.inContainer(c, program, args))
}

// RunContainer is like StartContainer, but waits for the end of the program and returns
// its exit code and output.
func (n *Node) RunContainer(c Container, program string, args ...string) (exitCode int, output string) {
	n.lab.t.Helper()
	return n.runToEnd(program, n.inContainer(c, program, args))
}

// containerRoot makes the re-executed test program change to this root before it becomes
// the container's program: the root has no shell.
const containerRoot = "LAB_CONTAINER_ROOT"

// systemCallFilter names the file with the filter.
const systemCallFilter = "LAB_SYSTEM_CALL_FILTER"

func (n *Node) inContainer(c Container, program string, args []string) *exec.Cmd {
	n.lab.t.Helper()
	var script strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&script, format+" || exit 125\n", args...) }
	line("mount --bind %[1]s %[1]s", c.Root)
	for _, at := range []string{"proc", "sys", "dev"} {
		n.lab.must(os.MkdirAll(filepath.Join(c.Root, at), 0o755), "make /%s", at)
	}
	line("mount -t proc proc %s/proc", c.Root)
	line("mount -t sysfs -o ro sys %s/sys", c.Root)
	line("mount -t tmpfs -o mode=755 tmpfs %s/dev", c.Root)
	for _, device := range []string{"null", "zero", "full", "random", "urandom"} {
		line(": >%[1]s/dev/%[2]s && mount --bind /dev/%[2]s %[1]s/dev/%[2]s", c.Root, device)
	}
	if !c.Privileged {
		line("mount --bind %[1]s/proc/sys %[1]s/proc/sys", c.Root)
		line("mount -o remount,ro,bind %s/proc/sys", c.Root)
	}
	for _, m := range c.Mounts {
		host, at := n.hostPath(m.Host), filepath.Join(c.Root, m.Path)
		n.lab.must(makeMountPoint(host, at), "make %s", m.Path)
		line("mount --bind %s %s", host, at)
		if m.ReadOnly {
			line("mount -o remount,ro,bind %s", at)
		}
	}
	line("mount -o remount,ro,bind %s", c.Root)
	script.WriteString(`exec "$@"`)
	cmd := exec.Command("sh", append([]string{"-c", script.String(), "sh", os.Args[0], program}, args...)...)
	cmd.Env = append(slices.Clone(c.Env), containerRoot+"="+c.Root, keptCapabilities+"="+kept(c), systemCallFilter+"="+c.SystemCalls)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	return cmd
}

// kept returns the capabilities in the format of keptCapabilities.
func kept(c Container) string {
	if c.Privileged {
		return everything
	}
	var out []string
	for _, capability := range c.Capabilities {
		out = append(out, fmt.Sprint(capability))
	}
	return strings.Join(out, ",")
}

// hostPath returns the location of a host path for this node.
func (n *Node) hostPath(path string) string {
	if below, ok := strings.CutPrefix(path, "/run/"); ok {
		return filepath.Join(n.runDir, below)
	}
	return path
}

// makeMountPoint creates a file or folder to mount on, as a container runtime does.
func makeMountPoint(host, at string) error {
	info, err := os.Stat(host)
	if err == nil && info.IsDir() {
		return os.MkdirAll(at, 0o755)
	}
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	return os.WriteFile(at, nil, 0o644)
}

// HostFile creates a missing file that a kubelet would create for a volume of the host.
func (n *Node) HostFile(path string) {
	n.lab.t.Helper()
	file, err := os.OpenFile(n.hostPath(path), os.O_CREATE|os.O_RDWR, 0o600)
	n.lab.must(err, "%s: make %s", n.Name, path)
	file.Close()
}

// HostFolder does the same for a folder.
func (n *Node) HostFolder(path string) {
	n.lab.t.Helper()
	n.lab.must(os.MkdirAll(n.hostPath(path), 0o755), "%s: make %s", n.Name, path)
}
