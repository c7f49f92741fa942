package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"time"
)

// hostAddress is where a command in the lab reaches a server that listens on
// the machine's loopback address.
const hostAddress = "10.0.2.2"

// Way is how a command gets its kernel.
type Way string

const (
	// Host is the machine's own kernel, in fresh namespaces.
	Host Way = "host"
	// KVM is a guest on the machine's processor.
	KVM Way = "kvm"
	// TCG is an emulated guest: slow, but it runs anywhere.
	TCG Way = "tcg"
)

// Config says what to run and where.
type Config struct {
	// Source is the checkout, seen by the command as its working directory. In a
	// guest it can be written to, but the writing stays there.
	Source string
	// Cache holds images and built programs between runs.
	Cache string
	// Out is a directory that the command finds in $LAB_OUT, for what it wants
	// to leave behind.
	Out string
	// Way forces a way; if empty, the best that works is found.
	Way Way
	// Memory is a guest's, in QEMU's notation.
	Memory string
	// Env is added to the command's environment.
	Env map[string]string
	// Command is the program with its arguments.
	Command []string
	// Stdout gets what the command writes, errors included.
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
	if lab.way == "" && hostIsNode(ctx) == nil {
		lab.way = Host
	}
	if lab.way == Host {
		return lab, ensureTools(ctx, config.Log, nodeTools)
	}
	if err := ensureTools(ctx, config.Log, vmTools); err != nil {
		return nil, err
	}
	var err error
	if lab.image, err = ensureImage(ctx, config.Cache, config.Log); err != nil {
		return nil, err
	}
	if lab.way == "" {
		lab.way = TCG
		if lab.kvmBoots(ctx) {
			lab.way = KVM
		}
	}
	return lab, nil
}

// SetOut sets the output directory, if Config did not.
func (l *Lab) SetOut(dir string) { l.config.Out = dir }

// OwnFiles are those that a run leaves in the output directory by itself.
var OwnFiles = []string{"run", "rc", "console.log"}

// Way is how commands are run.
func (l *Lab) Way() Way { return l.way }

// Run runs the command and returns its exit code. An error means that there is
// none, because the lab failed or ctx ended. extra is added to the environment.
func (l *Lab) Run(ctx context.Context, extra map[string]string) (exitCode int, err error) {
	env := maps.Clone(l.config.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, extra)
	env["LAB"] = string(l.way)
	if l.way == Host {
		env["LAB_SRC"], env["LAB_CACHE"], env["LAB_OUT"] = l.config.Source, l.config.Cache, l.config.Out
		script := filepath.Join(l.config.Out, "run")
		if err := os.WriteFile(script, runScript(l.config.Source, env, l.config.Command), 0o755); err != nil {
			return 0, err
		}
		return runInNamespaces(ctx, script, l.config.Stdout)
	}
	env["LAB_SRC"], env["LAB_CACHE"], env["LAB_OUT"] = guestSource, guestCache, guestOut
	return l.guest(l.way, l.config.Out, l.config.Stdout).runScript(ctx, runScript(guestSource, env, l.config.Command))
}

func (l *Lab) guest(way Way, out string, stdout io.Writer) *guest {
	accel := "tcg,thread=multi"
	if way == KVM {
		accel = "kvm"
	}
	return &guest{
		image: l.image, accel: accel, memory: l.config.Memory, stdout: stdout,
		source: l.config.Source, cache: l.config.Cache, out: out,
	}
}

func (g *guest) runScript(ctx context.Context, script []byte) (exitCode int, err error) {
	if err := os.WriteFile(filepath.Join(g.out, "run"), script, 0o755); err != nil {
		return 0, err
	}
	return g.run(ctx)
}

// kvmProbeLimit is generous for a boot that takes a second or two where KVM
// works. Where it does not, the guest hangs rather than fails.
const kvmProbeLimit = 15 * time.Second

// kvmBoots tries a guest with KVM. The answer is kept in the cache, under the
// machine's kernel and the image.
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
	question := fmt.Sprintf("%s%s\n", machine, l.image.key)
	for _, answer := range []bool{true, false} {
		if text, err := os.ReadFile(known); err == nil && string(text) == fmt.Sprint(question, answer, "\n") {
			return answer
		}
	}
	l.config.Log("probing KVM, for at most %s", kvmProbeLimit)
	err = l.probe(ctx, KVM)
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		l.config.Log("KVM does not boot the guest (%.80s): emulating", err)
	}
	// A probe whose answer cannot be kept is only made again.
	_ = os.WriteFile(known, fmt.Append(nil, question, err == nil, "\n"), 0o644)
	return err == nil
}

func (l *Lab) probe(ctx context.Context, way Way) error {
	ctx, cancel := context.WithTimeoutCause(ctx, kvmProbeLimit, errors.New("timed out"))
	defer cancel()
	out, err := os.MkdirTemp(l.config.Cache, "probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(out)
	code, err := l.guest(way, out, io.Discard).runScript(ctx, runScript("/", nil, []string{"true"}))
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d", code)
	}
	return err
}
