package kernel

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// runLimit ends a program that hangs. iptables-restore of 10,000 rules takes
// about a second.
const runLimit = time.Minute

// Run runs a program by which the kernel is programmed, with an input, and
// gives what it has written, in English.
func Run(program, input string, args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), runLimit)
	defer cancel()
	var out, errOut bytes.Buffer
	c := exec.CommandContext(ctx, program, args...)
	c.Env = append(c.Environ(), "LC_ALL=C") // messages are read
	c.Stdin = strings.NewReader(input)
	c.Stdout, c.Stderr = &out, &errOut
	// For what the program has written before its end to be read: a stalled
	// machine has been seen to take more than a second.
	c.WaitDelay = runLimit
	err = c.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("%s did not end within %s", program, runLimit)
	}
	return out.String(), errOut.String(), err
}
