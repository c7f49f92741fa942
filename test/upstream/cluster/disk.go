package cluster

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/vm"
)

//go:embed node-init.sh
var nodeInit []byte

//go:embed kubelet.yaml
var kubeletConfig []byte

//go:embed containerd.toml
var containerdConfig string

// nodePackages are the packages of a node besides its kubelet.
var nodePackages = []string{
	"bash", "busybox-static", "conntrack", "containerd", "containernetworking-plugins", "coreutils", "dash",
	"dropbear-bin", "e2fsprogs", "ethtool", "grep", "hostname", "iproute2", "iptables", "kmod", "mount", "netbase", "nftables", "procps",
	"runc", "sed", "socat", "util-linux",
}

// diskSize is much larger than the content: the file is sparse.
const diskSize = "8G"

// ensureDisk returns a node's disk with the imported images, building it if the cache has
// none for the current inputs.
func (c *Config) ensureDisk(ctx context.Context, lab *vm.Lab, dir string) (string, error) {
	images, err := judgedImages(ctx, c.programs())
	if err != nil {
		return "", err
	}
	archives, err := buildAll(ctx, dir, images)
	if err != nil {
		return "", err
	}
	pause := imageNamed(images, "pause")
	containerd := strings.ReplaceAll(containerdConfig, "PAUSE", pause)
	kubelet := filepath.Join(c.programs(), "kubelet")
	key, err := digest([]string{kubelet}, append(slices.Clone(nodePackages),
		string(nodeInit), string(kubeletConfig), containerd, baseNames(archives), imageFormat)...)
	if err != nil {
		return "", err
	}
	disk := filepath.Join(dir, "node-"+key+".ext4")
	if _, err := os.Stat(disk); err == nil {
		return disk, nil
	}
	c.Log("building a node's disk")
	work, err := os.MkdirTemp(dir, "disk-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	built := filepath.Join(work, "disk")
	if err := c.buildDisk(ctx, work, built, containerd); err != nil {
		return "", fmt.Errorf("build a node's disk: %w", err)
	}
	if err := c.importImages(ctx, lab, work, built, archives); err != nil {
		return "", fmt.Errorf("import the images: %w", err)
	}
	return disk, os.Rename(built, disk)
}

func buildAll(ctx context.Context, dir string, images map[string]recipe) (archives []string, err error) {
	for name, recipe := range images {
		archive, err := recipe.build(ctx, dir, name)
		if err != nil {
			return nil, err
		}
		archives = append(archives, archive)
	}
	slices.Sort(archives)
	return archives, nil
}

// baseNames joins the names of archives, which contain a digest of their content, so that
// a disk has the same key in a copy of the cache.
func baseNames(archives []string) string {
	var names []string
	for _, archive := range archives {
		names = append(names, filepath.Base(archive))
	}
	return strings.Join(names, " ")
}

// imageNamed returns the first of the images with a name, of any version.
func imageNamed(images map[string]recipe, short string) string {
	for _, name := range slices.Sorted(maps.Keys(images)) {
		if shortName(name) == short {
			return name
		}
	}
	return ""
}

func (c *Config) buildDisk(ctx context.Context, work, disk, containerd string) error {
	root := filepath.Join(work, "root")
	node := recipe{
		packages: nodePackages,
		programs: map[string]string{"usr/bin/kubelet": filepath.Join(c.programs(), "kubelet")},
		links:    iptablesLinks(),
		files: map[string]string{
			"usr/sbin/init": string(nodeInit), "etc/kubelet.yaml": string(kubeletConfig),
			"etc/containerd/config.toml": containerd, "etc/resolv.conf": "nameserver 127.0.0.1\n",
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\n", "etc/group": "root:x:0:\n",
			// The tests that delete a node's rules use sudo as root.
			"usr/bin/sudo": "#!/bin/sh\nexec \"$@\"\n",
			"etc/hosts":    "127.0.0.1 localhost\n::1 localhost\n", "etc/os-release": "NAME=kube-ipvs-lab\nID=debian\n",
		},
	}
	node.links["usr/bin/sh"], node.links["var/run"] = "dash", "/run"
	node.dirs = strings.Fields("dev proc sys run mnt node root/.ssh etc/dropbear var/log var/lib/kubelet etc/cni/net.d usr/lib/modules")
	if err := node.fill(ctx, work, root); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-d", root, "-m", "0", "-O", "^has_journal", disk, diskSize).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mkfs.ext4: %w: %s", err, out)
	}
	return nil
}

// importLimit is long enough for an emulated node on a busy machine.
const importLimit = 15 * time.Minute

// importImages boots a node that only unpacks the images to its disk: once, instead of at
// each start.
func (c *Config) importImages(ctx context.Context, lab *vm.Lab, work, disk string, archives []string) error {
	ctx, cancel := context.WithTimeout(ctx, importLimit)
	defer cancel()
	share := filepath.Join(work, "share")
	for _, archive := range archives {
		content, err := os.ReadFile(archive)
		if err != nil {
			return err
		}
		if err := write(share, filepath.Join("images", filepath.Base(archive)), content, 0o644); err != nil {
			return err
		}
	}
	if err := write(share, "env", []byte("NAME=import\nIMPORT=only\n"), 0o644); err != nil {
		return err
	}
	console := filepath.Join(work, "console")
	if err := run(lab.Command(ctx, vm.Machine{
		Disk: disk, Keep: true, Shares: map[string]string{"node": share}, Memory: nodeMemory, Console: console,
	})); err != nil {
		return withEndOf(console, err)
	}
	if _, err := os.Stat(filepath.Join(share, "imported")); err != nil {
		return withEndOf(filepath.Join(share, "import.log"), withEndOf(console, err))
	}
	return nil
}
