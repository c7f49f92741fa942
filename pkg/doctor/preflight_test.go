package doctor

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

func TestPreflight(t *testing.T) {
	fit := func() *Preflight {
		return &Preflight{
			Release: "6.1.0", Modules: []Module{{Name: "ip_vs", Loaded: true, There: true}, {Name: "dummy", There: true}, {Name: "br_netfilter", There: true, Optional: true}},
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
		"fit":              {func(*Preflight) {}, "OK kernel: 6.1.0 has all required modules, 1 of 3 are loaded"},
		"no ip_vs":         {func(p *Preflight) { p.Modules[0] = Module{Name: "ip_vs", Why: "virtual servers"} }, "warning kernel: no module ip_vs is found"},
		"no br_netfilter":  {func(p *Preflight) { p.Modules[2].There = false }, "warning kernel: has no module br_netfilter"},
		"no iptables":      {func(p *Preflight) { p.IPTables, p.Use = nil, "" }, "error iptables: not found"},
		"legacy rules":     {func(p *Preflight) { p.IPTables[1].Rules = 4 }, "note iptables: iptables-legacy also has 4 rules of service proxies"},
		"unseen rules":     {func(p *Preflight) { p.Unseen = true }, "warning iptables: the other back end may have rules"},
		"port is taken":    {func(p *Preflight) { p.Taken = "in use" }, "error ports: 127.0.0.1:10266, for probes, is taken: in use"},
		"Cilium":           {func(p *Preflight) { p.Links = []string{"eth0", "cilium_host"} }, "warning network: Cilium runs here"},
		"a conflict":       {func(p *Preflight) { p.Warnings = []string{"uses our bits"} }, "warning conflict: uses our bits"},
		"no API server":    {func(p *Preflight) { p.Err = errors.New("no answer") }, "error plan: cannot be compared with the kernel: no answer"},
		"ip_vs not loaded": {func(p *Preflight) { p.NotCompared = true }, "note plan: not compared"},
		"unusable":         {func(p *Preflight) { p.Unusable = errors.New("bad document") }, "warning Services: bad document"},
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
	write(filepath.Join(lib, "6.1/modules.builtin"), "kernel/net/netfilter/ipset/ip_set.ko\nkernel/net/bridge/br-netfilter.ko\n")
	var there, loaded []string
	for _, m := range FindModules(sys, lib, "6.1", "rr") {
		if m.There {
			there = append(there, m.Name)
		}
		if m.Loaded {
			loaded = append(loaded, m.Name)
		}
	}
	if want := []string{"ip_vs", "ip_vs_rr", "nf_conntrack", "ip_set", "dummy", "br_netfilter"}; !slices.Equal(there, want) {
		t.Errorf("there are %q, want %q", there, want)
	}
	if want := []string{"nf_conntrack"}; !slices.Equal(loaded, want) {
		t.Errorf("loaded are %q, want %q", loaded, want)
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
