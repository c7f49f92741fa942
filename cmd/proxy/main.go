// Command kube-ipvs is a kube-proxy replacement in IPVS mode: one process per node,
// which programs the kernel so that the node serves Services.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/plugin"
)

func main() {
	if isPlugin(os.Args[0]) {
		os.Exit(execute(plugin.New(nil), os.Args[1:], os.Stderr))
	}
	os.Exit(execute(newCommand(run), os.Args[1:], os.Stderr))
}

// isPlugin reports whether the program was called by the name of a kubectl plugin.
func isPlugin(path string) bool { return strings.HasPrefix(filepath.Base(path), "kubectl-ipvs") }

// Exit codes. The commands that inspect a node use diff(1)'s, which distinguish a
// finding from a failure.
const (
	exitFound  = 1 // the command has found and printed a problem
	exitFailed = 2 // the command failed

	exitStopped = 1 // the proxy itself had to stop
)

// execute runs a command line and returns its exit code.
func execute(program *cobra.Command, args []string, stderr io.Writer) int {
	serving := false
	before := program.PersistentPreRun
	program.PersistentPreRun = func(called *cobra.Command, args []string) {
		serving = called == program
		if before != nil {
			before(called, args)
		}
	}
	program.SetArgs(args)
	err := cli.RunNoErrOutput(program)
	if err == nil {
		return 0
	}
	var found *foundError
	if errors.As(err, &found) || errors.Is(err, plugin.ErrFound) {
		return exitFound
	}
	if serving { // the output of a serving process is a log
		klog.ErrorS(err, "Command failed")
		klog.Flush()
	} else {
		fmt.Fprintf(stderr, "Error: %v\n", err)
	}
	if called, _, err := program.Find(args); err == nil && called != program {
		return exitFailed
	}
	return exitStopped
}

// foundError ends a command that has already printed its findings.
type foundError struct{}

func (*foundError) Error() string { return "a problem was found" }

// errFound is the foundError.
var errFound = &foundError{}
