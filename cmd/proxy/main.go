// Command kube-ipvs is a kube-proxy replacement in IPVS mode: one process per
// node, which programs the kernel so that the node serves Services.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	"k8s.io/klog/v2"
)

func main() { os.Exit(execute(newCommand(run), os.Args[1:], os.Stderr)) }

// The exit codes. The commands that look at a node have diff(1)'s: whether something is
// wrong can be told from whether it could be found out.
const (
	exitFound  = 1 // the command has found something wrong, and has printed it
	exitFailed = 2 // the command could not do what it was asked to do

	exitStopped = 1 // the proxy itself could not go on
)

// execute runs a command line and returns its exit code.
func execute(program *cobra.Command, args []string, stderr io.Writer) int {
	serving := false
	program.PersistentPreRun = func(called *cobra.Command, _ []string) { serving = called == program }
	program.SetArgs(args)
	err := cli.RunNoErrOutput(program)
	if err == nil {
		return 0
	}
	var found *foundError
	if errors.As(err, &found) {
		return exitFound
	}
	if serving { // its output is a log
		klog.ErrorS(err, "command failed")
		klog.Flush()
	} else {
		fmt.Fprintf(stderr, "Error: %v\n", err)
	}
	if called, _, err := program.Find(args); err == nil && called != program {
		return exitFailed
	}
	return exitStopped
}

// foundError ends a command that has printed everything already.
type foundError struct{}

func (*foundError) Error() string { return "something is wrong" }

// errFound is the foundError.
var errFound = &foundError{}
