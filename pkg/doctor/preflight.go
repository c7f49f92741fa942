package doctor

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Preflight is the input of the checks of a node on which kube-proxy runs and kube-ipvs
// is to replace it.
type Preflight struct {
	Release string // of the kernel
	Modules []Module
	// IPTables are the installed iptables back ends with their versions and their
	// number of rules of service proxies. Use is the one that kube-ipvs will use, or
	// "", and UseWhy the reason. Unseen reports that a back end whose programs are not
	// installed may have rules.
	IPTables    []Variant
	Use, UseWhy string
	Unseen      bool
	// Answers are programs on kube-proxy's ports. PIDs are the visible processes of
	// kube-proxy.
	Answers []Answer
	PIDs    []int
	Links   []string // names of interfaces
	// Probes is the address for probes. Taken names its current user, or is "".
	Probes netip.AddrPort
	Taken  string
	// Config is the configuration of kube-ipvs. APIServer is the address of the API
	// server in it.
	Config    plan.Config
	APIServer string
	// Result of a dry run. Err is the reason if there was none.
	Err error
	// Unloaded are modules whose state the dry run took for empty, because reading it
	// would load them.
	Unloaded []string
	Unusable error
	Services int
	// ClusterIPs are the cluster IPs of all Services.
	ClusterIPs []netip.Addr
	Changes    []inspect.Change
	Warnings   []string
	Modes      []plan.InterfaceMode
	Conflicts  []event.Warning
}

// Module is a kernel module that kube-ipvs requires or uses.
type Module struct {
	Name   string
	Loaded bool
	There  bool // can be loaded
	// Unknown reports that the kernel's modules cannot be listed. A module that is not
	// loaded may be built in.
	Unknown  bool
	Required bool   // kube-ipvs does not serve without it
	Why      string // it is needed
}

// Variant is an iptables back end.
type Variant struct {
	Name    string // iptables, iptables-nft or iptables-legacy
	Version string
	Rules   int // of service proxies
}

// modules are the modules that kube-ipvs requires or uses.
func modules(scheduler string) []Module {
	list := []Module{
		{Name: "ip_vs", Required: true, Why: "virtual servers"},
		{Name: "nf_conntrack", Required: true, Why: "masquerading"},
		{Name: "ip_set", Required: true, Why: "sets"},
		{Name: "ip_set_hash_ipport", Required: true, Why: "sets of Services"},
		{Name: "xt_set", Required: true, Why: "rules that match sets"},
		{Name: "dummy", Required: true, Why: "the interface kube-ipvs0"},
		{Name: "ip_vs_" + scheduler, Why: "the configured scheduler; Services are served with another one"},
		{Name: "br_netfilter", Why: "Service traffic between pods on one bridge"},
		{Name: "nf_conntrack_netlink", Why: "deleting the flows of removed UDP endpoints"},
	}
	add := func(name, lost string) {
		if lost != "" && !slices.ContainsFunc(list, func(m Module) bool { return m.Name == name }) {
			list = append(list, Module{Name: name, Why: lost})
		}
	}
	for _, t := range setTypes {
		add("ip_set_"+strings.NewReplacer(":", "_", ",", "").Replace(string(t.kind)), t.lost)
	}
	for _, p := range parts {
		for _, family := range ip.Families {
			add(p.modules(family)[0], p.lost)
		}
	}
	return list
}

// Where Linux lists its modules: those that are loaded, and those that can be loaded or are built in.
const (
	LoadedModules    = "/sys/module"
	InstalledModules = "/lib/modules"
)

// FindModules looks for kernel modules below /sys/module and /lib/modules.
func FindModules(sys, lib, release, scheduler string) []Module {
	list := modules(scheduler)
	known := readModules(sys, lib, release)
	for i := range list {
		m := &list[i]
		names := []string{m.Name}
		for _, p := range parts {
			if p.module == m.Name {
				names = p.modules(ip.IPv4)
			}
		}
		m.Loaded = slices.ContainsFunc(names, known.isLoaded)
		m.There = m.Loaded || slices.ContainsFunc(names, known.isListed)
		m.Unknown = !m.There && known.list == ""
	}
	return list
}

// LacksScheduler reports whether the kernel has no module for an IPVS scheduler. It returns
// false if that is unknown, because /lib/modules cannot be read.
func LacksScheduler(sys, lib, release, scheduler string) bool {
	return readModules(sys, lib, release).lack("ip_vs_" + scheduler)
}

