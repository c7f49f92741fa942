package proxy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// onDemand returns a machine whose Services need all rules on demand.
func onDemand(t *testing.T) *machine {
	m := two(t)
	svc, slice := exposed("six", 3, nil, at("fd00:10:244::3", "fd00:10:244:1::3")...)
	slice.AddressType = discoveryv1.AddressTypeIPv6
	m.set(svc, slice)
	m.cfg.VIPs.LoadBalancers = plan.ClaimAuto
	m.running = true
	m.Sysctl.Set("net/ipv4/conf/eth0/src_valid_mark", "0")
	return m
}

// demand adds a member to a set of plan.Demands, as its rule does.
func (m *machine) demand(d plan.Demand, f ip.Family) {
	set := ipset.Set{Name: d.Set.In(f), Type: ipset.HashIP, Family: f}
	address := netip.MustParseAddr(map[ip.Family]string{ip.IPv4: "203.0.113.2", ip.IPv6: "fd00:203::2"}[f])
	if failures := m.IPSet.Apply([]ipset.Change{{Op: ipset.AddEntry, Set: set, Entry: ipset.Entry{Addr: address}}}); len(failures) > 0 {
		m.t.Fatal(failures)
	}
}

// look lets the process do what it does each second.
func (m *machine) look() {
	next, _ := m.process.reconciler.Next(time.Now())
	m.process.step(m.context(), next.Add(time.Second))
}

// demands reports whether the rules of a demand are written, and whether any rule asks for
// them.
func (m *machine) demands(d plan.Demand, f ip.Family) (written, asks bool) {
	text := m.NAT[f].Save()
	_, table, _ := strings.Cut(text, "*"+string(d.Table)+"\n")
	table, _, _ = strings.Cut(table, "COMMIT\n")
	return strings.Contains(table, ":"+d.Chain+" "), strings.Contains(text, "--add-set "+d.Set.In(f)+" ")
}

func (m *machine) checkDemand(when string, d plan.Demand, f ip.Family, want bool) {
	m.t.Helper()
	if written, asks := m.demands(d, f); written != want || asks == want {
		m.t.Errorf("%s: %s: rules are written: %t, asked for: %t; want %t and %t", when, d.Set.In(f), written, asks, want, !want)
	}
	skips := 0
	state, err := m.Routing.Observe()
	if err != nil {
		m.t.Fatal(err)
	}
	for r := range state.Rules {
		if r.Family == f && r.Action == routing.SkipLocal {
			skips++
		}
	}
	if d.Set == plan.DemandedVIPs && (skips > 0) != want {
		m.t.Errorf("%s: %d policy rules skip table local", when, skips)
	}
}

// TestRulesOnDemand: the rules are written within a look after a packet asked for them, stay
// over restarts, and are no difference. The kernel's member stays.
func TestRulesOnDemand(t *testing.T) {
	for _, d := range plan.Demands {
		for _, f := range ip.Families {
			t.Run(d.Set.In(f), func(t *testing.T) {
				m := onDemand(t)
				m.boot()
				m.checkDemand("at the start", d, f, false)
				m.look()
				m.checkDemand("after a look", d, f, false)
				m.demand(d, f)
				m.look()
				m.checkDemand("asked", d, f, true)
				for _, other := range plan.Demands {
					if other != d {
						m.checkDemand("another was asked for", other, f, false)
					}
				}
				m.pass()
				m.checkDemand("compared", d, f, true)
				if before := m.kernel(); !strings.Contains(before, "203.0.113.2") {
					t.Errorf("the member is gone:\n%s", before)
				}
				m.boot()
				m.checkDemand("restarted", d, f, true)
				m.OnChange = func(operation string) error {
					t.Errorf("%s, after a restart", operation)
					return nil
				}
				m.pass()
				if len(m.errors) > 0 {
					t.Error(m.errors)
				}
			})
		}
	}
}

