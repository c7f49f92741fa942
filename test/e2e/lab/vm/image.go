package vm

import (
	"bufio"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kube-ipvs/kube-ipvs/hack/debian"
)

// Logf reports progress.
type Logf func(format string, args ...any)

// imageFormat is part of an image's key: raise it when the code that builds the
// image changes its result.
const imageFormat = "3"

//go:embed init.sh
var initScript []byte

// guestTools are the image's programs besides busybox's.
var guestTools = []string{
	"bridge", "conntrack", "curl", "dash", "ethtool", "ip", "ipset", "ipvsadm", "ipvsadm-restore",
	"ipvsadm-save", "kmod", "depmod", "insmod", "lsmod", "modinfo", "modprobe", "rmmod", "nft", "ss", "tc", "tcpdump",
	"xtables-legacy-multi", "xtables-nft-multi",
}

// guestTrees are directories that programs read at run time.
var guestTrees = []string{"etc/iproute2", "etc/protocols", "etc/services", "usr/share/iproute2", "usr/lib/tc"}

// image is a kernel and the initial file system to boot it with.
type image struct {
	kernel, initrd string
	// shares reports whether the kernel can mount the host's shares.
	shares bool
}

// ensureImage returns the image, building it if the cache has none for the current
// inputs. An image has the packages of the day on which it was built; remove the cache to
// update them.
func ensureImage(ctx context.Context, cache, kernel string, log Logf) (*image, error) {
	key, err := imageKey(kernel)
	if err != nil {
		return nil, err
	}
	images := filepath.Join(cache, "image")
	if err := os.MkdirAll(images, 0o755); err != nil {
		return nil, err
	}
	unlock, err := lockFile(filepath.Join(images, "lock"))
	if err != nil {
		return nil, err
	}
	defer unlock()

	dir := filepath.Join(images, key)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		if err := buildImage(ctx, kernel, images, dir, log); err != nil {
			return nil, fmt.Errorf("build the guest image: %w", err)
		}
	}
	_, err = os.Stat(filepath.Join(dir, withoutShares))
	return &image{kernel: filepath.Join(dir, "vmlinuz"), initrd: filepath.Join(dir, "initrd"), shares: err != nil}, nil
}

// withoutShares is a file beside an image whose kernel has no 9p, such as distributions'
// kernels for clouds.
const withoutShares = "without-9p"

// imageKey hashes the inputs of the image: this package's lists and init script, the
// distribution's release, and the kernel's name if it is not the stock one.
func imageKey(kernel string) (string, error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", fmt.Errorf("which distribution is this: %w", err)
	}
	hash := sha256.New()
	for _, list := range [][]string{guestPackages, guestTools, guestTrees, wantedModules} {
		fmt.Fprintf(hash, "%q\n", list)
	}
	fmt.Fprintf(hash, "%s\n%s\n%s%s", imageFormat, release, initScript, kernel)
	return hex.EncodeToString(hash.Sum(nil))[:12], nil
}

// lockFile serializes the runners that share a cache.
func lockFile(path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		file.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { file.Close() }, nil
}

// buildImage builds the image in a temporary directory and moves it into place, so that
// an interrupted build leaves no incomplete image.
func buildImage(ctx context.Context, kernel, images, dir string, log Logf) error {
	begin := time.Now()
	log("building the guest image")
	if err := ensureTools(ctx, log, vmTools); err != nil {
		return err
	}
	work, err := os.MkdirTemp(images, "build-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)

	stage, result := filepath.Join(work, "stage"), filepath.Join(work, "result")
	if err := os.Mkdir(result, 0o755); err != nil {
		return err
	}
	if err := stageUserland(ctx, filepath.Join(work, "userland"), stage); err != nil {
		return err
	}
	if err := stageKernel(ctx, kernel, filepath.Join(work, "kernel"), stage, result); err != nil {
		return err
	}
	if err := packInitrd(stage, filepath.Join(result, "initrd")); err != nil {
		return err
	}
	log("built the guest image in %.0f s", time.Since(begin).Seconds())
	return os.Rename(result, dir)
}

// packInitrd does not compress the archive: an emulated processor takes longer to unpack
// it than QEMU takes to copy the difference.
func packInitrd(stage, path string) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	buffered := bufio.NewWriter(file)
	if err := writeCPIO(buffered, stage); err != nil {
		return err
	}
	if err := buffered.Flush(); err != nil {
		return err
	}
	return file.Close()
}

func stageKernel(ctx context.Context, kernel, work, stage, result string) error {
	packages, err := kernelPackages(ctx, kernel)
	if err != nil {
		return err
	}
	root := filepath.Join(work, "root")
	if err := debian.UnpackExactly(ctx, filepath.Join(work, "archives"), root, packages...); err != nil {
		return err
	}
	release, err := stageModules(ctx, root, stage)
	if err != nil {
		return err
	}
	if found, err := filepath.Glob(filepath.Join(stage, "usr/lib/modules", release, "kernel/fs/9p/*")); err == nil && len(found) == 0 {
		if err := os.WriteFile(filepath.Join(result, withoutShares), nil, 0o644); err != nil {
			return err
		}
	}
	return copyFile(filepath.Join(root, "boot/vmlinuz-"+release), filepath.Join(result, "vmlinuz"))
}

