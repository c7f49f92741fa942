// Package debian extracts files from the distribution's packages without installing
// them, for the lab's guest and for the container image.
package debian

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Get runs apt-get in dir. Missing or outdated package lists show as a failure, so it
// retries once after `apt-get update`.
func Get(ctx context.Context, dir string, args ...string) error {
	return lists{root: true}.get(ctx, dir, args...)
}

// lists are package lists: those of the machine, which only root may update, or others.
type lists struct {
	root    bool
	options []string
}

func (l lists) get(ctx context.Context, dir string, args ...string) error {
	first := l.apt(ctx, dir, args...)
	if first == nil {
		return nil
	}
	if l.root && os.Geteuid() != 0 {
		return fmt.Errorf("%w (as root, the package lists would be updated and this tried again)", first)
	}
	// An unreachable repository may not be the one that is needed.
	update := l.apt(ctx, "", "update")
	if second := l.apt(ctx, dir, args...); second != nil {
		return errors.Join(second, update)
	}
	return nil
}

func (l lists) apt(ctx context.Context, dir string, args ...string) error {
	args = append(append([]string{"-q", "-o", "APT::Sandbox::User=root"}, l.options...), args...)
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, Tail(out, 20))
	}
	return nil
}

// Unpack unpacks the packages and all their dependencies into root, downloading to dir.
// An empty dpkg status file makes apt resolve dependencies as if nothing were
// installed, so the result does not depend on the machine.
func Unpack(ctx context.Context, dir, root string, packages ...string) error {
	return unpack(ctx, lists{root: true}, dir, root, packages)
}

// UnpackFor is like Unpack for an architecture, such as arm64. If that is not the
// machine's, its package lists are kept in dir; the machine's repositories must provide
// it.
func UnpackFor(ctx context.Context, architecture, dir, root string, packages ...string) error {
	if here, err := exec.CommandContext(ctx, "dpkg", "--print-architecture").Output(); err == nil && strings.TrimSpace(string(here)) == architecture {
		return Unpack(ctx, dir, root, packages...)
	}
	own := filepath.Join(dir, "lists")
	if err := os.MkdirAll(filepath.Join(own, "partial"), 0o755); err != nil {
		return err
	}
	return unpack(ctx, lists{options: []string{
		"-o", "APT::Architecture=" + architecture, "-o", "APT::Architectures=" + architecture,
		"-o", "Dir::State::lists=" + own, "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
		"-o", "Debug::NoLocking=true", "-o", "Acquire::Languages=none",
	}}, dir, root, packages)
}

func unpack(ctx context.Context, from lists, dir, root string, packages []string) error {
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
	if err := from.get(ctx, "", append(args, packages...)...); err != nil {
		return err
	}
	return unpackAll(ctx, archives, root)
}

// UnpackExactly unpacks only the named packages into root.
func UnpackExactly(ctx context.Context, dir, root string, packages ...string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := Get(ctx, dir, append([]string{"download"}, packages...)...); err != nil {
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
			return fmt.Errorf("unpack %s: %w\n%s", filepath.Base(deb), err, Tail(out, 5))
		}
	}
	return nil
}

// Cache runs apt-cache.
func Cache(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "apt-cache", args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("apt-cache %s: %w", strings.Join(args, " "), err)
	}
	return out, nil
}

// Tail returns the last lines of a program's output, for an error message.
func Tail(out []byte, lines int) []byte {
	split := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	if len(split) > lines {
		split = split[len(split)-lines:]
	}
	return bytes.Join(split, []byte("\n"))
}
