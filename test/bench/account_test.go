//go:build e2e

package bench

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// account makes the kernel record every process that exits (acct(2)). This does not slow
// the processes down.
type account struct {
	t    testing.TB
	file string
}

func newAccount(t testing.TB) *account {
	a := &account{t: t, file: filepath.Join(t.TempDir(), "acct")}
	must(t, os.WriteFile(a.file, nil, 0o600))
	if err := unix.Acct(a.file); err != nil {
		t.Fatalf("process accounting: %v", err)
	}
	t.Cleanup(func() {
		if _, _, errno := unix.Syscall(unix.SYS_ACCT, 0, 0, 0); errno != 0 {
			t.Error(errno)
		}
	})
	return a
}

// struct acct_v3 of <linux/acct.h>.
const (
	acctSize    = 64
	acctVersion = 3
	acctParent  = 20
	acctCommand = 48
)

// by returns how often a process has run each program since the last call.
func (a *account) by(pid int) map[string]int {
	a.t.Helper()
	records, err := os.ReadFile(a.file)
	must(a.t, err)
	must(a.t, os.Truncate(a.file, 0))
	programs := map[string]int{}
	for ; len(records) >= acctSize; records = records[acctSize:] {
		if records[1]&0xf != acctVersion {
			a.t.Fatalf("process accounting is of version %d, not %d", records[1]&0xf, acctVersion)
		}
		command := string(bytes.TrimRight(records[acctCommand:acctSize], "\x00"))
		// A shell mounts the contents of /run before it executes the program.
		if int(binary.NativeEndian.Uint32(records[acctParent:])) == pid && command != "mount" {
			programs[command]++
		}
	}
	return programs
}

func sum(counts map[string]int) int {
	total := 0
	for _, n := range counts {
		total += n
	}
	return total
}

// cpu returns the CPU time of a process, including that of programs it has run.
func cpu(t testing.TB, pid int) time.Duration {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	must(t, err)
	var used time.Duration
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		if err != nil {
			continue // the process has exited
		}
		ns, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		must(t, err)
		used += time.Duration(ns)
	}
	return used + children(t, pid)
}

// userHZ is the unit of process times in proc(5), in ticks per second.
const userHZ = 100

// children returns the CPU time of the programs that a process has run.
func children(t testing.TB, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	must(t, err)
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	var ticks int64
	for _, field := range fields[13:15] { // cutime, cstime
		n, err := strconv.ParseInt(field, 10, 64)
		must(t, err)
		ticks += n
	}
	return time.Duration(ticks) * time.Second / userHZ
}

// memory returns a process's resident memory in MB.
func memory(t testing.TB, pid int) float64 { return status(t, pid, "VmRSS:") }

// peakMemory returns a process's maximum resident memory so far in MB.
func peakMemory(t testing.TB, pid int) float64 { return status(t, pid, "VmHWM:") }

// kernelMemory returns the kernel's memory that it cannot reclaim in MB: its objects, and those of each
// processor.
func kernelMemory(t testing.TB) float64 {
	return sizeIn(t, "/proc/meminfo", "SUnreclaim:") + sizeIn(t, "/proc/meminfo", "Percpu:")
}

// kernelMemoryAtRest returns the same once the kernel has freed the state of an earlier node.
func kernelMemoryAtRest(t testing.TB) float64 {
	now := kernelMemory(t)
	for range 30 {
		before := now
		time.Sleep(2 * time.Second)
		if now = kernelMemory(t); before-now < 0.1 {
			break
		}
	}
	return now
}

// status returns a size from /proc/PID/status in MB.
func status(t testing.TB, pid int, field string) float64 {
	return sizeIn(t, fmt.Sprintf("/proc/%d/status", pid), field)
}

// sizeIn returns a size in kB from a file, in MB.
func sizeIn(t testing.TB, file, field string) float64 {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if kb, ok := strings.CutPrefix(line, field); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kb), "kB")), 64)
			must(t, err)
			return n / 1024
		}
	}
	t.Fatalf("%s has no %s", file, field)
	return 0
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
