// Package program runs programs such as iptables-restore and nft.
package program

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// runLimit limits a program that hangs. iptables-restore of 10,000 rules takes about a
// second.
const runLimit = time.Minute

// Run runs a program with an input and returns its output, in English.
func Run(program, input string, args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), runLimit)
	defer cancel()
	var out, errOut bytes.Buffer
	c := exec.CommandContext(ctx, program, args...)
	c.Env = append(c.Environ(), "LC_ALL=C") // messages are parsed
	c.Stdin = strings.NewReader(input)
	c.Stdout, c.Stderr = &out, &errOut
	// Time to read the output of a program that has exited: more than a second on a
	// stalled machine.
	c.WaitDelay = runLimit
	err = c.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("%s did not exit within %s", program, runLimit)
	}
	return out.String(), errOut.String(), err
}
