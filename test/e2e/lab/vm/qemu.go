package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/kube-ipvs/kube-ipvs/hack/debian"
)

// guest is one run of a QEMU machine.
type guest struct {
	image *image
	// accel are QEMU's arguments for the accelerator.
	accel []string
	// parameters are added to the kernel's.
	parameters string
	// source and cache are shared read-only; out and shared are writable, and other
	// guests may share them.
	source, cache, out, shared string
	memory                     string
	stdout                     io.Writer
}

// run boots the machine, which runs the script out/run, and returns the
// script's exit code. It fails if the machine ends without having left one: QEMU
// could not start, the guest's kernel panicked, or ctx ended.
func (g *guest) run(ctx context.Context) (exitCode int, err error) {
	console := filepath.Join(g.out, "console.log")
	var files *baked
	if !g.image.shares {
		if files, err = g.bake(); err != nil {
			return 0, fmt.Errorf("put the command into the guest's image: %w", err)
		}
		defer files.remove()
	}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", g.arguments(console)...)
	var complaint strings.Builder
	// QEMU opens /dev/stdout again, which would overwrite a plain file from its
	// beginning. Hiding the type of the writer makes it a pipe.
	cmd.Stdout, cmd.Stderr = struct{ io.Writer }{g.stdout}, &complaint
	// The guest must not outlive its runner, however that ends. Its own process group
	// keeps a Ctrl-C from it, so that the runner handles it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	runErr := runOnLockedThread(cmd)
	if files != nil {
		runErr = errors.Join(runErr, files.fetch(g.out))
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	code, err := readExitCode(filepath.Join(g.out, "rc"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, g.explain(runErr, complaint.String(), console)
	}
	return code, err
}

// norandmaps: an emulator translates code for its address. With random addresses it would
// translate libraries again for each process, and programs would take three times as
// long.
const kernelParameters = "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable norandmaps no_timer_check"

func (g *guest) arguments(console string) []string {
	args := append(hardware(g.accel, g.memory, g.image),
		"-append", kernelParameters+g.parameters,
		"-serial", "file:"+console,
		"-device", "virtio-serial-pci", "-chardev", "file,id=out,path=/dev/stdout",
		"-device", "virtserialport,chardev=out,name=lab.out",
		"-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,romfile=",
	)
	if !g.image.shares {
		return append(args, "-chardev", "file,id=files,path="+filepath.Join(g.out, bakedFiles), "-device", "virtserialport,chardev=files,name=lab.files")
	}
	for _, s := range []struct{ tag, path, options string }{
		{"src", g.source, ",readonly=on"}, {"cache", g.cache, ",readonly=on"}, {"out", g.out, ""}, {"shared", g.shared, ""},
	} {
		args = append(args, share(s.tag, s.path, s.options)...)
	}
	return args
}

// explain turns the end of a machine without an exit code into an error with the end of
// the output of its kernel and QEMU.
func (g *guest) explain(runErr error, complaint, console string) error {
	log, err := os.ReadFile(console)
	if err != nil {
		log = []byte(err.Error())
	}
	if runErr == nil {
		runErr = errors.New("the guest ended")
	}
	if said := strings.TrimSpace(complaint); said != "" {
		runErr = fmt.Errorf("%w: %s", runErr, said)
	}
	return fmt.Errorf("no exit code from the guest: %w\nend of its console:\n%s", runErr, debian.Tail(log, 40))
}

func readExitCode(path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	code, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("exit code in %s: %w", path, err)
	}
	return code, nil
}
