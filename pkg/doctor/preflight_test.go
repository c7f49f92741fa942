package doctor

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

func TestPreflight(t *testing.T) {
	fit := func() *Preflight {
		return &Preflight{
			Release: "6.1.0", Modules: []Module{{Name: "ip_vs", Loaded: true, There: true, Required: true}, {Name: "dummy", There: true, Required: true}, {Name: "br_netfilter", There: true}},
			IPTables: []Variant{{"iptables-nft", "iptables v1.8.9 (nf_tables)", 9}, {"iptables-legacy", "iptables v1.8.9 (legacy)", 0}}, Use: "iptables-nft", UseWhy: "kubelet's hint is there",
			Answers: []Answer{{10249, "ipvs"}}, Probes: netip.MustParseAddrPort("127.0.0.1:10266"), APIServer: "192.0.2.1:6443",
			Services: 3, Changes: []inspect.Change{{Part: "ipvs", Operation: "add virtual server", What: "add virtual server TCP 10.96.0.1:443 rr"}},
			Modes: []plan.InterfaceMode{{Family: ip.IPv4, Link: "eth1", Mode: plan.SNATFWMark}},
		}
	}
	for name, c := range map[string]struct {
		change func(*Preflight)
		want   string // the first finding
	}{
		"fit": {func(*Preflight) {}, "OK kernel: 6.1.0 has all 3 modules that kube-ipvs uses, 1 are loaded"},
		"no ip_vs": {func(p *Preflight) {
			p.Modules[0] = Module{Name: "ip_vs", Required: true, Why: "virtual servers"}
		}, "error kernel: has no module ip_vs, for virtual servers"},
		"unknown modules": {func(p *Preflight) {
			p.Modules[0] = Module{Name: "ip_vs", Required: true, Unknown: true}
			p.Modules[2] = Module{Name: "br_netfilter", Unknown: true}
		}, "warning kernel: modules are not loaded, and those of 6.1.0 cannot be listed below /lib/modules: ip_vs, br_netfilter"},
		"no br_netfilter": {func(p *Preflight) { p.Modules[2].There = false }, "warning kernel: has no module br_netfilter. Lost: "},
		"no iptables":     {func(p *Preflight) { p.IPTables, p.Use = nil, "" }, "error iptables: not found"},
		"legacy rules":    {func(p *Preflight) { p.IPTables[1].Rules = 4 }, "note iptables: iptables-legacy also has 4 rules of service proxies"},
		"unseen rules":    {func(p *Preflight) { p.Unseen = true }, "warning iptables: the other back end may have rules"},
		"port is taken":   {func(p *Preflight) { p.Taken = "in use" }, "error ports: 127.0.0.1:10266, for probes, is taken: in use"},
		"Cilium":          {func(p *Preflight) { p.Links = []string{"eth0", "cilium_host"} }, "warning network: Cilium runs here"},
		"a conflict":      {func(p *Preflight) { p.Warnings = []string{"uses our bits"} }, "warning conflict: uses our bits"},
		"no API server":   {func(p *Preflight) { p.Err = errors.New("no answer") }, "error plan: cannot be compared with the kernel: no answer"},
		"ip_vs not loaded": {func(p *Preflight) {
			p.Modules[0].Why, p.Unloaded = "virtual servers", []string{"ip_vs"}
		}, "note plan: ip_vs is not loaded, so the kernel has no virtual servers yet; preflight loads no module"},
		"unusable": {func(p *Preflight) { p.Unusable = errors.New("bad document") }, "warning Services: bad document"},
		"the cluster IP": {func(p *Preflight) {
			p.APIServer, p.ClusterIPs = "10.96.0.1:443", []netip.Addr{netip.MustParseAddr("10.96.0.1")}
		}, "warning API server: 10.96.0.1:443 is a cluster IP"},
		"no probes":          {func(p *Preflight) { p.Probes = netip.AddrPort{} }, "note ports: probes are disabled"},
		"kube-proxy is gone": {func(p *Preflight) { p.Answers = nil }, "note kube-proxy: not found"},
	} {
		t.Run(name, func(t *testing.T) {
			p := fit()
			c.change(p)
			first := p.Findings()[0]
			if got := string(first.Severity) + " " + first.About + ": " + first.What; !strings.HasPrefix(got, c.want) {
				t.Errorf("found %q, want %q", got, c.want)
			}
			if want := strings.HasPrefix(c.want, "error"); Sick(p.Findings()) != want {
				t.Errorf("sick: %t", !want)
			}
		})
	}
	var text strings.Builder
	_ = Write(&text, fit().Findings())
	for _, want := range []string{"runs in mode ipvs", "eth1 (IPv4: reply routing)", "3 Services; changes of the first sync: ipvs: add virtual server 1"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is not in\n%s", want, text.String())
		}
	}
}

