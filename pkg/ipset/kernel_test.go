//go:build e2e

package ipset

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func TestKernel(t *testing.T) {
	for _, tt := range allTests {
		t.Run(tt.name, func(t *testing.T) {
			tt.test(t, func(t testing.TB) (*client, references) { return openKernel(t), rules{t} })
		})
	}
}

// openKernel moves the test to a new network namespace, where it stays: the thread is
// never unlocked, so the runtime ends it with the test.
func openKernel(t testing.TB) *client {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	n, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return &n.client
}

// rules refer to sets as iptables rules do.
type rules struct{ t testing.TB }

func (r rules) Reference(name string) { run(r.t, "", rule("-A", name)...) }
func (r rules) Release(name string)   { run(r.t, "", rule("-D", name)...) }

func rule(command, name string) []string {
	return []string{"iptables", command, "INPUT", "-m", "set", "--match-set", name, "dst,dst", "-j", "ACCEPT"}
}

func run(t testing.TB, stdin string, args ...string) string {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v: %s", args, err, out)
	}
	return string(out)
}

// TestRestore makes ipset(8) create the sets of State.String, and observes them.
func TestRestore(t *testing.T) {
	c := openKernel(t)
	want := everything()
	run(t, want.String(), "ipset", "restore")
	wantState(t, c, want)
	mustApply(t, c, Diff(nil, want)) // existing sets of later revisions are kept
	wantState(t, c, want)
}

// TestSave compares sets that this package creates with the output of ipset(8).
func TestSave(t *testing.T) {
	c := openKernel(t)
	mustApply(t, c, Diff(nil, everything()))
	saved := run(t, "", "ipset", "save")
	for _, line := range []string{
		"create vips hash:ip,port family inet hashsize 1024 maxelem 65536",
		"add vips 10.96.0.1,tcp:443",
		"create marks hash:ip,port family inet hashsize 1024 maxelem 65536 skbinfo",
		"add marks 10.96.0.1,tcp:443 skbmark 0x9\n",
		"add marks6 fd00:96::1,udp:53 skbmark 0x400b\n",
		"create ports bitmap:port range 0-65535",
		"add ports 30000",
		"add ranges6 fd00::1,tcp:80,2001:db8::/32",
	} {
		if !strings.Contains(saved, line) {
			t.Errorf("no %q in\n%s", line, saved)
		}
	}
}

// TestForeignSets reads and changes sets in the form in which other programs create them.
func TestForeignSets(t *testing.T) {
	c := openKernel(t)
	run(t, `create vips hash:ip,port family inet comment counters skbinfo timeout 600
add vips 10.0.0.1,tcp:1 comment "a comment" packets 3 bytes 4
create nets hash:net family inet
add nets 10.0.0.0/8
add nets 10.1.0.0/16 nomatch
create ports bitmap:port range 0-65535 comment
add ports 1-3
create macs hash:mac
add macs 00:11:22:33:44:55
`, "ipset", "restore")
	want := state(contents(vips4, "10.0.0.1,tcp:1"), contents(nets4, "10.0.0.0/8"), contents(ports, "1", "2", "3"))
	mustApply(t, c, Diff(nil, want))
	want["vips"] = contents(Set{"vips", HashIPPortMark, ip.IPv4}, "10.0.0.1,tcp:1") // its marks are not ours
	want["macs"] = Contents{Set: Set{"macs", "hash:mac", 0}, Partial: true}
	nets := want["nets"]
	nets.Partial = true
	want["nets"] = nets
	wantState(t, c, want)
	add := Change{Op: AddEntry, Set: nets4, Entry: entry("10.1.0.0/16")}
	mustApply(t, c, []Change{add})
	want["nets"].Entries[add.Entry] = 0
	wantState(t, c, want)
	mustApply(t, c, []Change{{Op: DestroySet, Set: Set{Name: "macs"}}})
}

// TestManyMembers grows a set beyond its initial capacity, and reads a dump of many
// messages.
func TestManyMembers(t *testing.T) {
	c := openKernel(t)
	want := Contents{Set: vips4, Entries: map[Entry]uint32{}}
	for i := range uint32(defaultMaxElem + 10) {
		want.Entries[many(i)] = 0
	}
	mustApply(t, c, Diff(nil, state(want)))
	got, err := c.Observe(nil)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(len(want.Entries), len(got["vips"].Entries)); d != "" {
		t.Error(d)
	}
	if changes := Diff(got, state(want)); len(changes) > 0 {
		t.Errorf("%d changes remain, such as %s", len(changes), changes[0])
	}
}

func many(i uint32) Entry {
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], 10<<24|i)
	return Entry{Addr: netip.AddrFrom4(a), Protocol: ip.TCP, Port: 80}
}

func BenchmarkAdd(b *testing.B) {
	for _, at := range []int{1, 10000} {
		b.Run(fmt.Sprint(at), func(b *testing.B) {
			c := openKernel(b)
			mustApply(b, c, []Change{{Op: CreateSet, Set: vips4}})
			for i := uint32(0); b.Loop(); {
				changes := make([]Change, at)
				for j := range changes {
					changes[j] = Change{Op: AddEntry, Set: vips4, Entry: many(i)}
					i++
				}
				mustApply(b, c, changes)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*at), "ns/member")
		})
	}
}

func BenchmarkObserve(b *testing.B) {
	for _, n := range []uint32{1000, 50000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			c := openKernel(b)
			mustApply(b, c, []Change{{Op: CreateSet, Set: vips4}})
			for i := range n {
				mustApply(b, c, []Change{{Op: AddEntry, Set: vips4, Entry: many(i)}})
			}
			for b.Loop() {
				if _, err := c.Observe(nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkSizes(b *testing.B) {
	for _, n := range []uint32{1000, 10000, 50000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			c := openKernel(b)
			mustApply(b, c, []Change{{Op: CreateSet, Set: vips4}})
			changes := make([]Change, n)
			for i := range n {
				changes[i] = Change{Op: AddEntry, Set: vips4, Entry: many(i)}
			}
			mustApply(b, c, changes)
			b.Run("count", func(b *testing.B) {
				for b.Loop() {
					if _, err := c.Sizes([]string{vips4.Name}); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run("look up", func(b *testing.B) {
				for b.Loop() {
					if has, err := c.Has(vips4, many(0)); !has || err != nil {
						b.Fatal(has, err)
					}
				}
			})
		})
	}
}