// kernelModules are the modules that a kernel has.
type kernelModules struct {
	sys  string // a folder with those that are loaded
	list string // of all that are built in or can be loaded; "" if one of the two is unknown
}

func readModules(sys, lib, release string) kernelModules {
	var list strings.Builder
	for _, name := range []string{"modules.dep", "modules.builtin"} {
		text, err := os.ReadFile(filepath.Join(lib, release, name))
		if err != nil {
			return kernelModules{sys: sys}
		}
		list.Write(text)
	}
	return kernelModules{sys, list.String()}
}

// lack reports whether the kernel has none of the modules. It returns false if that is unknown.
func (k kernelModules) lack(names ...string) bool {
	return k.list != "" && !slices.ContainsFunc(names, k.isLoaded) && !slices.ContainsFunc(names, k.isListed)
}

func (k kernelModules) isLoaded(name string) bool {
	_, err := os.Stat(filepath.Join(k.sys, name))
	return err == nil
}

func (k kernelModules) isListed(name string) bool {
	pattern := regexp.MustCompile(`(?m)(^|/)` + strings.ReplaceAll(regexp.QuoteMeta(name), "_", "[-_]") + `\.ko`)
	return pattern.MatchString(k.list)
}

// Release returns the release of the running kernel.
func Release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Findings returns problems, the worst first, and OK for each check that has passed.
func (p *Preflight) Findings() []Finding {
	out := p.kernel()
	out = append(out, p.iptables()...)
	out = append(out, p.proxy()...)
	out = append(out, p.network()...)
	out = append(out, p.ports()...)
	out = append(out, p.source()...)
	out = append(out, p.plan()...)
	rank := []Severity{Error, Warning, Note, OK}
	slices.SortStableFunc(out, func(a, b Finding) int { return slices.Index(rank, a.Severity) - slices.Index(rank, b.Severity) })
	return out
}

func (p *Preflight) kernel() []Finding {
	const fix = "install the kernel's modules (often in the package kernel-modules-extra or linux-modules-extra)"
	var out []Finding
	var unknown []string
	loaded := 0
	for _, m := range p.Modules {
		if m.Loaded {
			loaded++
		}
		switch {
		case m.There:
		case m.Unknown:
			unknown = append(unknown, m.Name)
		case m.Required:
			out = append(out, Finding{Error, "kernel", fmt.Sprintf("has no module %s, for %s", m.Name, m.Why), fix})
		default:
			out = append(out, Finding{Warning, "kernel", fmt.Sprintf("has no module %s. Lost: %s", m.Name, m.Why), fix})
		}
	}
	if len(unknown) > 0 {
		out = append(out, Finding{Warning, "kernel", fmt.Sprintf("modules are not loaded, and those of %s cannot be listed below /lib/modules: %s", p.Release, strings.Join(unknown, ", ")),
			fix + ", unless they are built in"})
	}
	if len(out) == 0 {
		out = append(out, Finding{OK, "kernel", fmt.Sprintf("%s has all %d modules that kube-ipvs uses, %d are loaded", p.Release, len(p.Modules), loaded), ""})
	}
	return out
}

// iptables reports which back end is used and where rules of service proxies are.
func (p *Preflight) iptables() []Finding {
	if p.Use == "" {
		return []Finding{{Error, "iptables", "not found", "install the package iptables"}}
	}
	var out []Finding
	if p.Unseen {
		out = append(out, Finding{Warning, "iptables", "the other back end may have rules, and its programs are not installed: those of kube-proxy would remain", "install iptables-nft and iptables-legacy, or run kube-proxy --cleanup in its own image"})
	}
	what := p.Use
	for _, v := range p.IPTables {
		switch {
		case v.Name == p.Use:
			what = fmt.Sprintf("%s (%s), %s, with %d rules of service proxies", v.Name, v.Version, p.UseWhy, v.Rules)
		case v.Rules > 0:
			out = append(out, Finding{Note, "iptables", fmt.Sprintf("%s also has %d rules of service proxies; kube-ipvs removes those of kube-proxy when it starts", v.Name, v.Rules), ""})
		}
	}
	return append(out, Finding{OK, "iptables", what, ""})
}

