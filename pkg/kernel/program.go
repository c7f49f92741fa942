package kernel

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// runLimit ends a program that hangs. iptables-restore of 10,000 rules takes
// about a second.
const runLimit = time.Minute

// ran are the processes that Run has started, and when they have ended.
var ran processes

// rememberFor is for how long after its end a process is known: what it has done is
// told by then, and its ID is hardly another one's yet.
const rememberFor = 10 * time.Second

type processes struct {
	mu    sync.Mutex
	ended map[int]time.Time // zero while one runs
}

// add notes a process, and gives what is to be called when it has ended.
func (p *processes) add(pid int) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended == nil {
		p.ended = map[int]time.Time{}
	}
	maps.DeleteFunc(p.ended, func(_ int, at time.Time) bool { return !at.IsZero() && time.Since(at) > rememberFor })
	p.ended[pid] = time.Time{}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.ended[pid] = time.Now()
	}
}

// HasRun tells whether a process is one that Run has started, and that runs or has
// ended just now.
func HasRun(pid int) bool {
	ran.mu.Lock()
	defer ran.mu.Unlock()
	at, known := ran.ended[pid]
	return known && (at.IsZero() || time.Since(at) <= rememberFor)
}

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
	if err = c.Start(); err == nil {
		defer ran.add(c.Process.Pid)()
		err = c.Wait()
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("%s did not end within %s", program, runLimit)
	}
	return out.String(), errOut.String(), err
}
