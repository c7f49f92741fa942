package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// TestUnreadableAtStart makes opening and reading the rules of each family fail, with
// each error, when the process starts. Only the family that is not the node's primary one may be
// left out, and only if the node has none. Any other error ends the process before it writes
// anything.
func TestUnreadableAtStart(t *testing.T) {
	killed := errors.New("signal: killed")
	incompatible := errors.New("table filter has a rule, written by nft, that iptables cannot read")
	noProgram := fmt.Errorf("ip6tables: %w: install the package iptables", exec.ErrNotFound)
	only4, only6 := []ip.Family{ip.IPv4}, []ip.Family{ip.IPv6}
	for _, test := range []struct {
		name       string
		family     ip.Family
		open, read error
		noIPv6     bool
		primary    ip.Family   // 0: it must not be looked up
		served     []ip.Family // nil: the process ends
		unread     int
	}{
		{name: "all is well", family: ip.IPv4, served: ip.Families},
		{name: "IPv4 incompatible", family: ip.IPv4, read: incompatible},
		{name: "IPv4 killed", family: ip.IPv4, read: killed},
		{name: "IPv4 busy", family: ip.IPv4, read: unix.EBUSY},
		{name: "IPv4 no memory", family: ip.IPv4, read: unix.ENOMEM},
		{name: "IPv4 no family", family: ip.IPv4, read: unix.EAFNOSUPPORT, primary: ip.IPv4},
		{name: "IPv4 no program", family: ip.IPv4, open: fmt.Errorf("iptables: %w", exec.ErrNotFound), primary: ip.IPv4},
		{name: "IPv4 no tables, primary is IPv6", family: ip.IPv4, read: unix.EAFNOSUPPORT, primary: ip.IPv6, served: only6, unread: 1},
		{name: "IPv4 no program, primary is IPv6", family: ip.IPv4, open: noProgram, primary: ip.IPv6, served: only6, unread: 1},
		{name: "IPv4 busy, primary is IPv6", family: ip.IPv4, read: unix.EBUSY},
		{name: "IPv4 not permitted", family: ip.IPv4, read: unix.EPERM},
		{name: "IPv6 incompatible", family: ip.IPv6, read: incompatible},
		{name: "IPv6 killed", family: ip.IPv6, read: killed},
		{name: "IPv6 busy", family: ip.IPv6, read: unix.EBUSY},
		{name: "IPv6 no table", family: ip.IPv6, read: unix.ENOENT},
		{name: "IPv6 not permitted", family: ip.IPv6, read: unix.EPERM},
		{name: "IPv6 no family", family: ip.IPv6, read: unix.EAFNOSUPPORT, noIPv6: true, served: only4},
		{name: "IPv6 disabled", family: ip.IPv6, noIPv6: true, served: only4},
		{name: "IPv6 no tables", family: ip.IPv6, read: unix.EAFNOSUPPORT, primary: ip.IPv4, served: only4, unread: 1},
		{name: "IPv6 no program", family: ip.IPv6, open: noProgram, primary: ip.IPv4, served: only4, unread: 1},
		{name: "IPv6 no tables, primary is IPv6", family: ip.IPv6, read: unix.EAFNOSUPPORT, primary: ip.IPv6},
		{name: "IPv6 no program, primary is IPv6", family: ip.IPv6, open: noProgram, primary: ip.IPv6},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := plan.Config{Families: slices.Clone(ip.Families)}
			m := machine{Kernel: reconcile.Kernel{NAT: map[ip.Family]reconcile.NAT{}}}
			opener := natOpener{
				hasIPv6: func() bool { return !test.noIPv6 },
				primary: func() ip.Family {
					if test.primary == 0 {
						t.Error("looked up the primary family")
					}
					return test.primary
				},
				open: func(f ip.Family, v nat.Variant) (reconcile.NAT, error) {
					fake := nat.NewFake(f)
					if f == test.family && v == nat.NFT {
						fake.FailObserve = func() error { return test.read }
						return fake, test.open
					}
					return fake, nil
				},
			}
			err := m.openFamilies(context.Background(), &cfg, nat.Choice{Use: nat.NFT, Other: nat.Legacy, HasOther: true}, opener)
			if test.served == nil {
				if want := errors.Join(test.open, test.read).Error(); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), test.family.String()) {
					t.Errorf("ended with %v, want %q about %s", err, want, test.family)
				}
				return
			}
			if err != nil || !slices.Equal(cfg.Families, test.served) || len(m.NAT) != len(test.served) || len(m.Leftovers.NAT) != len(test.served) {
				t.Errorf("%v: serves %v with %v, looks for leftovers in %v; want %v", err, cfg.Families, m.NAT, m.Leftovers.NAT, test.served)
			}
			if len(m.unread) != test.unread {
				t.Errorf("--cleanup would report %v, want %d", m.unread, test.unread)
			}
		})
	}
}

