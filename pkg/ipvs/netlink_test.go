package ipvs

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Without IPVS in the kernel, startup fails with one error that names the module and the fix
// (kubernetes#121042, #92033).
func TestIssue121042MissingModule(t *testing.T) {
	for name, tc := range map[string]struct {
		answers []error // to the lookups of IPVS
		loads   int
		want    string // in the error
	}{
		"there":           {answers: []error{nil}},
		"loaded":          {answers: []error{unix.ENOENT, nil}, loads: 1},
		"unavailable":     {answers: []error{unix.ENOENT, unix.ENOENT}, loads: 1, want: `run "modprobe ip_vs" on the node`},
		"not to be asked": {answers: []error{unix.EPERM}, want: "look for IPVS in the kernel"},
	} {
		t.Run(name, func(t *testing.T) {
			loads := 0
			err := loadAndRetry(func() error {
				answer := tc.answers[0]
				tc.answers = tc.answers[1:]
				return answer
			}, func() error { loads++; return errors.New("no modprobe here") })
			if loads != tc.loads || len(tc.answers) > 0 {
				t.Errorf("%d loads, %d lookups left", loads, len(tc.answers))
			}
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}
