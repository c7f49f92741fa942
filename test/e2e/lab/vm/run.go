package vm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// HostAddress is the address by which a command in the lab reaches a server that listens
// on the machine's loopback address or, without a guest, on any address inside the lab's
// namespaces.
const HostAddress = "10.0.2.2"

// Way is how a command gets its kernel.
type Way string

const (
	// Host uses the machine's own kernel, in new namespaces.
	Host Way = "host"
	// KVM uses a guest on the machine's processor.
	KVM Way = "kvm"
	// TCG uses an emulated guest: slow, but it runs anywhere.
	TCG Way = "tcg"
)

// Config says what to run and where.
type Config struct {
	// Way selects a way; if empty, the best available one.
	Way Way
	// Source is the checkout, the command's working directory. In a guest it is writable,
	// but the changes are lost.
	Source string
	// Cache holds images and built programs between runs.
	Cache string
	// Shared is a directory to which the commands of several labs can write. If empty, it
	// is a run's output directory.
	Shared string
	// Kernel is the package of the guest's kernel, or one that depends on it; if empty,
	// the distribution's stock kernel.
	Kernel string
	// Without are modules that the guest's kernel cannot load.
	Without []string
	// Memory is the guest's, in QEMU's notation.
	Memory string
	// CountInstructions gives an emulated guest one processor and a clock that counts
	// its instructions. The way must be TCG.
	CountInstructions bool
	// CoarseTimers gives an emulated guest timers of 4 ms. With precise ones it spends a
	// sixth of its time on programming them.
	CoarseTimers bool
	// Env is added to the command's environment.
	Env map[string]string
	// Command is the program with its arguments.
	Command []string
	// Stdout gets the command's output, including errors.
	Stdout io.Writer
	// Log reports progress.
	Log Logf
}

// Lab is a place to run a command in.
type Lab struct {
	config Config
	way    Way
	image  *image
}

// Prepare chooses the way and builds what it needs.
func Prepare(ctx context.Context, config Config) (*Lab, error) {
	lab := &Lab{config: config, way: config.Way}
	if lab.way == "" && config.Kernel == "" && config.Without == nil && hostIsNode(ctx) == nil {
		lab.way = Host
	}
	if lab.way == Host {
		return lab, lab.prepareHost(ctx)
	}
	return lab, lab.prepareGuest(ctx)
}

// PrepareGuest is Prepare for guests only, whatever the machine's kernel can do.
func PrepareGuest(ctx context.Context, config Config) (*Lab, error) {
	lab := &Lab{config: config}
	return lab, lab.prepareGuest(ctx)
}

func (l *Lab) prepareHost(ctx context.Context) error {
	if Inside() {
		return setUpNamespaces(ctx)
	}
	return ensureTools(ctx, l.config.Log, nodeTools)
}

func (l *Lab) prepareGuest(ctx context.Context) (err error) {
	if err = ensureTools(ctx, l.config.Log, vmTools); err != nil {
		return err
	}
	if l.image, err = ensureImage(ctx, l.config.Cache, l.config.Kernel, l.config.Log); err != nil {
		return err
	}
	if l.way != "" {
		return nil
	}
	l.way = TCG
	if l.kvmBoots(ctx) {
		l.way = KVM
	}
	return nil
}

// Way is how commands are run.
func (l *Lab) Way() Way { return l.way }

// OwnFiles are files that every run writes to the output directory.
var OwnFiles = []string{"run", "rc", "console.log"}

// Run runs the command with the output directory out, and returns its exit code.
// extra is added to its environment. An error means that there is no exit code,
// because the lab failed or ctx ended.
func (l *Lab) Run(ctx context.Context, out string, extra map[string]string) (exitCode int, err error) {
	env := map[string]string{"LAB": string(l.way)}
	maps.Copy(env, l.config.Env)
	maps.Copy(env, extra)
	dir := guestSource
	env["LAB_SRC"], env["LAB_CACHE"], env["LAB_OUT"] = guestSource, guestCache, l.Visible(out)
	env["LAB_SHARED"] = guestShared
	if l.way == Host {
		dir = l.config.Source
		env["LAB_SRC"], env["LAB_CACHE"] = l.config.Source, l.config.Cache
		env["LAB_SHARED"] = cmp.Or(l.config.Shared, out)
	}
	script := filepath.Join(out, "run")
	if err := os.WriteFile(script, runScript(dir, env, l.config.Without, l.config.Command), 0o755); err != nil {
		return 0, err
	}
	if l.way == Host {
		return runHere(ctx, script, l.config.Stdout)
	}
	return l.guest(l.way, out, l.config.Stdout).run(ctx)
}

// Visible is the path at which the command finds the output directory out.
func (l *Lab) Visible(out string) string {
	if l.way == Host {
		return out
	}
	return guestOut
}

func (l *Lab) guest(way Way, out string, stdout io.Writer) *guest {
	accel, parameters := accelerator(way), ""
	switch {
	case l.config.CountInstructions:
		accel, parameters = counting, countingParameters
	case l.config.CoarseTimers && way == TCG:
		parameters = " highres=off"
	}
	return &guest{
		parameters: parameters,
		image:      l.image, accel: accel, memory: l.config.Memory, stdout: stdout,
		source: l.config.Source, cache: l.config.Cache, out: out, shared: cmp.Or(l.config.Shared, out),
	}
}

// kvmProbeLimit is much longer than the second or two of a boot with KVM. Without KVM,
// the guest hangs rather than fails.
const kvmProbeLimit = 15 * time.Second

// kvmBoots tries a guest with KVM. It caches the result, with the version of the
// machine's kernel for which it is valid.
func (l *Lab) kvmBoots(ctx context.Context) bool {
	if device, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		return false
	} else {
		device.Close()
	}
	machine, err := os.ReadFile("/proc/version")
	if err != nil {
		return false
	}
	known := filepath.Join(l.config.Cache, "kvm")
	if text, err := os.ReadFile(known); err == nil {
		if answer, ok := strings.CutPrefix(string(text), string(machine)); ok {
			return answer == answerYes
		}
	}
	l.config.Log("probing KVM, for at most %s", kvmProbeLimit)
	err = l.probe(ctx, KVM)
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		reason, _, _ := strings.Cut(err.Error(), "\n")
		l.config.Log("KVM does not boot the guest (%s): emulating", reason)
	}
	answer := answerYes
	if err != nil {
		answer = "no\n"
	}
	// A probe whose result cannot be cached is only repeated.
	_ = os.WriteFile(known, append(machine, answer...), 0o644)
	return err == nil
}

const answerYes = "yes\n"

func (l *Lab) probe(ctx context.Context, way Way) error {
	ctx, cancel := context.WithTimeoutCause(ctx, kvmProbeLimit, errors.New("timed out"))
	defer cancel()
	out, err := os.MkdirTemp(l.config.Cache, "probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(out)
	script := runScript("/", nil, nil, []string{"true"})
	if err := os.WriteFile(filepath.Join(out, "run"), script, 0o755); err != nil {
		return err
	}
	code, err := l.guest(way, out, io.Discard).run(ctx)
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d", code)
	}
	return err
}
