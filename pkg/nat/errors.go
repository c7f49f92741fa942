package nat

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// refusal is the error of an iptables program.
type refusal struct {
	number unix.Errno // 0 if unknown
	line   int        // of the input, from 1; 0 if unknown
	text   string     // of that line
	output string
}

func (e *refusal) Error() string {
	if e.line == 0 {
		return e.output
	}
	return fmt.Sprintf("line %d, %q: %s", e.line, e.text, e.output)
}

// Unwrap lets errors.Is find the errno.
func (e *refusal) Unwrap() error {
	if e.number == 0 {
		return nil
	}
	return e.number
}

// programError parses the standard error of a program that failed with an input. If the
// kernel refuses a table, iptables-legacy-restore names the line of the COMMIT.
func programError(input, output string, err error) error {
	if strings.TrimSpace(output) == "" {
		return err
	}
	e := &refusal{number: number(output), output: oneLine(output)}
	if strings.Contains(output, noSocket) {
		e.output += "; check that the process has CAP_NET_RAW"
	}
	m := lineNumber.FindStringSubmatch(output)
	if m == nil {
		return e
	}
	lines := strings.Split(input, "\n")
	if n, err := strconv.Atoi(m[1]); err == nil && n >= 1 && n <= len(lines) {
		e.line, e.text = n, lines[n-1]
	}
	return e
}

// noSocket is the message of iptables when it may not open a raw socket, which it needs
// for sets.
const noSocket = "Can't open socket to ipset"

// lineNumber finds the number in "Error occurred at line: 3", "line 5: RULE_APPEND
// failed" (both nf_tables) and "iptables-restore: line 7 failed" (legacy).
var lineNumber = regexp.MustCompile(`\bline:? (\d+)`)

// oneLine drops lines without information.
func oneLine(output string) string {
	var kept []string
	for _, line := range strings.Split(output, "\n") {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "Try `ip") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "; ")
}

// errnoTexts are messages of iptables that do not contain strerror's text.
var errnoTexts = []struct {
	text   string
	number unix.Errno
}{
	{"doesn't exist", unix.ENOENT},
	{"does not exist", unix.ENOENT},
	{"no chain/target/match by that name", unix.ENOENT},
	{"does a matching rule exist", unix.ENOENT},
	{"holding the xtables lock", unix.EAGAIN},
	{"you must be root", unix.EPERM},
	{strings.ToLower(noSocket), unix.EPERM},
}

// printedErrnos are those whose strerror text iptables prints.
var printedErrnos = []unix.Errno{
	unix.ENOENT, unix.EEXIST, unix.EBUSY, unix.EMLINK, unix.ELOOP,
	unix.ENOTEMPTY, unix.EPERM, unix.EACCES, unix.EAGAIN, unix.ENOBUFS,
	unix.ENOMEM, unix.ENOSPC, unix.EMSGSIZE, unix.EOPNOTSUPP, unix.EINVAL,
}

// number returns the errno that an output implies. The exit status does not distinguish
// errors: it is 1, 2 or 4 for nearly all of them.
func number(output string) unix.Errno {
	output = strings.ToLower(output)
	for _, p := range errnoTexts {
		if strings.Contains(output, p.text) {
			return p.number
		}
	}
	for _, n := range printedErrnos {
		if strings.Contains(output, n.Error()) {
			return n
		}
	}
	return 0
}
