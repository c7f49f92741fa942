package sysctl

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

const vlanKey = "net/ipv4/conf/eth0.100/rp_filter"

// each runs a test against files in a directory and against the fake.
func each(t *testing.T, test func(*testing.T, Parameters)) {
	values := State{
		"net/ipv4/ip_forward": "0",
		"net/ipv4/tcp_rmem":   "4096\t131072\t6291456",
		vlanKey:               "1",
	}
	t.Run("files", func(t *testing.T) {
		root := t.TempDir()
		for key, value := range values {
			path := filepath.Join(root, key)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		test(t, NewAt(root))
	})
	t.Run("fake", func(t *testing.T) { test(t, NewFake(values)) })
}

func TestObserve(t *testing.T) {
	each(t, func(t *testing.T, p Parameters) {
		got, err := p.Observe([]string{"net/ipv4/tcp_rmem", vlanKey})
		if err != nil {
			t.Fatal(err)
		}
		want := State{"net/ipv4/tcp_rmem": "4096 131072 6291456", vlanKey: "1"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("values (-want +got):\n%s", diff)
		}
	})
}

func TestMissingKey(t *testing.T) {
	for key, fix := range map[string]string{
		"net/ipv4/vs/conntrack":                   "modprobe ip_vs",
		"net/netfilter/nf_conntrack_max":          "modprobe nf_conntrack",
		"net/bridge/bridge-nf-call-iptables":      "modprobe br_netfilter",
		"net/ipv4/conf/eth9/rp_filter":            "no such interface",
		"net/ipv6/conf/all/forwarding":            "IPv6 is disabled",
		"net/ipv4/no_parameter_of_any_kernel_yet": "no such parameter",
	} {
		each(t, func(t *testing.T, p Parameters) {
			state, err := p.Observe([]string{"net/ipv4/ip_forward", key})
			if state != nil || !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), fix) {
				t.Errorf("Observe(%s) = %v, %v; want no values and ENOENT with %q", key, state, err, fix)
			}
			if ok, err := p.Exists(key); ok || err != nil {
				t.Errorf("Exists(%s) = %v, %v", key, ok, err)
			}
			failures := p.Apply([]Change{{key, "1"}})
			if len(failures) != 1 || !errors.Is(failures[0], unix.ENOENT) {
				t.Errorf("Apply(%s) = %v, want ENOENT", key, failures)
			}
		})
	}
}

func TestBadKey(t *testing.T) {
	for _, key := range []string{"", ".", "/etc/passwd", "../etc/passwd", "net/../../x", "net//ipv4"} {
		each(t, func(t *testing.T, p Parameters) {
			if _, err := p.Observe([]string{key}); !errors.Is(err, unix.EINVAL) {
				t.Errorf("Observe(%q): %v, want EINVAL", key, err)
			}
			if failures := p.Apply([]Change{{key, "1"}}); len(failures) != 1 {
				t.Errorf("Apply(%q) = %v, want a failure", key, failures)
			}
		})
	}
}

func TestApplyLeavesNoDifference(t *testing.T) {
	want := State{"net/ipv4/ip_forward": "1", vlanKey: "2", "net/ipv4/tcp_rmem": "4096 131072 6291456"}
	each(t, func(t *testing.T, p Parameters) {
		keys := []string{"net/ipv4/ip_forward", vlanKey, "net/ipv4/tcp_rmem"}
		have, err := p.Observe(keys)
		if err != nil {
			t.Fatal(err)
		}
		changes := Diff(have, want)
		if diff := cmp.Diff([]Change{{vlanKey, "2"}, {"net/ipv4/ip_forward", "1"}}, changes); diff != "" {
			t.Errorf("changes (-want +got):\n%s", diff)
		}
		if failures := p.Apply(changes); len(failures) > 0 {
			t.Fatal(failures)
		}
		if have, err = p.Observe(keys); err != nil || len(Diff(have, want)) > 0 {
			t.Errorf("after Apply: %v, %v", have, err)
		}
	})
}

func TestFailuresAreIndependent(t *testing.T) {
	each(t, func(t *testing.T, p Parameters) {
		failures := p.Apply([]Change{{"net/ipv4/vs/conntrack", "1"}, {"net/ipv4/ip_forward", "1"}})
		if len(failures) != 1 || failures[0].Change.Key != "net/ipv4/vs/conntrack" {
			t.Errorf("failures = %v", failures)
		}
		have, err := p.Observe([]string{"net/ipv4/ip_forward"})
		if err != nil || have["net/ipv4/ip_forward"] != "1" {
			t.Errorf("ip_forward: %v, %v", have, err)
		}
	})
}

func TestValueChangedByTheKernel(t *testing.T) {
	clamped := clamp{NewFake(State{"a": "1"})}
	failures := apply(clamped, []Change{{"a", "100"}})
	if len(failures) != 1 || !errors.Is(failures[0], unix.EINVAL) {
		t.Errorf("failures = %v, want EINVAL", failures)
	}
}

// clamp is a store that keeps another value than the one written.
type clamp struct{ *Fake }

func (c clamp) write(key, _ string) error { return c.Fake.write(key, "10") }

func TestExplain(t *testing.T) {
	for number, fix := range map[unix.Errno]string{
		unix.EROFS:  "privileged",
		unix.EACCES: "CAP_NET_ADMIN",
	} {
		f := NewFake(State{"a": "1"})
		f.Refuse = func(Change) error { return number }
		failures := f.Apply([]Change{{"a", "2"}})
		if len(failures) != 1 || !errors.Is(failures[0], number) || !strings.Contains(failures[0].Error(), fix) {
			t.Errorf("%v: %v, want %q", number, failures, fix)
		}
	}
}

func TestFakeHooksAndCounters(t *testing.T) {
	f := NewFake(State{"a": "1"})
	f.FailObserve = func() error { return unix.EINTR }
	if state, err := f.Observe([]string{"a"}); state != nil || !errors.Is(err, unix.EINTR) {
		t.Errorf("Observe = %v, %v, want EINTR", state, err)
	}
	f.FailObserve = nil
	f.Set("b", "x")
	if diff := cmp.Diff(State{"a": "1", "b": "x"}, f.Values()); diff != "" {
		t.Errorf("values (-want +got):\n%s", diff)
	}
	f.Apply([]Change{{"a", "2"}})
	if f.Observes() != 1 || f.Writes() != 1 {
		t.Errorf("%d observes, %d writes, want 1 and 1", f.Observes(), f.Writes())
	}
}

func TestLinkKey(t *testing.T) {
	if got := LinkKey(ip.IPv4, "eth0.100", "rp_filter"); got != vlanKey {
		t.Errorf("IPv4: %s", got)
	}
	if got := LinkKey(ip.IPv6, "all", "forwarding"); got != "net/ipv6/conf/all/forwarding" {
		t.Errorf("IPv6: %s", got)
	}
}

// The parameters at the host's mount are used only where the own ones cannot be written.
func TestRootOfParameters(t *testing.T) {
	writable := func() *Proc {
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, "net/ipv4"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "net/ipv4/ip_forward"), []byte("1\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return NewAt(root)
	}
	own, host, none := writable(), writable(), NewAt(t.TempDir())
	for name, c := range map[string]struct{ own, host, want *Proc }{
		"no container":        {own, none, own},
		"both can be written": {own, host, own},
		"only the host's":     {none, host, host},
		"neither can be":      {none, none, none},
	} {
		if got := newAt(c.own, c.host); got.root != c.want.root {
			t.Errorf("%s: %s is used, want %s", name, got.root, c.want.root)
		}
	}
}
