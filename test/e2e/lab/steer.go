package lab

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// steer makes one processor process all packets of a flow that an interface receives, as the
// hash of a network card does (receive packet steering). Without it, a veth pair leaves each
// packet to the processor of its sender. On a busy machine a SYN and its retransmission then
// wait on two processors, and are processed at the same time. IPVS creates a connection for
// each, to different real servers, and later packets reach the wrong one, which resets the
// connection. This is a property of the kernel, not of the proxy that is tested.
func (n *Namespace) steer(link string) {
	n.lab.t.Helper()
	if runtime.NumCPU() == 1 {
		return
	}
	n.lab.must(n.writeSysfs("class/net/"+link+"/queues/rx-0/rps_cpus", processorMask(runtime.NumCPU())), "%s: steer packets on %s", n.Name, link)
}

// processorMask is a mask of the first processors, in hexadecimal. It has those that one
// word of the kernel's format holds; more are not needed.
func processorMask(processors int) string {
	return strconv.FormatUint(1<<min(processors, 32)-1, 16)
}

// writeSysfs writes a file of the namespace's own sysfs, which shows its interfaces.
func (n *Namespace) writeSysfs(path, value string) error {
	return n.Do(func() error {
		root, err := mountSysfs()
		if err != nil {
			return err
		}
		defer unix.Close(root)
		fd, err := unix.Openat(root, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: "sysfs: " + path, Err: err}
		}
		file := os.NewFile(uintptr(fd), path)
		_, err = file.WriteString(value)
		return errors.Join(err, file.Close())
	})
}

// mountSysfs returns the root of a sysfs of the current network namespace, which is mounted
// nowhere.
func mountSysfs() (root int, err error) {
	fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open sysfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("create sysfs: %w", err)
	}
	root, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("mount sysfs: %w", err)
	}
	return root, nil
}
