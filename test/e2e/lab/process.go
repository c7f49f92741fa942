package lab

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Exec runs a program in the namespace, and returns its output. The test fails
// if the program does.
func (n *Namespace) Exec(program string, args ...string) string {
	n.lab.t.Helper()
	out, err := n.TryExec(program, args...)
	n.lab.must(err, "%s", n.Name)
	return out
}

// TryExec is Exec for a program that may fail.
func (n *Namespace) TryExec(program string, args ...string) (string, error) {
	return n.run(exec.Command(program, args...))
}

// Feed is Exec with an input.
func (n *Namespace) Feed(input, program string, args ...string) string {
	n.lab.t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := n.run(cmd)
	n.lab.must(err, "%s", n.Name)
	return out
}

func (n *Namespace) run(cmd *exec.Cmd) (string, error) {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := n.Do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out.String())
	}
	return out.String(), err
}

// Process is a background program with its output.
type Process struct {
	Name string

	cmd  *exec.Cmd
	log  *logBuffer
	done chan struct{}
}

// Start runs a program in the namespace, in the background. It is killed when the lab
// ends, if it still runs.
func (n *Namespace) Start(program string, args ...string) *Process {
	n.lab.t.Helper()
	return n.start(program, exec.Command(program, args...))
}

func (n *Namespace) start(name string, cmd *exec.Cmd) *Process {
	n.lab.t.Helper()
	p := &Process{Name: name, cmd: cmd, log: &logBuffer{}, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.log, p.log
	n.lab.must(n.Do(cmd.Start), "%s: start %s", n.Name, name)
	n.processes = append(n.processes, p)
	go func() {
		defer close(p.done)
		// ExitCode reads the result from the state.
		_ = cmd.Wait()
	}()
	return p
}

// PID is the process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Log returns the output of the process so far.
func (p *Process) Log() string { return p.log.String() }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// ExitCode waits for the end and returns the exit code, or -1 for a process
// that was killed.
func (p *Process) ExitCode() int {
	<-p.done
	return p.cmd.ProcessState.ExitCode()
}

// Signal sends a signal to a process that may have ended already.
func (p *Process) Signal(signal syscall.Signal) error {
	err := p.cmd.Process.Signal(signal)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}

// stopLimit limits the wait for the end of a process after a signal.
const stopLimit = 30 * time.Second

// Terminate sends SIGTERM to the process, kills it if it does not end, and returns its
// exit code.
func (p *Process) Terminate() int {
	// A process that has already ended has an exit code too.
	_ = p.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(stopLimit):
		p.Stop()
	}
	return p.ExitCode()
}

// Stop kills the process.
func (p *Process) Stop() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// logBuffer collects output that is read while it is written.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
