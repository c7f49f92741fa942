// Command seccomp writes the filter of system calls that a container runtime gives a
// container with these capabilities by default (seccompProfile RuntimeDefault), as
// the kernel takes it: Docker's profile, which the others follow. It is for amd64.
package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

func main() {
	if err := write(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "seccomp:", err)
		os.Exit(1)
	}
}

func write(capabilities []string) error {
	numbers, err := systemCalls()
	if err != nil {
		return err
	}
	profile, err := seccomp.GetDefaultProfile(&specs.Spec{Process: &specs.Process{
		Capabilities: &specs.LinuxCapabilities{Bounding: capabilities},
	}})
	if err != nil {
		return err
	}
	p, err := compile(profile, numbers)
	if err != nil {
		return err
	}
	return binary.Write(os.Stdout, binary.LittleEndian, p)
}

var constant = regexp.MustCompile(`(?m)^\tSYS_(\w+) += (\d+)$`)

// systemCalls gives their numbers by name. Go's constants have no names when a
// program runs, so they are read from the source.
func systemCalls() (map[string]uint32, error) {
	folder, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		return nil, err
	}
	source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(folder)), "unix", "zsysnum_linux_amd64.go"))
	if err != nil {
		return nil, err
	}
	numbers := map[string]uint32{}
	for _, m := range constant.FindAllStringSubmatch(string(source), -1) {
		n, err := strconv.ParseUint(m[2], 10, 32)
		if err != nil {
			return nil, err
		}
		numbers[strings.ToLower(m[1])] = uint32(n)
	}
	return numbers, nil
}

// Where things are in the kernel's struct seccomp_data.
const (
	numberAt       = 0
	architectureAt = 4
	argumentsAt    = 16
)

// program is a filter, instruction by instruction.
type program []unix.SockFilter

func (p *program) add(code uint16, jumpIf, jumpElse uint8, k uint32) {
	*p = append(*p, unix.SockFilter{Code: code, Jt: jumpIf, Jf: jumpElse, K: k})
}

func (p *program) load(offset uint32) { p.add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, 0, 0, offset) }
func (p *program) answer(with uint32) { p.add(unix.BPF_RET|unix.BPF_K, 0, 0, with) }

// compile leaves out names that this architecture does not have, as libseccomp does.
func compile(profile *specs.LinuxSeccomp, numbers map[string]uint32) (program, error) {
	otherwise, err := result(profile.DefaultAction, profile.DefaultErrnoRet)
	if err != nil {
		return nil, err
	}
	var p program
	p.load(architectureAt)
	p.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, 1, 0, unix.AUDIT_ARCH_X86_64)
	p.answer(otherwise)
	p.load(numberAt)
	for _, group := range profile.Syscalls {
		then, err := result(group.Action, group.ErrnoRet)
		if err != nil {
			return nil, err
		}
		for _, name := range group.Names {
			if number, ok := numbers[name]; ok {
				if err := p.call(number, group.Args, then); err != nil {
					return nil, fmt.Errorf("%s: %w", name, err)
				}
			}
		}
	}
	p.answer(otherwise)
	return p, nil
}

// call answers a call, if its argument is so. The number is loaded before and after.
func (p *program) call(number uint32, args []specs.LinuxSeccompArg, then uint32) error {
	var match program
	switch len(args) {
	case 0:
		match.answer(then)
	case 1:
		if err := match.argument(args[0]); err != nil {
			return err
		}
		match.answer(then)
		match.load(numberAt)
	default:
		return errors.New("several arguments at once are not known")
	}
	p.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, 0, uint8(len(match)), number)
	*p = append(*p, match...)
	return nil
}

// argument goes on if an argument is so, and else behind the answer that follows.
// Those in question are ints, whose upper half says nothing.
func (p *program) argument(arg specs.LinuxSeccompArg) error {
	const jump = unix.BPF_JMP | unix.BPF_K
	p.load(argumentsAt + 8*uint32(arg.Index))
	switch value := uint32(arg.Value); arg.Op {
	case specs.OpEqualTo:
		p.add(jump|unix.BPF_JEQ, 0, 1, value)
	case specs.OpGreaterThan:
		p.add(jump|unix.BPF_JGT, 0, 1, value)
	case specs.OpLessThan:
		p.add(jump|unix.BPF_JGE, 1, 0, value)
	case specs.OpMaskedEqual:
		p.add(unix.BPF_ALU|unix.BPF_AND|unix.BPF_K, 0, 0, value)
		p.add(jump|unix.BPF_JEQ, 0, 1, uint32(arg.ValueTwo))
	default:
		return fmt.Errorf("comparison %s is not known", arg.Op)
	}
	return nil
}

// result is what the kernel does for an action.
func result(action specs.LinuxSeccompAction, errno *uint) (uint32, error) {
	switch action {
	case specs.ActAllow:
		return unix.SECCOMP_RET_ALLOW, nil
	case specs.ActErrno:
		code := uint32(unix.EPERM)
		if errno != nil {
			code = uint32(*errno)
		}
		return unix.SECCOMP_RET_ERRNO | code, nil
	}
	return 0, fmt.Errorf("action %s is not known", action)
}