func TestFindModules(t *testing.T) {
	sys, lib := t.TempDir(), t.TempDir()
	write := func(file, text string) {
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(sys, "nf_conntrack/refcnt"), "1")
	write(filepath.Join(lib, "6.1/modules.dep"), "kernel/net/netfilter/ipvs/ip_vs.ko.xz: kernel/net/netfilter/nf_conntrack.ko.xz\nkernel/drivers/net/dummy.ko:\nkernel/net/netfilter/ipvs/ip_vs_rr.ko:\n")
	write(filepath.Join(lib, "6.1/modules.builtin"), "kernel/net/netfilter/ipset/ip_set.ko\nkernel/net/bridge/br-netfilter.ko\nkernel/net/ipv4/netfilter/ipt_MASQUERADE.ko\nkernel/net/netfilter/ipset/ip_set_bitmap_port.ko\n")
	var missing, loaded []string
	for _, m := range FindModules(sys, lib, "6.1", "rr") {
		if !m.There && m.Required {
			missing = append(missing, m.Name)
		}
		if m.Loaded {
			loaded = append(loaded, m.Name)
		}
		if m.Unknown {
			t.Errorf("%s is unknown", m.Name)
		}
		if optional := []string{"ip_set_hash_net", "ip_vs_rr", "br_netfilter", "ip6t_REJECT", "xt_REDIRECT"}; m.Required && slices.Contains(optional, m.Name) {
			t.Errorf("%s is required", m.Name)
		}
		if m.There != slices.Contains([]string{"ip_vs", "ip_vs_rr", "nf_conntrack", "ip_set", "dummy", "br_netfilter", "xt_MASQUERADE", "ip_set_bitmap_port"}, m.Name) {
			t.Errorf("%s is there: %t", m.Name, m.There)
		}
	}
	if want := []string{"ip_set_hash_ipport", "xt_set"}; !slices.Equal(missing, want) {
		t.Errorf("missing are %q, want %q", missing, want)
	}
	if want := []string{"nf_conntrack"}; !slices.Equal(loaded, want) {
		t.Errorf("loaded are %q, want %q", loaded, want)
	}
	for _, m := range FindModules(sys, lib, "5.10", "rr") {
		if m.There != m.Loaded || m.Unknown == m.There {
			t.Errorf("%+v, although the kernel's modules are unknown", m)
		}
	}
	for scheduler, want := range map[string]bool{"rr": false, "lc": true} {
		if got := LacksScheduler(sys, lib, "6.1", scheduler); got != want {
			t.Errorf("the kernel lacks %s: %t", scheduler, got)
		}
	}
	if LacksScheduler(sys, lib, "5.10", "lc") {
		t.Error("a scheduler is missing, although the kernel's modules are unknown")
	}
}

// TestModulesOfParts checks that preflight looks for the module of each set type and
// extension whose loss doctor reports.
func TestModulesOfParts(t *testing.T) {
	var names []string
	for _, m := range modules("rr") {
		if slices.Contains(names, m.Name) || m.Why == "" {
			t.Errorf("%s is listed twice, or has no reason: %q", m.Name, m.Why)
		}
		names = append(names, m.Name)
	}
	for _, want := range []string{
		"ip_set_hash_ipport", "ip_set_hash_ipportip", "ip_set_hash_ipportnet", "ip_set_hash_ip", "ip_set_hash_net", "ip_set_bitmap_port",
		"xt_set", "xt_conntrack", "xt_mark", "xt_connmark", "xt_addrtype", "xt_ipvs", "xt_MASQUERADE", "xt_nat", "xt_REDIRECT", "ipt_REJECT", "ip6t_REJECT",
	} {
		if !slices.Contains(names, want) {
			t.Errorf("%s is not among %q", want, names)
		}
	}
	if slices.Contains(names, "xt_comment") {
		t.Error("xt_comment is listed, although nothing is lost without it")
	}
}

// TestLackingParts has kernels with and without nf_tables' interface to extensions.
func TestLackingParts(t *testing.T) {
	modules := kernelModules{t.TempDir(), "kernel/net/netfilter/xt_mark.ko:\nkernel/net/ipv4/netfilter/ipt_MASQUERADE.ko:\n" +
		"kernel/net/netfilter/xt_nat.ko:\nkernel/net/netfilter/xt_REDIRECT.ko:\nkernel/net/netfilter/xt_TCPMSS.ko:\nkernel/net/ipv6/netfilter/ip6t_REJECT.ko:\n"}
	legacy := legacyParts{matches: []string{"set", "conntrack", "connmark", "addrtype", "ipvs"}, targets: []string{"SET", "CONNMARK"}}
	answer := func(err, other error) func(ip.Family, string, bool) error {
		return func(_ ip.Family, name string, _ bool) error {
			if name == "REDIRECT" {
				return err
			}
			return other
		}
	}
	for name, c := range map[string]struct {
		ask     func(ip.Family, string, bool) error
		modules kernelModules
		want    []string
	}{
		"nf_tables":             {answer(unix.ENOENT, unix.EPROTONOSUPPORT), modules, []string{"REDIRECT"}},
		"no nft_compat":         {answer(unix.ENOENT, unix.ENOENT), modules, []string{"comment", "REJECT"}},
		"no nf_tables":          {answer(unix.EINVAL, unix.EINVAL), modules, []string{"comment", "REJECT"}},
		"no nf_tables, no list": {answer(unix.EINVAL, unix.EINVAL), kernelModules{}, nil},
	} {
		if got := lackingParts(ip.IPv4, c.ask, legacy, c.modules); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestReadLegacy(t *testing.T) {
	proc := t.TempDir()
	for name, text := range map[string]string{"ip_tables_matches": "tcp\nset\n", "ip6_tables_targets": "SET\n"} {
		if err := os.WriteFile(filepath.Join(proc, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	set, target := part{name: "set"}, part{name: "SET", target: true}
	if l := readLegacy(proc, ip.IPv4); !l.has(set) || l.has(target) {
		t.Errorf("IPv4: %+v", l)
	}
	if l := readLegacy(proc, ip.IPv6); l.has(set) || !l.has(target) {
		t.Errorf("IPv6: %+v", l)
	}
}
