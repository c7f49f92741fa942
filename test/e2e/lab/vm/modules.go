package vm

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/hack/debian"
)

// wantedModules are the parts of the kernel's module tree that a node may need. They
// include whole directories of netfilter, so that no match, target or set type is
// missing. Their dependencies are added.
var wantedModules = []string{
	"arch/x86/crypto/crc32",
	"crypto/crc32", "crypto/hmac", "crypto/sha1", "crypto/sha256", "crypto/cmac",
	"drivers/block/virtio_blk", "drivers/char/virtio_console", "drivers/char/hw_random/virtio-rng",
	"drivers/net/bonding/", "drivers/net/dummy", "drivers/net/ifb", "drivers/net/ipvlan/",
	"drivers/net/macvlan", "drivers/net/nlmon", "drivers/net/tun", "drivers/net/veth", "drivers/net/virtio_net",
	"drivers/net/vrf", "drivers/net/vxlan",
	"drivers/virtio/",
	"fs/9p/", "fs/ext4/", "fs/overlayfs/",
	"net/802/", "net/8021q/", "net/9p/", "net/bridge/", "net/ipv4/", "net/ipv6/", "net/llc/",
	"net/netfilter/", "net/netlink/", "net/packet/", "net/sched/", "net/sctp/", "net/xfrm/",
}

// stageModules copies the wanted modules and their dependencies from the unpacked kernel
// packages into the image's tree. It returns the kernel's release.
func stageModules(ctx context.Context, unpacked, stage string) (release string, err error) {
	base, err := moduleBase(unpacked)
	if err != nil {
		return "", err
	}
	release = filepath.Base(base)
	if err := depmod(ctx, filepath.Dir(filepath.Dir(filepath.Dir(base))), release); err != nil {
		return "", err
	}
	dependencies, err := readDependencies(filepath.Join(base, "modules.dep"))
	if err != nil {
		return "", err
	}
	target := filepath.Join(stage, "usr/lib/modules", release)
	for module := range withDependencies(dependencies, isWanted) {
		if err := copyFile(filepath.Join(base, module), filepath.Join(target, module)); err != nil {
			return "", err
		}
	}
	for _, list := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		if err := copyFile(filepath.Join(base, list), filepath.Join(target, list)); err != nil {
			return "", err
		}
	}
	return release, depmod(ctx, stage, release)
}

// moduleBase finds the one lib/modules/RELEASE directory of the kernel
// packages, which may or may not use the merged /usr.
func moduleBase(unpacked string) (string, error) {
	for _, pattern := range []string{"lib/modules/*/kernel", "usr/lib/modules/*/kernel"} {
		found, err := filepath.Glob(filepath.Join(unpacked, pattern))
		if err != nil {
			return "", err
		}
		if len(found) == 1 {
			return filepath.Dir(found[0]), nil
		}
	}
	return "", fmt.Errorf("the kernel packages in %s hold no module tree", unpacked)
}

func depmod(ctx context.Context, base, release string) error {
	program, err := lookTool("depmod")
	if err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, program, "-b", base, release).CombinedOutput(); err != nil {
		return fmt.Errorf("depmod: %w\n%s", err, debian.Tail(out, 5))
	}
	return nil
}

// readDependencies parses modules.dep: "module: dependency dependency…".
func readDependencies(path string) (map[string][]string, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	dependencies := map[string][]string{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		module, rest, ok := strings.Cut(lines.Text(), ":")
		if !ok {
			return nil, fmt.Errorf("%s: no module in %q", path, lines.Text())
		}
		dependencies[module] = strings.Fields(rest)
	}
	return dependencies, lines.Err()
}

func isWanted(module string) bool {
	module = strings.TrimPrefix(module, "kernel/")
	for _, prefix := range wantedModules {
		if strings.HasPrefix(module, prefix) {
			return true
		}
	}
	return false
}

// withDependencies returns the wanted modules with all of their dependencies. modules.dep
// lists dependencies recursively, so one step suffices.
func withDependencies(dependencies map[string][]string, wanted func(string) bool) map[string]bool {
	closure := map[string]bool{}
	for module, needs := range dependencies {
		if !wanted(module) {
			continue
		}
		closure[module] = true
		for _, need := range needs {
			closure[need] = true
		}
	}
	return closure
}
