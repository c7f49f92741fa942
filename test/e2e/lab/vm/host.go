package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// HostSetup is the argument by which the runner, started again inside fresh
// namespaces, knows that it has to prepare them (see EnterHostLab).
const HostSetup = "-host-setup"

// hostModules are what a kernel must have for the lab's nodes.
var hostModules = []string{
	"ip_vs", "ip_vs_rr", "dummy", "veth", "ip_set", "ip_set_hash_ipport", "xt_set", "nf_conntrack",
}

// hostIsNode tells whether the machine's kernel can be a node's: nil, or why
// not.
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

// runInNamespaces runs the script in network and mount namespaces of its own,
// by way of EnterHostLab.
func runInNamespaces(ctx context.Context, script string, stdout io.Writer) (exitCode int, err error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", HostSetup, script)
	cmd.Stdout, cmd.Stderr = stdout, stdout
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
		Setpgid:    true,
	}
	err = runOnLockedThread(cmd)
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// EnterHostLab prepares the namespaces that it finds itself in as the guest's
// init script does a guest, and then becomes the shell that runs the script. It
// returns only if it fails. As the first process of a process namespace, that
// shell takes everything that it has started with it when it ends.
func EnterHostLab(script string) error {
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
		// The address by which a VM's guest reaches the machine.
		{"addr", "add", hostAddress + "/32", "dev", "lo"},
	} {
		if out, err := exec.Command(ip, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	shell, err := lookTool("sh")
	if err != nil {
		return err
	}
	return syscall.Exec(shell, []string{filepath.Base(shell), script}, os.Environ())
}
