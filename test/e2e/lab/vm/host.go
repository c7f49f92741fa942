package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// insideMark is in the environment of a runner that runs inside the lab's own
// namespaces.
const insideMark = "LAB_INSIDE"

// Inside reports whether this process runs inside the lab's own namespaces, after
// Reenter.
func Inside() bool { return os.Getenv(insideMark) != "" }

// hostModules are the modules that the lab's nodes need.
var hostModules = []string{
	"ip_vs", "ip_vs_rr", "dummy", "veth", "ip_set", "ip_set_hash_ipport", "xt_set", "nf_conntrack",
}

// hostIsNode returns nil if the machine's kernel supports nodes, or the reason why not.
func hostIsNode(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("not root")
	}
	for _, module := range hostModules {
		if _, err := os.Stat("/sys/module/" + module); err == nil {
			continue
		}
		modprobe, err := lookTool("modprobe")
		if err != nil {
			return fmt.Errorf("module %s is not loaded and there is no modprobe", module)
		}
		if out, err := exec.CommandContext(ctx, modprobe, module).CombinedOutput(); err != nil {
			return fmt.Errorf("module %s: %s", module, strings.TrimSpace(string(out)))
		}
	}
	return nil
}

// Reenter runs this program again with the same arguments in new network, mount and
// process namespaces, and returns its exit code. When that process ends, the kernel kills
// everything that it has started.
func Reenter(ctx context.Context) (exitCode int, err error) {
	// By signal, so that the process inside can clean up.
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopLimit
	cmd.Env = append(os.Environ(), insideMark+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
		Setpgid:    true,
	}
	return exitCodeOf(runOnLockedThread(cmd))
}

// stopLimit limits the wait for the end of a process after a signal.
const stopLimit = 10 * time.Second

// exitCodeOf distinguishes a command that ended with an exit code from one that did not.
func exitCodeOf(err error) (int, error) {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// setUpNamespaces prepares this process's namespaces as the init script prepares a guest.
func setUpNamespaces(ctx context.Context) error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	for _, mount := range []struct{ kind, target string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"tmpfs", "/run"},
	} {
		if err := syscall.Mount(mount.kind, mount.target, mount.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", mount.target, err)
		}
	}
	if err := os.Mkdir("/run/netns", 0o755); err != nil {
		return err
	}
	ip, err := lookTool("ip")
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"addr", "add", HostAddress + "/32", "dev", "lo"},
	} {
		if out, err := exec.CommandContext(ctx, ip, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// runHere runs the script in the namespaces of this process.
func runHere(ctx context.Context, script string, stdout io.Writer) (exitCode int, err error) {
	cmd := exec.CommandContext(ctx, "sh", script)
	cmd.Stdout, cmd.Stderr = stdout, stdout
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	err = runOnLockedThread(cmd)
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	return exitCodeOf(err)
}
