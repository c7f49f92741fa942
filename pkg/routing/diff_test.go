package routing

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func texts(changes []Change) []string {
	var out []string
	for _, c := range changes {
		out = append(out, c.String())
	}
	return out
}

func TestDiff(t *testing.T) {
	hop := Route{Family: ip.IPv4, Table: 250, Dst: pfx("10.12.192.1/32"), Link: "eth1"}
	def := Route{Family: ip.IPv4, Table: 250, Dst: pfx("0.0.0.0/0"), Link: "eth1", Via: addr("10.12.192.1")}
	def2 := def
	def2.Link = "eth2"
	rule := Rule{Family: ip.IPv4, Priority: 512, Mark: 1, Mask: 1, Table: 250}
	for name, test := range map[string]struct {
		have, want State
		changes    []string
	}{
		"same": {have: wanted(), want: wanted()},
		"fresh": {
			want: State{DummyLink: true, Addresses: set(addr("10.0.0.2"), addr("10.0.0.1")), Rules: set(rule), Routes: set(def, hop)},
			changes: []string{
				"add link kube-ipvs0",
				"add address 10.0.0.1 to kube-ipvs0",
				"add address 10.0.0.2 to kube-ipvs0",
				"add route 10.12.192.1/32 dev eth1 table 250",
				"add route 0.0.0.0/0 via 10.12.192.1 dev eth1 table 250",
				"add IPv4 rule 512: fwmark 0x1/0x1 lookup 250",
			},
		},
		"everything goes": {
			have: State{DummyLink: true, Addresses: set(addr("10.0.0.1")), Rules: set(rule), Routes: set(def, hop)},
			changes: []string{
				"delete IPv4 rule 512: fwmark 0x1/0x1 lookup 250",
				"delete route 0.0.0.0/0 via 10.12.192.1 dev eth1 table 250",
				"delete route 10.12.192.1/32 dev eth1 table 250",
				"delete link kube-ipvs0",
			},
		},
		"a route is replaced": {
			have:    State{Routes: set(def)},
			want:    State{Routes: set(def2)},
			changes: []string{"add route 0.0.0.0/0 via 10.12.192.1 dev eth2 table 250"},
		},
		"addresses of wrong scope": {
			have:    State{DummyLink: true, WrongScope: set(addr("10.0.0.1"), addr("10.0.0.2"))},
			want:    State{DummyLink: true, Addresses: set(addr("10.0.0.1"))},
			changes: []string{"add address 10.0.0.1 to kube-ipvs0", "delete address 10.0.0.2 from kube-ipvs0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.changes, texts(Diff(test.have, test.want))); diff != "" {
				t.Errorf("changes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRetry(t *testing.T) {
	permanent := errors.New("permanent")
	for name, test := range map[string]struct {
		errs  []error // of the calls; further calls return nil
		calls int
		want  error
	}{
		"at once":     {calls: 1},
		"after races": {errs: []error{errChanged, unix.EINTR}, calls: 3},
		"permanent":   {errs: []error{errChanged, permanent}, calls: 2, want: permanent},
		"never":       {errs: []error{errChanged, errChanged, errChanged, errChanged, errChanged, errChanged, errChanged, errChanged, errChanged, errChanged, errChanged}, calls: attempts, want: errChanged},
	} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			got, err := retry(func() (int, error) {
				calls++
				if calls <= len(test.errs) {
					return 99, test.errs[calls-1]
				}
				return 1, nil
			}, func(err error) bool { return !errors.Is(err, permanent) })
			if calls != test.calls || !errors.Is(err, test.want) || err != nil && got != 0 {
				t.Errorf("%d, %v after %d calls; want %v after %d", got, err, calls, test.want, test.calls)
			}
		})
	}
}
