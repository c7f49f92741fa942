package nat

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestProgramError(t *testing.T) {
	input := "*nat\n:A - [0:0]\n-A A -j B\nCOMMIT\n"
	for _, test := range []struct {
		output string
		number unix.Errno
		want   string
	}{
		{"iptables-restore v1.8.9 (nf_tables): Set S doesn't exist.\n\nError occurred at line: 3\nTry `iptables-restore -h' or 'iptables-restore --help' for more information.\n", unix.ENOENT, `line 3, "-A A -j B": iptables-restore v1.8.9 (nf_tables): Set S doesn't exist.; Error occurred at line: 3`},
		{"iptables-restore v1.8.9 (nf_tables): \nline 3: RULE_APPEND failed (Invalid argument): rule in chain A\n", unix.EINVAL, `line 3, "-A A -j B"`},
		{"iptables-restore: line 4 failed\n", 0, `line 4, "COMMIT"`},
		{"Another app is currently holding the xtables lock. Perhaps you want to use the -w option?\n", unix.EAGAIN, "Another app"},
		{"iptables-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)\n", unix.EPERM, "must be root"},
		{"iptables-restore v1.8.9 (nf_tables): Can't open socket to ipset.\n\nError occurred at line: 3\n", unix.EPERM, "check that the process has CAP_NET_RAW"},
		{"line 99: failed (Too many links)\n", unix.EMLINK, "line 99"},
	} {
		err := programError(input, test.output, errors.New("exit status 1"))
		if !strings.HasPrefix(err.Error(), strings.TrimSuffix(test.want, "\n")) && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q, want %q", err, test.want)
		}
		var n unix.Errno
		if errors.As(err, &n); n != test.number {
			t.Errorf("%q has the number %d, want %d", err, n, test.number)
		}
	}
	plain := errors.New("signal: killed")
	if err := programError("", " \n", plain); !errors.Is(err, plain) {
		t.Errorf("without output: %v, want %v", err, plain)
	}
}