// TestRulesAtOnce: the rules are written at once if nothing would read the demand, if no rule
// can express it, and if an older version has written them.
func TestRulesAtOnce(t *testing.T) {
	for name, prepare := range map[string]func(*machine){
		"--once": func(m *machine) { m.running = false },
		"no target SET": func(m *machine) {
			for _, f := range m.NAT {
				f.Lacks = func(r nat.Rule) error {
					if strings.Contains(string(r), "--add-set") {
						return unix.ENOENT
					}
					return nil
				}
			}
		},
		"the sets cannot be created": func(m *machine) {
			m.refuse(func(operation string) error {
				if strings.Contains(operation, "create") && strings.Contains(operation, "DEMAND") {
					return errors.New("refused")
				}
				return nil
			})
		},
		"an older version": func(m *machine) {
			m.running = false
			m.boot()
			for _, d := range plan.Demands {
				for _, f := range ip.Families {
					m.IPSet.Apply([]ipset.Change{{Op: ipset.DestroySet, Set: ipset.Set{Name: d.Set.In(f)}}})
				}
			}
			m.running = true
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := onDemand(t)
			prepare(m)
			m.boot()
			m.pass()
			for _, d := range plan.Demands {
				for _, f := range ip.Families {
					if written, _ := m.demands(d, f); !written {
						t.Errorf("the rules of %s are not written", d.Set.In(f))
					}
				}
			}
		})
	}
}

// TestRulesOnDemandOrder: the rule that drops the packet is deleted after the demanded rules
// were written, so that no packet is refused in between.
func TestRulesOnDemandOrder(t *testing.T) {
	m := onDemand(t)
	m.boot()
	written, deleted := -1, -1 // the number of restores before
	m.refuse(func(operation string) error {
		switch restores := m.NAT[ip.IPv4].Restores(); {
		case strings.HasPrefix(operation, "write chain IPv4 mangle/KUBE-IPVS-FOREIGN"):
			written = restores
		case strings.HasPrefix(operation, "delete chain IPv4 filter/KUBE-IPVS-DEMAND"):
			deleted = restores
		}
		return nil
	})
	m.demand(plan.Demands[0], ip.IPv4)
	m.look()
	if written < 0 || deleted <= written {
		t.Errorf("the rules are written by restore %d, and the other one is deleted by restore %d", written+1, deleted+1)
	}
}

// TestCleanupForgetsDemands: after a cleanup, the rules are written on demand again.
func TestCleanupForgetsDemands(t *testing.T) {
	m := onDemand(t)
	m.boot()
	m.demand(plan.Demands[0], ip.IPv4)
	m.look()
	if _, err := reconcile.Cleanup(&m.cfg, m.options(nil).Kernel); err != nil {
		t.Fatal(err)
	}
	m.boot()
	m.checkDemand("after a cleanup", plan.Demands[0], ip.IPv4, false)
}

// TestDemandAndMarkOfAnotherProgram: packets with a mark that another program sets must not skip
// table local. While it does, ports of another device are refused, as under kube-proxy.
func TestDemandAndMarkOfAnotherProgram(t *testing.T) {
	d := plan.Demands[0]
	for rule, taken := range map[string]bool{
		"-i eth0 -j MARK --set-xmark 0x4/0xffffffff":         true,
		"-i eth0 -j MARK --set-xmark 0x6/0x6":                true,
		"-m mark --mark 0x15 -j ACCEPT":                      true,
		"-i eth0 -j CONNMARK --set-xmark 0x104/0x104":        true,
		"-i eth0 -j MARK --set-xmark 0x1/0xffffffff":         false,
		"-i eth0 -j MARK --set-xmark 0xc/0xc":                false,
		"-i eth0 -j MARK --set-xmark 0x100000/0xfff00000":    false,
		"-i eth0 -j CONNMARK --set-xmark 0x80/0x80":          false,
		"-m conntrack --ctstate NEW -j CONNMARK --save-mark": false,
	} {
		t.Run(rule, func(t *testing.T) {
			m := onDemand(t)
			restore := func(op string) {
				if err := m.NAT[ip.IPv4].Restore("*mangle\n" + op + " PREROUTING " + rule + "\nCOMMIT\n"); err != nil {
					t.Fatal(err)
				}
			}
			restore("-A")
			m.boot()
			m.demand(d, ip.IPv4)
			m.look()
			if written, asks := m.demands(d, ip.IPv4); written == taken || asks {
				t.Errorf("rules are written: %t, asked for: %t", written, asks)
			}
			if !taken {
				return
			}
			m.boot()
			restore("-D")
			m.pass()
			m.look()
			m.checkDemand("without the rule", d, ip.IPv4, true)
			m.boot()
			restore("-A")
			m.pass()
			if written, asks := m.demands(d, ip.IPv4); written || asks {
				t.Errorf("with the rule again, rules are written: %t, asked for: %t", written, asks)
			}
		})
	}
}
