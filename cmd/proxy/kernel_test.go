package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// TestUnreadableAtStart makes opening and reading the rules of each family fail, with
// each error, when the process starts. Only IPv6 may be left out, and only if the node
// has none. Any other error ends the process before it writes anything.
func TestUnreadableAtStart(t *testing.T) {
	killed := errors.New("signal: killed")
	incompatible := errors.New("table filter has a rule, written by nft, that iptables cannot read")
	noProgram := fmt.Errorf("ip6tables: %w: install the package iptables", exec.ErrNotFound)
	for _, test := range []struct {
		name       string
		family     ip.Family
		open, read error
		noIPv6     bool
		served     []ip.Family // nil: the process ends
		unread     int
	}{
		{name: "all is well", family: ip.IPv4, served: ip.Families},
		{name: "IPv4 incompatible", family: ip.IPv4, read: incompatible},
		{name: "IPv4 killed", family: ip.IPv4, read: killed},
		{name: "IPv4 busy", family: ip.IPv4, read: unix.EBUSY},
		{name: "IPv4 no memory", family: ip.IPv4, read: unix.ENOMEM},
		{name: "IPv4 no family", family: ip.IPv4, read: unix.EAFNOSUPPORT},
		{name: "IPv4 no program", family: ip.IPv4, open: fmt.Errorf("iptables: %w", exec.ErrNotFound)},
		{name: "IPv4 not permitted", family: ip.IPv4, read: unix.EPERM},
		{name: "IPv6 incompatible", family: ip.IPv6, read: incompatible},
		{name: "IPv6 killed", family: ip.IPv6, read: killed},
		{name: "IPv6 busy", family: ip.IPv6, read: unix.EBUSY},
		{name: "IPv6 no table", family: ip.IPv6, read: unix.ENOENT},
		{name: "IPv6 not permitted", family: ip.IPv6, read: unix.EPERM},
		{name: "IPv6 no family", family: ip.IPv6, read: unix.EAFNOSUPPORT, noIPv6: true, served: []ip.Family{ip.IPv4}},
		{name: "IPv6 disabled", family: ip.IPv6, noIPv6: true, served: []ip.Family{ip.IPv4}},
		{name: "IPv6 no tables", family: ip.IPv6, read: unix.EAFNOSUPPORT, served: []ip.Family{ip.IPv4}, unread: 1},
		{name: "IPv6 no program", family: ip.IPv6, open: noProgram, served: []ip.Family{ip.IPv4}, unread: 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := plan.Config{Families: slices.Clone(ip.Families)}
			m := machine{Kernel: reconcile.Kernel{NAT: map[ip.Family]reconcile.NAT{}}}
			opener := natOpener{
				hasIPv6: func() bool { return !test.noIPv6 },
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
