// Command debian unpacks the Debian packages of the neighbours, with their dependencies,
// into a directory that a guest uses as a root file system.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kube-ipvs/kube-ipvs/hack/debian"
)

// packages are the neighbours. The firewalls are Python programs.
var packages = []string{"systemd", "keepalived", "firewalld", "ufw", "dbus-daemon", "iptables", "nftables", "ipset", "ipvsadm", "iproute2", "kmod",
	"coreutils", "dash", "grep", "mawk", "procps", "sed"}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "debian:", err)
		os.Exit(1)
	}
}

// run unpacks into a temporary directory, so that an interrupted run does not look
// complete.
func run(root string) error {
	work, err := os.MkdirTemp(filepath.Dir(root), "debian-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	unpacked := filepath.Join(work, "root")
	if err := debian.Unpack(context.Background(), work, unpacked, packages...); err != nil {
		return err
	}
	return os.Rename(unpacked, root)
}