// TestNoFamilyAtStart: a node that has neither family is not asked for its primary one, and each error
// is reported.
func TestNoFamilyAtStart(t *testing.T) {
	cfg := plan.Config{Families: slices.Clone(ip.Families)}
	m := machine{Kernel: reconcile.Kernel{NAT: map[ip.Family]reconcile.NAT{}}}
	err := m.openFamilies(context.Background(), &cfg, nat.Choice{Use: nat.NFT}, natOpener{
		hasIPv6: func() bool { return true },
		primary: func() ip.Family { t.Error("looked up the primary family"); return ip.IPv4 },
		open: func(f ip.Family, _ nat.Variant) (reconcile.NAT, error) {
			return nil, fmt.Errorf("%s: %w", f, exec.ErrNotFound)
		},
	})
	if err == nil || !strings.Contains(err.Error(), "IPv4: ") || !strings.Contains(err.Error(), "IPv6: ") {
		t.Errorf("ended with %v", err)
	}
}

// TestPrimaryFamily: as in kube-proxy, --bind-address decides, then the Node's first address.
func TestPrimaryFamily(t *testing.T) {
	internal := func(address string) corev1.NodeAddress {
		return corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: address}
	}
	external := func(address string) corev1.NodeAddress {
		return corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: address}
	}
	for _, test := range []struct {
		name      string
		bind      string
		addresses []corev1.NodeAddress
		want      ip.Family
	}{
		{"IPv4 first", "", []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "node1"}, internal("192.0.2.1"), internal("2001:db8::1")}, ip.IPv4},
		{"IPv6 first", "", []corev1.NodeAddress{internal("2001:db8::1"), internal("192.0.2.1")}, ip.IPv6},
		{"internal precedes external", "", []corev1.NodeAddress{external("192.0.2.1"), internal("2001:db8::1")}, ip.IPv6},
		{"only external", "", []corev1.NodeAddress{external("2001:db8::1")}, ip.IPv6},
		{"bind address IPv6", "2001:db8::9", []corev1.NodeAddress{internal("192.0.2.1")}, ip.IPv6},
		{"bind address IPv4", "192.0.2.9", []corev1.NodeAddress{internal("2001:db8::1")}, ip.IPv4},
		{"no address", "", []corev1.NodeAddress{}, ip.IPv4},
		{"no Node", "", nil, ip.IPv4},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var bind netip.Addr
				if test.bind != "" {
					bind = netip.MustParseAddr(test.bind)
				}
				began := time.Now()
				got := primaryFamily(t.Context(), bind, nodeLimit, func(context.Context) (*corev1.Node, error) {
					switch {
					case bind.IsValid():
						t.Error("read the Node")
					case test.addresses == nil:
						return nil, nil
					case time.Since(began) < 5*time.Second:
						return nil, errors.New("the API server does not answer yet")
					}
					return &corev1.Node{Status: corev1.NodeStatus{Addresses: test.addresses}}, nil
				})
				if got != test.want || time.Since(began) > time.Minute {
					t.Errorf("%s after %s, want %s", got, time.Since(began), test.want)
				}
			})
		})
	}
}

// An unusable other back end of iptables does not end the process.
func TestLeftoversCannotBeOpened(t *testing.T) {
	cfg := plan.Config{Families: []ip.Family{ip.IPv4}}
	m := machine{Kernel: reconcile.Kernel{NAT: map[ip.Family]reconcile.NAT{}}}
	err := m.openFamilies(context.Background(), &cfg, nat.Choice{Use: nat.Legacy, Other: nat.NFT, HasOther: true}, natOpener{
		hasIPv6: func() bool { return true },
		open: func(f ip.Family, v nat.Variant) (reconcile.NAT, error) {
			if v == nat.NFT {
				return nil, errors.New("too old")
			}
			return nat.NewFake(f), nil
		},
	})
	if err != nil || !m.Leftovers.Unseen || m.Leftovers.NAT != nil {
		t.Errorf("%v, %+v", err, m.Leftovers)
	}
}

