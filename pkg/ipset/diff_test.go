package ipset

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func TestDiff(t *testing.T) {
	for _, tc := range []struct {
		name       string
		have, want State
		changes    []string
	}{
		{name: "nothing"},
		{name: "equal", have: everything(), want: everything()},
		{
			name: "from nothing, sorted",
			want: state(contents(vips4, "10.0.0.2,tcp:1", "10.0.0.1,tcp:2", "10.0.0.1,udp:1", "10.0.0.1,tcp:1"), contents(nets4, "10.0.0.0/8", "10.0.0.0/7"), contents(ports, "2", "0")),
			changes: []string{
				"create set nets", "create set ports", "create set vips",
				"add 10.0.0.0/7 to set nets", "add 10.0.0.0/8 to set nets",
				"add 0 to set ports", "add 2 to set ports",
				"add 10.0.0.1,tcp:1 to set vips", "add 10.0.0.1,udp:1 to set vips", "add 10.0.0.1,tcp:2 to set vips", "add 10.0.0.2,tcp:1 to set vips",
			},
		},
		{
			name: "creates, adds, deletes, destroys",
			have: state(contents(vips4, "10.0.0.1,tcp:1", "10.0.0.2,tcp:1"), contents(nets4, "10.0.0.0/8"), contents(ports, "1")),
			want: state(contents(vips4, "10.0.0.2,tcp:1", "10.0.0.3,tcp:1"), contents(addrs4), contents(ports, "2")),
			changes: []string{
				"create set addrs", "add 2 to set ports", "add 10.0.0.3,tcp:1 to set vips",
				"delete 1 from set ports", "delete 10.0.0.1,tcp:1 from set vips", "destroy set nets",
			},
		},
		{
			name: "marks",
			have: state(contents(marks4, "10.0.0.1,tcp:1 0x9", "10.0.0.2,tcp:1 0xb", "10.0.0.3,tcp:1 0xd")),
			want: state(contents(marks4, "10.0.0.1,tcp:1 0x9", "10.0.0.2,tcp:1 0x19")),
			changes: []string{
				"add 10.0.0.2,tcp:1 skbmark 0x19 to set marks", "delete 10.0.0.3,tcp:1 from set marks",
			},
		},
		{
			name:    "another type: all anew",
			have:    state(contents(vips4, "10.0.0.1,tcp:1")),
			want:    state(contents(Set{"vips", HashNet, ip.IPv4}, "10.0.0.0/8")),
			changes: []string{"create set vips", "add 10.0.0.0/8 to set vips"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			changes := Diff(tc.have, tc.want)
			var got []string
			for _, c := range changes {
				got = append(got, c.String())
			}
			if d := cmp.Diff(tc.changes, got); d != "" {
				t.Error(d)
			}
			f := NewFake()
			mustApply(t, &f.client, Diff(nil, tc.have))
			mustApply(t, &f.client, changes)
			if d := cmp.Diff(tc.want.String(), f.Dump()); d != "" {
				t.Errorf("the changes do not lead from have to want: %s", d)
			}
		})
	}
}
