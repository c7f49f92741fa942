package vm

import (
	"os/exec"
	"runtime"
)

// runOnLockedThread runs a command whose SysProcAttr holds a Pdeathsig. The
// kernel sends that signal when the thread that started the child ends, so the
// thread must be kept from the scheduler until the child is done.
func runOnLockedThread(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}
