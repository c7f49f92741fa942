package vm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/hack/debian"
)

// hostTool is a program that the machine itself needs, with its packages.
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
	// nodeTools are the tools that nodes need on the machine's own kernel.
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

// InstallDependencies installs missing packages for building, testing and running the
// lab's VM.
func InstallDependencies(ctx context.Context, log Logf) error {
	return ensureTools(ctx, log, append(raceTools[:len(raceTools):len(raceTools)], vmTools...))
}

// ensureTools installs the packages of missing tools. It fails if the caller may not
// install them.
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
	return debian.Get(ctx, "", args...)
}

// lookTool finds a program in root's PATH, which includes the sbin directories.
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

var kernelImage = regexp.MustCompile(`(?m)^\s*\|?Depends: (linux-image-[0-9]\S*)$`)

// kernelPackages names the concrete packages behind a kernel's: the image and, where
// they are packaged apart, its modules. Without a name it is the distribution's stock
// kernel.
func kernelPackages(ctx context.Context, name string) ([]string, error) {
	names := []string{name}
	if name == "" {
		names = []string{"linux-image-amd64", "linux-image-generic"}
	}
	for _, meta := range names {
		out, err := debian.Cache(ctx, "depends", meta)
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
			if _, err := debian.Cache(ctx, "show", prefix+version); err == nil {
				packages = append(packages, prefix+version)
			}
		}
		return packages, nil
	}
	return nil, fmt.Errorf("no kernel package %s in the package lists (apt-get update?)", strings.Join(names, " or "))
}