// stageUserland fills the guest's file system: one directory of programs, one
// of libraries, under every name by which they are looked for.
func stageUserland(ctx context.Context, work, stage string) error {
	root := filepath.Join(work, "root")
	if err := debian.Unpack(ctx, work, root, guestPackages...); err != nil {
		return err
	}
	if err := makeSkeleton(stage); err != nil {
		return err
	}
	if err := stageTools(root, stage); err != nil {
		return err
	}
	if err := stageBusybox(ctx, root, stage); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(stage, "init"), initScript, 0o755)
}

func makeSkeleton(stage string) error {
	for _, dir := range []string{
		"dev", "etc", "mnt", "proc", "root", "run", "src", "cache", "out", "sys", "tmp",
		"usr/bin", "usr/lib", "var/lib", "var/log",
	} {
		if err := os.MkdirAll(filepath.Join(stage, dir), 0o755); err != nil {
			return err
		}
	}
	for link, target := range map[string]string{
		"bin": "usr/bin", "sbin": "usr/bin", "usr/sbin": "bin",
		"lib": "usr/lib", "lib64": "usr/lib", "usr/lib64": "lib", "usr/lib/x86_64-linux-gnu": ".",
		"var/run": "/run",
		// Busybox's shell would run busybox's ip in place of the real one.
		"usr/bin/sh": "dash",
	} {
		if err := os.Symlink(target, filepath.Join(stage, link)); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(stage, "etc/passwd"), []byte("root:x:0:0:root:/root:/bin/sh\n"), 0o644)
}

// programDirs are the directories in which packages install programs. If one links to the
// other, bin is the real one.
var programDirs = []string{"usr/bin", "bin", "usr/sbin", "sbin"}

func stageTools(root, stage string) error {
	var binaries []string
	for _, tool := range guestTools {
		path, err := findIn(root, programDirs, tool)
		if err != nil {
			return err
		}
		target := filepath.Join(stage, "usr/bin", tool)
		if link, err := os.Readlink(path); err == nil {
			if err := os.Symlink(filepath.Base(link), target); err != nil {
				return err
			}
			continue
		}
		if err := copyFile(path, target); err != nil {
			return err
		}
		binaries = append(binaries, path)
	}
	plugins, err := stageXtables(root, stage)
	if err != nil {
		return err
	}
	if err := stageTrees(root, stage); err != nil {
		return err
	}
	return stageLibraries(root, stage, append(binaries, plugins...))
}

func stageLibraries(root, stage string, binaries []string) error {
	libraries, err := neededLibraries(root, binaries)
	if err != nil {
		return err
	}
	for name, path := range libraries {
		if err := copyFile(path, filepath.Join(stage, "usr/lib", name)); err != nil {
			return err
		}
	}
	return nil
}

// stageXtables copies the iptables plugins and creates the names of the two multi-call
// binaries, as the package's installation would: plain iptables is the nft variant, as in
// the distribution.
func stageXtables(root, stage string) (plugins []string, err error) {
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, action := range []string{"", "-save", "-restore"} {
			for infix, binary := range map[string]string{
				"": "xtables-nft-multi", "-nft": "xtables-nft-multi", "-legacy": "xtables-legacy-multi",
			} {
				if err := os.Symlink(binary, filepath.Join(stage, "usr/bin", family+infix+action)); err != nil {
					return nil, err
				}
			}
		}
	}
	plugins, err = filepath.Glob(filepath.Join(root, "usr/lib/x86_64-linux-gnu/xtables/*.so"))
	if err != nil {
		return nil, err
	}
	if len(plugins) == 0 {
		return nil, errors.New("the iptables package holds no plugins")
	}
	for _, plugin := range plugins {
		target := filepath.Join(stage, "usr/lib/xtables", filepath.Base(plugin))
		if err := copyFile(plugin, target); err != nil {
			return nil, err
		}
	}
	return plugins, nil
}

// stageTrees copies the run-time directories that exist in this distribution.
func stageTrees(root, stage string) error {
	for _, tree := range guestTrees {
		err := filepath.WalkDir(filepath.Join(root, tree), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			return copyFile(path, filepath.Join(stage, name))
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// stageBusybox adds busybox, and a link for each of its programs that has no other
// version in the image.
func stageBusybox(ctx context.Context, root, stage string) error {
	busybox, err := findIn(root, programDirs, "busybox")
	if err != nil {
		return err
	}
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox --list: %w", err)
	}
	bin := filepath.Join(stage, "usr/bin")
	if err := copyFile(busybox, filepath.Join(bin, "busybox")); err != nil {
		return err
	}
	for _, applet := range strings.Fields(string(applets)) {
		err := os.Symlink("busybox", filepath.Join(bin, applet))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// copyFile copies a file's content and permissions, following links and making
// directories as needed.
func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	target, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, info.Mode().Perm())
	if err != nil {
		return err
	}
	defer target.Close()
	if _, err := io.Copy(target, source); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	return target.Close()
}