// With --init-only, the rules of other programs decide too.
func TestRefusesWithoutTheLoop(t *testing.T) {
	fake := nat.NewFake(ip.IPv4)
	m := machine{Kernel: reconcile.Kernel{NAT: map[ip.Family]reconcile.NAT{ip.IPv4: fake}}}
	ours := nat.Chain{Family: ip.IPv4, Table: nat.Filter, Name: "KUBE-FORWARD"}
	fake.Apply([]nat.Change{
		{Op: nat.WriteChain, Chain: ours, Rules: []nat.Rule{"-j DROP"}},
		{Op: nat.InsertJump, Chain: nat.Chain{Family: ip.IPv4, Table: nat.Filter, Name: "FORWARD"}, Rules: []nat.Rule{"-j KUBE-FORWARD"}},
	})
	if got := m.refuses(t.Context(), []nat.Chain{ours}); got[ip.IPv4] {
		t.Error("our rules count")
	}
	if got := m.refuses(t.Context(), nil); !got[ip.IPv4] {
		t.Error("rules of another program do not count")
	}
	m.Native = unreadable{}
	if got := m.refuses(t.Context(), []nat.Chain{ours}); !got[ip.IPv4] {
		t.Error("unreadable rules do not count")
	}
}

type unreadable struct{}

func (unreadable) Observe() ([]nft.MarkUse, error) { return nil, errors.New("no memory") }

// TestBridgeNetfilter reads the parameters of both families: all must be 1, or writable.
func TestBridgeNetfilter(t *testing.T) {
	for _, tc := range []struct {
		ipv4, ipv6 string // "": the file does not exist
		want       plan.BridgeNetfilter
	}{
		{"1", "1", plan.BridgeEnabled},
		{"0", "1", plan.BridgeAvailable},
		{"1", "0", plan.BridgeAvailable},
		{"1", "", plan.BridgeUnavailable},
		{"", "0", plan.BridgeUnavailable},
		{"", "", plan.BridgeUnavailable},
	} {
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, "net/bridge"), 0o755); err != nil {
			t.Fatal(err)
		}
		for family, value := range map[ip.Family]string{ip.IPv4: tc.ipv4, ip.IPv6: tc.ipv6} {
			if value == "" {
				continue
			}
			if err := os.WriteFile(filepath.Join(root, plan.BridgeSysctls[family]), []byte(value+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		m := machine{sysctl: sysctl.NewAt(root), Kernel: reconcile.Kernel{NAT: map[ip.Family]reconcile.NAT{ip.IPv4: nil, ip.IPv6: nil}}}
		if got := m.bridgeNetfilter(); got != tc.want {
			t.Errorf("IPv4 %q, IPv6 %q: %d, want %d", tc.ipv4, tc.ipv6, got, tc.want)
		}
	}
}

// TestNoNFT checks that without nft only node ports on the loopback address are missing.
func TestNoNFT(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	cfg := plan.Config{LocalhostNodePorts: true}
	var m machine
	m.openLoopback(context.Background(), &cfg)
	if cfg.LocalhostNodePorts || m.Loopback != nil {
		t.Errorf("node ports on the loopback address: %v, written by %v", cfg.LocalhostNodePorts, m.Loopback)
	}
}

// TestLegacyWithoutTables has a kernel without IPv6 tables. iptables-legacy-save succeeds there: it lists
// only tables that are loaded.
func TestLegacyWithoutTables(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"iptables", "ip6tables"} {
		script := "#!/bin/sh\n[ \"$1\" = --version ] && { echo '" + name + " v1.8.9 (legacy)'; exit 0; }\n"
		if name == "ip6tables" {
			script += "echo \"ip6tables v1.8.9 (legacy): can't initialize ip6tables table 'nat': Table does not exist (do you need to insmod?)\" >&2\nexit 3\n"
		}
		for _, suffix := range []string{"", "-save", "-restore"} {
			if err := os.WriteFile(filepath.Join(dir, name+"-legacy"+suffix), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	m := machine{Kernel: reconcile.Kernel{NAT: map[ip.Family]reconcile.NAT{}}}
	cfg := plan.Config{Families: slices.Clone(ip.Families)}
	if err := m.openFamilies(context.Background(), &cfg, nat.Choice{Use: nat.Legacy, Unseen: true}, natOpener{
		open:    func(f ip.Family, v nat.Variant) (reconcile.NAT, error) { return nat.Open(f, v) },
		hasIPv6: func() bool { return true },
		primary: func() ip.Family { return ip.IPv4 },
	}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(cfg.Families, []ip.Family{ip.IPv4}) {
		t.Errorf("families %v are served, want IPv4", cfg.Families)
	}
}

func TestIsOne(t *testing.T) {
	dir := t.TempDir()
	for text, want := range map[string]bool{"1\n": true, "0\n": false, "": false} {
		file := filepath.Join(dir, "disable_ipv6")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := isOne(file); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	if isOne(filepath.Join(dir, "missing")) {
		t.Error("a missing file counts as 1")
	}
}
