package main

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

func TestConntrackSysctls(t *testing.T) {
	cfg := &config.Conntrack{MaxPerCore: 32768, Min: 131072, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour}
	want := sysctl.State{
		"net/netfilter/nf_conntrack_max":                     "131072",
		"net/netfilter/nf_conntrack_buckets":                 "32768",
		"net/netfilter/nf_conntrack_tcp_timeout_established": "86400",
		"net/netfilter/nf_conntrack_tcp_timeout_close_wait":  "3600",
	}
	if diff := cmp.Diff(want, conntrackSysctls(cfg, 2)); diff != "" {
		t.Error(diff)
	}
	if got := conntrackSysctls(cfg, 16)["net/netfilter/nf_conntrack_max"]; got != "524288" {
		t.Errorf("with 16 CPUs: %s", got)
	}
	many := conntrackSysctls(cfg, 256)
	if limit, buckets := many["net/netfilter/nf_conntrack_max"], many["net/netfilter/nf_conntrack_buckets"]; limit != "1048576" || buckets != "262144" {
		t.Errorf("with 256 CPUs: %s entries in %s buckets", limit, buckets)
	}
	if got := conntrackSysctls(&config.Conntrack{}, 2); len(got) != 0 {
		t.Errorf("without configuration, %v would be set", got)
	}
}

// TestConntrackIsOnlyRaised: the limit and, as in kube-proxy, the hash table.
func TestConntrackIsOnlyRaised(t *testing.T) {
	cfg := &config.Conntrack{MaxPerCore: 1, Min: 40000}
	for _, tc := range []struct{ key, have, want string }{
		{conntrackMax, "500", "40000"},
		{conntrackMax, "262144", "262144"},
		{conntrackBuckets, "1024", "16384"},
		{conntrackBuckets, "65536", "65536"},
	} {
		kernel := sysctl.NewFake(sysctl.State{conntrackMax: "500", conntrackBuckets: "1024", tc.key: tc.have})
		setConntrack(t.Context(), cfg, kernel)
		if got := kernel.Values()[tc.key]; got != tc.want {
			t.Errorf("%s: from %s to %s, want %s", tc.key, tc.have, got, tc.want)
		}
	}
}

// TestConntrackIsNotWrittenAgain: the values may be right where they cannot be written.
func TestConntrackIsNotWrittenAgain(t *testing.T) {
	cfg := &config.Conntrack{MaxPerCore: 1, Min: 40000, TCPEstablished: time.Hour, TCPCloseWait: time.Minute, UDP: 30 * time.Second}
	kernel := sysctl.NewFake(conntrackSysctls(cfg, 1))
	setConntrack(t.Context(), cfg, kernel)
	if writes := kernel.Writes(); writes != 0 {
		t.Errorf("%d writes", writes)
	}
}

// TestCPUs: the kernel's list counts, not what the process may use.
func TestCPUs(t *testing.T) {
	for text, want := range map[string]int{"0-63\n": 64, "0\n": 1, "0-3,8,10-11\n": 7, "": runtime.NumCPU(), "0-x": runtime.NumCPU()} {
		list := filepath.Join(t.TempDir(), "online")
		if err := os.WriteFile(list, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := cpus(list); got != want {
			t.Errorf("%q: %d CPUs, want %d", text, got, want)
		}
	}
	if got := cpus("/nonexistent"); got != runtime.NumCPU() {
		t.Errorf("without the list: %d CPUs", got)
	}
}

// TestOOMScore raises the score, which needs no privileges, and restores it.
func TestOOMScore(t *testing.T) {
	present := func() int {
		text, err := os.ReadFile("/proc/self/oom_score_adj")
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := present()
	for _, want := range []int{min(before+1, 1000), before} {
		setOOMScore(t.Context(), int32(want))
		if got := present(); got != want {
			t.Errorf("it is %d, want %d", got, want)
		}
	}
}

// TestRestoreSysctls keeps forwarding, and the parameters that kube-proxy needs too.
func TestRestoreSysctls(t *testing.T) {
	before := sysctl.State{"net/ipv4/vs/conntrack": "0", plan.SNATReroute: "0", plan.IPForward: "0"}
	for _, c := range []struct {
		kubeProxy bool
		want      sysctl.State
	}{
		{true, sysctl.State{"net/ipv4/vs/conntrack": "1", plan.SNATReroute: "0", plan.IPForward: "1"}},
		{false, sysctl.State{"net/ipv4/vs/conntrack": "0", plan.SNATReroute: "0", plan.IPForward: "1"}},
	} {
		kernel := sysctl.NewFake(maps.Clone(before))
		record, err := sysctl.Record(kernel, t.TempDir(), "me")
		if err != nil {
			t.Fatal(err)
		}
		if err := setSysctls(t.Context(), record, sysctl.State{"net/ipv4/vs/conntrack": "1", plan.SNATReroute: "1", plan.IPForward: "1"}); err != nil {
			t.Fatal(err)
		}
		m := machine{record: record}
		if err := m.restoreSysctls(c.kubeProxy); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(c.want, kernel.Values()); diff != "" {
			t.Errorf("kube-proxy serves: %v\n%s", c.kubeProxy, diff)
		}
	}
}

// With --init-only, only differing parameters are written; the others may be read-only.
func TestSetSysctls(t *testing.T) {
	kernel := sysctl.NewFake(sysctl.State{"net/ipv4/ip_forward": "1", "net/ipv4/vs/conntrack": "0"})
	kernel.Refuse = func(c sysctl.Change) error {
		if c.Key == "net/ipv4/ip_forward" {
			return errors.New("read-only")
		}
		return nil
	}
	want := sysctl.State{"net/ipv4/ip_forward": "1", "net/ipv4/vs/conntrack": "1"}
	if err := setSysctls(t.Context(), kernel, want); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(want, kernel.Values()); diff != "" {
		t.Error(diff)
	}
	if err := setSysctls(t.Context(), kernel, sysctl.State{"net/ipv4/ip_forward": "0"}); err == nil {
		t.Error("what is refused is no error")
	}
}
