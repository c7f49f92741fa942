package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/hack/debian"
)

// packages are iptables with both back ends, nft for node ports on the loopback
// address, and modprobe for the node's modules in /lib/modules.
var packages = []string{"iptables", "nftables", "kmod"}

// unused lists what nothing in the image reads: documentation except copyrights, files
// for other programs, and plugins that libraries do not load by default.
var unused = []string{
	"etc/init.d", "lib/systemd", "usr/lib/*/engines-3", "usr/lib/*/gconv", "usr/lib/*/ossl-modules",
	"usr/sbin/ip*tables-apply", "usr/share/bash-completion", "usr/share/initramfs-tools",
	"usr/share/lintian", "usr/share/man", "usr/share/doc/*/[^c]*", "usr/share/doc/*/c[^o]*", "usr/share/doc/*/con*",
}

// packageRoot unpacks the packages of an architecture. Existing files are kept; remove
// the cache to get newer ones.
func packageRoot(ctx context.Context, cache, architecture string) (string, error) {
	key, err := packagesKey()
	if err != nil {
		return "", err
	}
	if cache, err = filepath.Abs(cache); err != nil { // apt resolves relative paths differently
		return "", err
	}
	root := filepath.Join(cache, architecture+"-"+key)
	if _, err := os.Stat(root); !errors.Is(err, fs.ErrNotExist) {
		return root, err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(cache, "build-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	unpacked := filepath.Join(work, "root")
	if err := debian.UnpackFor(ctx, architecture, work, unpacked, packages...); err != nil {
		return "", err
	}
	if err := recordPackages(ctx, filepath.Join(work, "archives"), unpacked); err != nil {
		return "", err
	}
	if err := finish(unpacked); err != nil {
		return "", err
	}
	return root, os.Rename(unpacked, root)
}

// recordPackages records the image's packages where scanners look in images without a
// package manager: one file each in var/lib/dpkg/status.d, and etc/os-release.
func recordPackages(ctx context.Context, archives, root string) error {
	debs, err := filepath.Glob(filepath.Join(archives, "*.deb"))
	if err != nil {
		return err
	}
	status := filepath.Join(root, "var/lib/dpkg/status.d")
	if err := errors.Join(os.MkdirAll(status, 0o755), os.MkdirAll(filepath.Join(root, "etc"), 0o755)); err != nil {
		return err
	}
	for _, deb := range debs {
		control, err := exec.CommandContext(ctx, "dpkg-deb", "--field", deb).Output()
		if err != nil {
			return fmt.Errorf("dpkg-deb --field %s: %w", filepath.Base(deb), err)
		}
		name, _, _ := strings.Cut(filepath.Base(deb), "_")
		if err := os.WriteFile(filepath.Join(status, name), control, 0o644); err != nil {
			return err
		}
	}
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, "etc/os-release"), release, 0o644)
}

// packagesKey returns a hash of everything that selects the packages.
func packagesKey() (string, error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", fmt.Errorf("which distribution is this: %w", err)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "recorded %q %q %q %s", packages, unused, programs, release))
	return hex.EncodeToString(sum[:])[:12], nil
}

// programs must exist: iptables with both back ends. kube-ipvs uses the back end of the
// node.
var programs = func() []string {
	var out []string
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, variant := range []string{"-nft", "-legacy"} {
			for _, action := range []string{"", "-save", "-restore"} {
				out = append(out, family+variant+action)
			}
		}
	}
	return out
}()

// finish removes unused files, checks that all programs exist, and links the plain
// names to nft, as the distribution does, for sysdump and for people. kube-ipvs itself
// uses the names of the back ends. Scripts of the packages are not run, because they
// would need a shell of the architecture.
func finish(root string) error {
	for _, pattern := range unused {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return err
		}
		for _, path := range found {
			if err := os.RemoveAll(path); err != nil {
				return err
			}
		}
	}
	for _, name := range programs {
		if _, err := os.Lstat(filepath.Join(root, "usr/sbin", name)); err != nil {
			return err
		}
		plain := strings.Replace(name, "-nft", "", 1)
		if plain == name {
			continue
		}
		if err := os.Symlink(name, filepath.Join(root, "usr/sbin", plain)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}
