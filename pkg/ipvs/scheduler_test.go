package ipvs

import (
	"slices"
	"strings"
	"testing"
)

func TestParseFlags(t *testing.T) {
	for _, tc := range []struct {
		scheduler, list string
		want            Flags
		err             string
	}{
		{"rr", "", 0, ""},
		{"mh", "", 0, ""},
		{"mh", "mh-port", FlagSched2, ""},
		{"mh", "mh-port, mh-fallback", FlagSched1 | FlagSched2, ""},
		{"sh", "sh-fallback", FlagSched1, ""},
		{"sh", "mh-port", 0, `"mh-port" is none of sh-fallback, sh-port`},
		{"mh", "mh-port,", 0, `"" is none of`},
		{"rr", "mh-port", 0, "the scheduler rr has no flags"},
	} {
		got, err := ParseFlags(tc.scheduler, tc.list)
		if got != tc.want || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s %q: %#x, %v, want %#x, %s", tc.scheduler, tc.list, got, err, tc.want, tc.err)
		}
	}
}

func TestFlagsBelongToSchedulers(t *testing.T) {
	for name, flags := range schedulerFlags {
		if !slices.Contains(Schedulers, name) {
			t.Errorf("no scheduler %s", name)
		}
		for flag := range flags {
			if !strings.HasPrefix(flag, name+"-") {
				t.Errorf("%s belongs to another scheduler than %s", flag, name)
			}
		}
	}
}
