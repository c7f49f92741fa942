package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// hostTool is a program that must be on the machine itself, with the packages
// that bring it.
type hostTool struct {
	program  string
	packages []string
}

var (
	// vmTools build the image and run it.
	vmTools = []hostTool{
		{"qemu-system-x86_64", []string{"qemu-system-x86"}},
		{"depmod", []string{"kmod"}},
		{"dpkg", []string{"dpkg"}},
	}
	// nodeTools are what a node's namespaces need when they live on the
	// machine's own kernel.
	nodeTools = []hostTool{
		{"ip", []string{"iproute2"}},
		{"iptables", []string{"iptables"}},
		{"ipset", []string{"ipset"}},
		{"ipvsadm", []string{"ipvsadm"}},
		{"conntrack", []string{"conntrack"}},
		{"nft", []string{"nftables"}},
		{"tcpdump", []string{"tcpdump"}},
		{"curl", []string{"curl"}},
		{"modprobe", []string{"kmod"}},
	}
	// raceTools let cgo link the race detector.
	raceTools = []hostTool{{"gcc", []string{"gcc", "libc6-dev"}}}
)

// guestPackages fill the guest's file system. They are unpacked into the
// image, never installed on the machine.
var guestPackages = []string{
	"busybox-static", "conntrack", "curl", "dash", "ethtool", "ipset", "iproute2",
	"iptables", "ipvsadm", "kmod", "netbase", "nftables", "tcpdump",
}

// InstallDependencies installs what the machine lacks for building, testing
// and running the lab's VM.
func InstallDependencies(ctx context.Context, log Logf) error {
	return ensureTools(ctx, log, append(raceTools[:len(raceTools):len(raceTools)], vmTools...))
}

// ensureTools installs the packages of those tools that are not in the PATH. It
// fails if something is missing and the caller may not install it.
func ensureTools(ctx context.Context, log Logf, tools []hostTool) error {
	var programs, packages []string
	for _, tool := range tools {
		if _, err := lookTool(tool.program); err != nil {
			programs = append(programs, tool.program)
			packages = append(packages, tool.packages...)
		}
	}
	if len(packages) == 0 {
		return nil
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("missing %s: run as root, or install: apt-get install --no-install-recommends %s",
			strings.Join(programs, ", "), strings.Join(packages, " "))
	}
	log("installing %s", strings.Join(packages, " "))
	args := append([]string{"install", "-y", "--no-install-recommends"}, packages...)
	return aptGet(ctx, "", args...)
}

// lookTool finds a program as root would: also in the sbin directories, which
// an ordinary user's PATH may lack.
func lookTool(program string) (string, error) {
	if path, err := exec.LookPath(program); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, program)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s: %w", program, exec.ErrNotFound)
}

// aptGet runs apt-get in dir. Package lists that are missing or out of date
// show as a failure, so a failure is met with one `apt-get update` and a second
// try.
func aptGet(ctx context.Context, dir string, args ...string) error {
	first := apt(ctx, dir, args...)
	if first == nil {
		return nil
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w (as root, the package lists would be updated and this tried again)", first)
	}
	// A repository that cannot be reached need not be the one that is needed.
	update := apt(ctx, "", "update")
	if second := apt(ctx, dir, args...); second != nil {
		return errors.Join(second, update)
	}
	return nil
}

func apt(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "APT::Sandbox::User=root"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, tail(out, 20))
	}
	return nil
}

// unpackClosure unpacks the packages and everything that they depend on into
// root, downloading to dir. An empty dpkg status file makes apt resolve
// dependencies as if nothing at all were installed, so the result does not hang
// on what the machine happens to have.
func unpackClosure(ctx context.Context, dir, root string, packages []string) error {
	archives := filepath.Join(dir, "archives")
	if err := os.MkdirAll(filepath.Join(archives, "partial"), 0o755); err != nil {
		return err
	}
	status := filepath.Join(dir, "status")
	if err := os.WriteFile(status, nil, 0o644); err != nil {
		return err
	}
	args := []string{
		"install", "-y", "--download-only", "--no-install-recommends",
		"-o", "Dir::State::status=" + status,
		"-o", "Dir::Cache::archives=" + archives,
		"-o", "Debug::NoLocking=true",
	}
	if err := aptGet(ctx, "", append(args, packages...)...); err != nil {
		return err
	}
	return unpackAll(ctx, archives, root)
}

// unpackExactly unpacks just the named packages into root.
func unpackExactly(ctx context.Context, dir, root string, packages []string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := aptGet(ctx, dir, append([]string{"download"}, packages...)...); err != nil {
		return err
	}
	return unpackAll(ctx, dir, root)
}

func unpackAll(ctx context.Context, archives, root string) error {
	debs, err := filepath.Glob(filepath.Join(archives, "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) == 0 {
		return fmt.Errorf("apt-get left no package in %s", archives)
	}
	for _, deb := range debs {
		if out, err := exec.CommandContext(ctx, "dpkg", "-x", deb, root).CombinedOutput(); err != nil {
			return fmt.Errorf("unpack %s: %w\n%s", filepath.Base(deb), err, tail(out, 5))
		}
	}
	return nil
}

var kernelImage = regexp.MustCompile(`(?m)^\s*\|?Depends: (linux-image-[0-9]\S*)$`)

// kernelPackages names the concrete packages behind the distribution's stock
// kernel: the image and, where they are packaged apart, its modules.
func kernelPackages(ctx context.Context) ([]string, error) {
	for _, meta := range []string{"linux-image-amd64", "linux-image-generic"} {
		out, err := aptCache(ctx, "depends", meta)
		if err != nil {
			continue
		}
		image := kernelImage.FindSubmatch(out)
		if image == nil {
			continue
		}
		version := strings.TrimPrefix(string(image[1]), "linux-image-")
		packages := []string{string(image[1])}
		for _, prefix := range []string{"linux-modules-", "linux-modules-extra-"} {
			if _, err := aptCache(ctx, "show", prefix+version); err == nil {
				packages = append(packages, prefix+version)
			}
		}
		return packages, nil
	}
	return nil, errors.New("no stock kernel package (linux-image-amd64 or linux-image-generic) in the package lists")
}

func aptCache(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "apt-cache", args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("apt-cache %s: %w", strings.Join(args, " "), err)
	}
	return out, nil
}

// tail keeps the last lines of a program's output, for an error message.
func tail(out []byte, lines int) []byte {
	split := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	if len(split) > lines {
		split = split[len(split)-lines:]
	}
	return bytes.Join(split, []byte("\n"))
}
