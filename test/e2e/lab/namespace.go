package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace, which acts as a host.
type Namespace struct {
	// Name is its name in the test; `ip netns` has it with the lab's prefix.
	Name string

	lab       *Lab
	file      netns.NsHandle
	netlink   *netlink.Handle
	path      string
	processes []*Process
	closers   []func()
}

// Namespace creates an empty host, with its loopback interface up.
func (l *Lab) Namespace(name string) *Namespace {
	l.t.Helper()
	n := &Namespace{Name: name, lab: l, path: filepath.Join("/run/netns", l.prefix+name)}
	var err error
	n.file, err = newNetwork(n.path)
	l.must(err, "namespace %s", name)
	n.netlink, err = netlink.NewHandleAt(n.file, unix.NETLINK_ROUTE)
	l.must(err, "netlink in namespace %s", name)
	l.namespaces = append(l.namespaces, n)
	n.settle()
	return n
}

// settle makes the namespace's addresses usable immediately: IPv6 would spend a second or
// two on duplicate address detection.
func (n *Namespace) settle() {
	n.lab.t.Helper()
	for _, scope := range []string{"all", "default"} {
		n.Sysctl("net.ipv6.conf."+scope+".accept_dad", "0")
		n.Sysctl("net.ipv6.conf."+scope+".router_solicitations", "0")
	}
	n.Up("lo")
}

// newNetwork creates a network namespace at path. Its thread ends with the goroutine, so
// that no other goroutine runs in the namespace.
func newNetwork(path string) (netns.NsHandle, error) {
	type result struct {
		file netns.NsHandle
		err  error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		file, err := makeNetwork(path)
		done <- result{file, err}
	}()
	r := <-done
	return r.file, r.err
}

func makeNetwork(path string) (netns.NsHandle, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return netns.None(), err
	}
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		return netns.None(), err
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return netns.None(), fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
		return netns.None(), fmt.Errorf("mount %s: %w", path, err)
	}
	return netns.Get()
}

// Path is the path of the namespace for programs, such as /run/netns/NAME.
func (n *Namespace) Path() string { return n.path }

func (n *Namespace) close() {
	for _, p := range n.processes {
		p.Stop()
	}
	for i := len(n.closers) - 1; i >= 0; i-- {
		n.closers[i]()
	}
	n.netlink.Close()
	n.file.Close()
	if err := unix.Unmount(n.path, unix.MNT_DETACH); err != nil {
		n.lab.t.Logf("lab: unmount %s: %v", n.path, err)
	}
	os.Remove(n.path)
}

// Do runs f on a thread inside the namespace. Sockets and processes that f
// creates belong to the namespace and may be used anywhere.
func (n *Namespace) Do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			done <- err
			return
		}
		defer home.Close()
		if err := netns.Set(n.file); err != nil {
			done <- fmt.Errorf("enter namespace %s: %w", n.Name, err)
			return
		}
		err = f()
		// A thread that cannot return to its namespace ends with this goroutine.
		if netns.Set(home) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// Sysctl sets a kernel parameter, named with dots.
func (n *Namespace) Sysctl(name, value string) {
	n.lab.t.Helper()
	err := n.Do(func() error { return os.WriteFile(sysctlPath(name), []byte(value), 0o644) })
	n.lab.must(err, "%s: sysctl %s=%s", n.Name, name, value)
}

// ReadSysctl returns a kernel parameter.
func (n *Namespace) ReadSysctl(name string) string {
	n.lab.t.Helper()
	value, err := n.readSysctl(name)
	n.lab.must(err, "%s: sysctl %s", n.Name, name)
	return value
}

func (n *Namespace) readSysctl(name string) (string, error) {
	var value []byte
	err := n.Do(func() (err error) {
		value, err = os.ReadFile(sysctlPath(name))
		return err
	})
	return strings.TrimSpace(string(value)), err
}

// sysctlPath turns dots into slashes, and slashes into the dots of an
// interface's name, as sysctl(8) does.
func sysctlPath(name string) string {
	swap := strings.NewReplacer(".", "/", "/", ".")
	return "/proc/sys/" + swap.Replace(name)
}
