package vm

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
)

// Machine is a guest with its own file system and network, which runs until it is
// stopped.
type Machine struct {
	// Disk holds an ext4 file system with usr/sbin/init.
	Disk string
	// Keep keeps changes of the disk; otherwise they are lost.
	Keep bool
	// Tap is the interface behind the machine's eth0; none if empty.
	Tap, MAC string
	// Shares are directories of the host, by the tag with which the machine mounts them
	// by 9p.
	Shares map[string]string
	// Parameters are added to the kernel's.
	Parameters string
	// Memory is in QEMU's notation.
	Memory string
	// Console is the file for the output of kernel and init.
	Console string
}

// Command returns QEMU's command for the machine. It ends with the thread that starts it.
func (l *Lab) Command(ctx context.Context, m Machine) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", l.machineArguments(m)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	return cmd
}

func (l *Lab) machineArguments(m Machine) []string {
	drive := "file=" + m.Disk + ",format=raw,if=virtio,cache=unsafe"
	if !m.Keep {
		drive += ",snapshot=on"
	}
	args := append(l.hardware(m.Memory),
		"-append", kernelParameters+" lab.root=disk "+m.Parameters,
		"-serial", "file:"+m.Console, "-drive", drive,
	)
	if m.Tap != "" {
		args = append(args, "-netdev", "tap,id=n0,ifname="+m.Tap+",script=no,downscript=no",
			"-device", "virtio-net-pci,netdev=n0,romfile=,mac="+m.MAC)
	}
	for tag, path := range m.Shares {
		args = append(args, share(tag, path, "")...)
	}
	return args
}

// hardware returns the arguments that all guests share.
func (l *Lab) hardware(memory string) []string {
	return hardware(accelerator(l.way), memory, l.image)
}

func hardware(accel []string, memory string, image *image) []string {
	return append(accel[:len(accel):len(accel)],
		"-cpu", "max", "-m", memory,
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", image.kernel, "-initrd", image.initrd,
	)
}

// accelerator returns QEMU's arguments for the accelerator and the number of processors.
func accelerator(way Way) []string {
	if way == KVM {
		return []string{"-accel", "kvm", "-smp", "2"}
	}
	return []string{"-accel", "tcg,thread=multi", "-smp", "2"}
}

// counting is accelerator for a guest whose clock counts instructions: it advances by a
// nanosecond with each instruction, and with real time while the processor is idle. With
// sleep=off it would jump to the next timer instead, and everything that waits for a
// server outside the guest would time out immediately. The seed is for RDRAND. The
// connection tables are large enough for a whole run: longer chains would increase later
// figures.
const countingParameters = " ip_vs.conn_tab_bits=18 nf_conntrack.hashsize=262144"

var counting = []string{"-accel", "tcg,thread=single", "-icount", "shift=0,sleep=on", "-smp", "1", "-seed", "1"}

// share returns QEMU's arguments for a directory of the host; options begin with a comma.
func share(tag, path, options string) []string {
	return []string{"-virtfs", fmt.Sprintf("local,path=%s,mount_tag=%s,security_model=none,multidevs=remap%s",
		strings.ReplaceAll(path, ",", ",,"), tag, options)}
}
