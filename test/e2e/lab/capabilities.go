package lab

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// keptCapabilities makes the re-executed test program drop all other capabilities, as for
// a container's root, and then become another program. No tool of the lab can remove
// capabilities from the bounding set.
const keptCapabilities = "LAB_KEPT_CAPABILITIES"

// everything is the value of keptCapabilities that keeps all.
const everything = "all"

func init() {
	kept, asked := os.LookupEnv(keptCapabilities)
	if !asked {
		return
	}
	runtime.LockOSThread() // capabilities belong to the thread
	fmt.Fprintln(os.Stderr, become(kept))
	os.Exit(125)
}

// become only returns with an error.
func become(kept string) error {
	filter, err := readFilter(os.Getenv(systemCallFilter))
	if err != nil {
		return err
	}
	if err := enter(os.Getenv(containerRoot)); err != nil {
		return err
	}
	if kept != everything {
		if err := keepOnly(strings.Split(kept, ",")); err != nil {
			return err
		}
	}
	for _, name := range []string{keptCapabilities, containerRoot, systemCallFilter} {
		if err := os.Unsetenv(name); err != nil {
			return err
		}
	}
	if err := useFilter(filter); err != nil {
		return err
	}
	return fmt.Errorf("%s: %w", os.Args[1], syscall.Exec(os.Args[1], os.Args[1:], os.Environ()))
}

func enter(root string) error {
	if err := unix.Chroot(root); err != nil {
		return fmt.Errorf("%s: %w", root, err)
	}
	return os.Chdir("/")
}

// readFilter reads the output of test/seccomp, or nothing if there is no file.
func readFilter(path string) ([]unix.SockFilter, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	filter := make([]unix.SockFilter, len(text)/unix.SizeofSockFilter)
	_, err = binary.Decode(text, binary.NativeEndian, filter)
	return filter, err
}

// useFilter installs the filter for this thread and the program that it becomes.
func useFilter(filter []unix.SockFilter) error {
	if len(filter) == 0 {
		return nil
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
}

func keepOnly(kept []string) error {
	for c := uintptr(0); unix.Prctl(unix.PR_CAPBSET_READ, c, 0, 0, 0) == nil; c++ {
		if slices.Contains(kept, strconv.Itoa(int(c))) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}
