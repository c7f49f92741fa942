package ipvs

import (
	"errors"
	"testing"
)

func TestOnlyIPv4(t *testing.T) {
	failed := errors.New("failed")
	for _, tc := range []struct {
		name          string
		before, after int
		all, modules  int
		countErr, err error
		want          bool
	}{
		{name: "all references are accounted for", before: 10, after: 10, all: 12, modules: 2, want: true},
		{name: "one of IPv6", before: 10, after: 10, all: 13, modules: 2},
		{name: "one of IPv4 deleted meanwhile, and one of IPv6", before: 11, after: 10, all: 13, modules: 2},
		{name: "one of IPv4 added meanwhile", before: 10, after: 11, all: 13, modules: 2},
		{name: "none of IPv4", all: 2, modules: 2},
		{name: "not counted", before: 10, after: 10, all: 12, modules: 2, countErr: failed},
		{name: "built in", before: 10, after: 10, err: failed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			counts := []int{tc.before, tc.after}
			count := func() (int, error) {
				n := counts[0]
				counts = counts[1:]
				return n, tc.countErr
			}
			if got := onlyIPv4(count, func() (int, int, error) { return tc.all, tc.modules, tc.err }); got != tc.want {
				t.Errorf("got %t", got)
			}
		})
	}
}