func (p *Preflight) proxy() []Finding {
	for _, a := range p.Answers {
		if a.Mode != "" {
			return []Finding{{OK, "kube-proxy", fmt.Sprintf("runs in mode %s; stop it once kube-ipvs runs", a.Mode), ""}}
		}
	}
	if len(p.PIDs) > 0 {
		return []Finding{{OK, "kube-proxy", fmt.Sprintf("runs (process %d); stop it once kube-ipvs runs", p.PIDs[0]), ""}}
	}
	return []Finding{{Note, "kube-proxy", "not found: it does not run, or neither its port 10249 nor its process is visible", ""}}
}

// network reports how the node's interfaces are understood.
func (p *Preflight) network() []Finding {
	var out []Finding
	if slices.Contains(p.Links, "cilium_host") {
		out = append(out, Finding{Warning, "network", "Cilium runs here: with its kube-proxy replacement it serves Services itself, before IPVS sees them",
			"see kubeProxyReplacement in cilium status"})
	}
	var modes []string
	for _, m := range p.Modes {
		how := map[plan.SNATMode]string{
			plan.SNATSource: "its own source address", plan.SNATFWMark: "reply routing", plan.SNATOff: "plain masquerading: replies may be lost",
		}[m.Mode]
		modes = append(modes, fmt.Sprintf("%s (%s: %s)", m.Link, m.Family, how))
	}
	switch {
	case p.Err != nil:
	case len(modes) == 0:
		out = append(out, Finding{OK, "network", "one uplink, no secondary interfaces with their own routing table", ""})
	default:
		out = append(out, Finding{OK, "network", "secondary interfaces with their own routing table: " + strings.Join(modes, ", "), ""})
	}
	for _, w := range p.Warnings {
		out = append(out, Finding{Warning, "conflict", w, ""})
	}
	if p.Err == nil && len(p.Warnings) == 0 {
		out = append(out, Finding{OK, "marks", "no other program uses our mark bits, rule priorities or routing table", ""})
	}
	return out
}

func (p *Preflight) ports() []Finding {
	if !p.Probes.IsValid() {
		return []Finding{{Note, "ports", "probes are disabled by the configuration: the kubelet cannot probe kube-ipvs, and kube-ipvs status does not work", ""}}
	}
	if p.Taken != "" {
		return []Finding{{Error, "ports", fmt.Sprintf("%s, for probes, is taken: %s", p.Probes, p.Taken), "choose another --probe-bind-address"}}
	}
	return []Finding{{OK, "ports", fmt.Sprintf("%s, for probes, is free", p.Probes), ""}}
}

// source checks how the API server is reached: kube-ipvs serves the cluster IP and
// cannot depend on it when it starts.
func (p *Preflight) source() []Finding {
	if p.APIServer == "" {
		return nil
	}
	if at, err := netip.ParseAddrPort(p.APIServer); err == nil && slices.Contains(p.ClusterIPs, at.Addr()) {
		return []Finding{{Warning, "API server", p.APIServer + " is a cluster IP, which kube-ipvs itself serves: after a reboot it could not start", "use the API server's own address in the kubeconfig"}}
	}
	return []Finding{{OK, "API server", "is reached by " + p.APIServer, ""}}
}

func (p *Preflight) plan() []Finding {
	var out []Finding
	for _, m := range p.Modules {
		if slices.Contains(p.Unloaded, m.Name) {
			out = append(out, Finding{Note, "plan", fmt.Sprintf("%s is not loaded, so the kernel has no %s yet; preflight loads no module", m.Name, m.Why), ""})
		}
	}
	if p.Err != nil {
		return append(out, Finding{Error, "plan", "cannot be compared with the kernel: " + p.Err.Error(), ""})
	}
	if p.Unusable != nil {
		out = append(out, Finding{Warning, "Services", p.Unusable.Error(), ""})
	}
	for _, c := range p.Conflicts {
		out = append(out, Finding{Warning, "Services", fmt.Sprintf("%s/%s: %s: %s", c.Regarding.Namespace, c.Regarding.Name, c.Reason, c.Note), ""})
	}
	counts := map[string]int{}
	for _, c := range p.Changes {
		counts[c.Part+": "+c.Operation]++
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", what, counts[what]))
	}
	what := "none"
	if len(parts) > 0 {
		what = strings.Join(parts, ", ")
	}
	return append(out, Finding{OK, "plan", fmt.Sprintf("%d Services; changes of the first sync: %s", p.Services, what), ""})
}
