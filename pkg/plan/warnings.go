package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Foreign is the foreign state found in the kernel.
type Foreign struct {
	Marks   []nat.MarkUse // iptables rules that match or set marks
	Native  []nft.MarkUse // likewise in nftables
	Sysctls sysctl.State  // of NodePlan's Sysctls and Watched, as far as they could be read
	Rules   map[ip.Family]nat.State
	Unseen  []string // a sentence for each place where rules of kube-proxy or other programs may exist but cannot be read
}

// Warnings returns a sentence for everything on this node that cannot work or conflicts
// with another program; the sentence names the cause. Equal state gives equal
// sentences.
func Warnings(cfg *Config, n *Node, plan *NodePlan, foreign Foreign) []string {
	out := ruleConflicts(cfg, n, plan)
	out = append(out, markConflicts(cfg, plan, foreign)...)
	out = append(out, bridgeWarnings(cfg, n)...)
	out = append(out, clientPortWarnings(cfg, n)...)
	out = append(out, linkNameWarnings(n)...)
	if cfg.MissingScheduler != "" {
		out = append(out, fmt.Sprintf("the kernel has no IPVS scheduler %[1]s: Services are served with %[2]s; install the module ip_vs_%[1]s and restart kube-ipvs", cfg.MissingScheduler, cfg.Scheduler))
	}
	out = append(out, foreign.Unseen...)
	for _, family := range cfg.Families {
		out = append(out, RuleWarnings(family, foreign.Rules[family])...)
	}
	for _, family := range cfg.Families {
		out = append(out, valueWarnings(cfg, n, family)...)
		out = append(out, orderWarnings(cfg, n, family)...)
		if n.Uses.Has(Local, family) && cfg.localMarkTaken(n, family) {
			out = append(out, fmt.Sprintf("%s pods and the node get node-local endpoints under externalTrafficPolicy Local: another program uses a mark with the bits %#x of --local-mark; choose another one", family, cfg.LocalMark.Value))
		}
	}
	for _, family := range cfg.Families {
		out = append(out, socketMarkConflicts(cfg, n, family, foreign.Sysctls)...)
	}
	return append(out, reversePathConflicts(cfg, n, foreign.Sysctls)...)
}

// markUse is a setting and the mark bits that it uses.
type markUse struct {
	setting string
	bits    uint32
}

// kubernetesMark is the mark with which kubelet and kube-proxy request masquerading. A
// foreign rule with exactly this bit is assumed to request the same.
const kubernetesMark = 0x4000

// marksInUse returns the bits that our rules set now. For reply routing these are the
// bits of assigned values: other programs may use a bit of the mask that no value has.
func marksInUse(cfg *Config, plan *NodePlan) []markUse {
	reply := markUse{setting: "--reply-mark"}
	for _, b := range plan.Bound {
		reply.bits |= b.Mark
	}
	claim := markUse{setting: "--claim-mark"}
	if cfg.VIPs.mayClaimPorts() {
		claim.bits = cfg.VIPs.Mark
	}
	return []markUse{{"--iptables-masquerade-bit", cfg.MasqueradeMark}, reply, claim}
}

// bitConflicts returns a warning for each setting whose bits overlap those of another program.
func bitConflicts(cfg *Config, plan *NodePlan, object string, bits uint32) []string {
	var out []string
	for _, use := range marksInUse(cfg, plan) {
		agreed := bits == kubernetesMark && use.bits == cfg.MasqueradeMark
		if common := bits & use.bits; common != 0 && !agreed {
			out = append(out, fmt.Sprintf("%s, of another program, uses bits %#x of the mark, which kube-ipvs uses: choose another %s", object, common, use.setting))
		}
	}
	return out
}

// ruleConflicts finds foreign policy rules that match our bits or have the priority of
// our rules.
func ruleConflicts(cfg *Config, n *Node, plan *NodePlan) []string {
	var out []string
	for _, r := range n.Inventory.Rules {
		if r.Own || slices.ContainsFunc(plan.Rules, func(o routing.Rule) bool { return o.Priority == r.Priority && o.Mask == r.Mask }) {
			continue
		}
		out = append(out, bitConflicts(cfg, plan, "the policy rule \""+r.String()+"\"", r.Mask)...)
		if slices.ContainsFunc(plan.Rules, func(o routing.Rule) bool {
			return o.Priority == r.Priority && o.Family == r.Family && o.Action != routing.SkipLocal
		}) {
			setting := "--reply-rule-priority"
			if r.Priority == cfg.VIPs.Priority {
				setting = "--claim-rule-priority"
			}
			out = append(out, fmt.Sprintf("the policy rule %q, of another program, has the priority of a kube-ipvs rule: choose another %s", r, setting))
		}
	}
	return out
}

// markConflicts finds foreign rules that match or set our bits.
func markConflicts(cfg *Config, plan *NodePlan, foreign Foreign) []string {
	var out []string
	for _, m := range foreign.Marks {
		out = append(out, bitConflicts(cfg, plan, fmt.Sprintf("the rule \"%s\" in %s", m.Rule, m.Chain), m.Bits)...)
	}
	for _, m := range foreign.Native {
		out = append(out, bitConflicts(cfg, plan, fmt.Sprintf("the rule \"%s\" in the nftables chain %s", m.Rule, m.Chain), m.Bits)...)
	}
	return out
}

// valueWarnings finds interfaces that reply routing does not bind because the values of --reply-mark
// conflict with marks of other programs, or because table local is looked up too late.
func valueWarnings(cfg *Config, n *Node, family ip.Family) []string {
	if cfg.SNAT.Mode != SNATAuto && cfg.SNAT.Mode != SNATFWMark {
		return nil
	}
	paths, found := PathsOf(cfg, n, family), enis(cfg, n, family)
	var unbound []string
	for _, e := range withGateways(found, gateways(cfg, n, family, found)) {
		if !slices.ContainsFunc(paths.Bound, func(b Binding) bool { return b.Link == e.Link }) {
			unbound = append(unbound, e.Link)
		}
	}
	if len(paths.Branches) == 0 {
		for _, b := range branches(cfg, n, family) {
			unbound = append(unbound, b.Link)
		}
	}
	if len(unbound) > 0 && localIsLate(cfg, n, family) {
		return []string{fmt.Sprintf("%s Service traffic by %s is left to the kernel: the policy rule for table local comes after those of reply routing (--reply-rule-priority)", family, strings.Join(unbound, ", "))}
	}
	if len(unbound) == 0 || !hasConflictingValue(cfg, n, family) {
		return nil
	}
	return []string{fmt.Sprintf("%s Service traffic by %s is left to the kernel: marks of other programs conflict with the values of --reply-mark; choose other bits", family, strings.Join(unbound, ", "))}
}

// orderWarnings finds rules that precede ours and route a reply-routed source out of
// its ENI.
func orderWarnings(cfg *Config, n *Node, family ip.Family) []string {
	var out []string
	routed := PathsOf(cfg, n, family).ReplyRouted
	for _, r := range n.Inventory.Rules {
		if r.Family == family && r.Priority < cfg.SNAT.Priority && r.Mask == 0 && slices.Contains(routed, r.From) && r.Table != routing.TableMain {
			out = append(out, fmt.Sprintf("the policy rule %q precedes reply routing: choose a --reply-rule-priority below %d", r, r.Priority))
		}
	}
	return out
}

// reversePathConflicts finds strict reverse-path checks that break a feature and that the
// administrator must relax. Only IPv4 has them.
func reversePathConflicts(cfg *Config, n *Node, have sysctl.State) []string {
	o := reversePathFinder{cfg: cfg, node: n, have: have, paths: PathsOf(cfg, n, ip.IPv4), primary: primaryLink(&n.Inventory, ip.IPv4)}
	if len(o.paths.Bound) > 0 || len(o.paths.Branches) > 0 {
		o.checkReplyRouting()
	}
	if slices.Contains(cfg.Families, ip.IPv4) && o.primary != "" {
		found := enis(cfg, n, ip.IPv4)
		for _, e := range withGateways(found, gateways(cfg, n, ip.IPv4, found)) {
			o.checkUnbound(e)
		}
	}
	return o.out
}

// socketMarkSysctls are parameters by which replies of the node's own programs carry the mark
// of the request. The one for TCP sockets applies to both families.
var socketMarkSysctls = map[ip.Family][]string{
	ip.IPv4: {"net/ipv4/tcp_fwmark_accept", "net/ipv4/fwmark_reflect"},
	ip.IPv6: {"net/ipv4/tcp_fwmark_accept", "net/ipv6/fwmark_reflect"},
}

// socketMarkConflicts finds parameters by which an endpoint on the host network replies with
// the fwmark of an internal client's request: a packet to the node itself passes no chain in
// which the fwmark could be cleared after IPVS. A policy rule of reply routing may match it.
func socketMarkConflicts(cfg *Config, n *Node, family ip.Family, have sysctl.State) []string {
	var out []string
	for _, key := range watchedSocketMarks(cfg, n, family) {
		if have[key] == "1" {
			out = append(out, fmt.Sprintf("%s replies of endpoints on the host network to internal clients may leave by the wrong interface: %s is 1, and the fwmarks of --local-mark overlap --reply-mark; set it to 0, or use --local-mark off", family, key))
		}
	}
	return out
}

// watchedSocketMarks returns the parameters that socketMarkConflicts reads.
func watchedSocketMarks(cfg *Config, n *Node, family ip.Family) []string {
	if cfg.LocalMark.Mask&cfg.SNAT.Mark == 0 || !slices.Contains(cfg.Families, family) || !n.Uses.Has(Local, family) || len(PathsOf(cfg, n, family).Bound) == 0 {
		return nil
	}
	return socketMarkSysctls[family]
}

type reversePathFinder struct {
	cfg     *Config
	node    *Node
	have    sysctl.State
	paths   Paths
	primary string
	out     []string
}

func (o *reversePathFinder) warnf(format string, args ...any) {
	o.out = append(o.out, fmt.Sprintf(format, args...))
}

// strictParameter returns the parameter that enables the strict reverse-path check on an
// interface, or "". The kernel uses the greater of the interface's value and that of
// "all"; 2 is loose.
func (o *reversePathFinder) strictParameter(link string) string {
	own, all := sysctl.LinkKey(ip.IPv4, link, "rp_filter"), sysctl.LinkKey(ip.IPv4, "all", "rp_filter")
	switch {
	case o.have[own] == "2" || o.have[all] == "2":
		return ""
	case o.have[own] == "1":
		return own
	case o.have[all] == "1":
		return all
	}
	return ""
}

// checkReplyRouting warns about conflicts with reply routing. It runs after our own
// parameters were written: one with another value cannot be set.
func (o *reversePathFinder) checkReplyRouting() {
	var links []string
	for _, b := range o.paths.Bound {
		links = append(links, b.Link)
	}
	for _, b := range o.paths.Branches {
		links = append(links, b.Link)
	}
	for _, link := range links {
		if key := o.strictParameter(link); key != "" && o.have[SrcValidMark] == "0" && o.have[sysctl.LinkKey(ip.IPv4, link, "src_valid_mark")] == "0" {
			o.warnf("the reverse-path check of %s ignores marks and drops packets under reply routing: %s is 1, and %s is 0 and cannot be set", link, key, SrcValidMark)
		}
	}
	if o.have[SNATReroute] == "0" {
		o.warnf("replies to packets that entered by an ENI leave by %s: %s is 0 and cannot be set", o.primary, SNATReroute)
	}
}

// checkUnbound warns about the features lost if an ENI has no value, because of the mode or
// because the values ran out.
func (o *reversePathFinder) checkUnbound(e ENI) {
	if slices.ContainsFunc(o.paths.Bound, func(b Binding) bool { return b.Link == e.Link }) {
		return
	}
	why := fmt.Sprintf("--snat-mode is %s", o.cfg.SNAT.Mode)
	if o.cfg.SNAT.Mode == SNATAuto || o.cfg.SNAT.Mode == SNATFWMark {
		why = "--reply-mark has too few bits"
	}
	if key := o.strictParameter(e.Link); key != "" {
		o.warnf("the reverse-path check of %s drops external traffic for Services: %s is 1, and %s", e.Link, key, why)
	}
	own := linkAddress(&o.node.Inventory, e.Link, ip.IPv4)
	masqueraded := o.cfg.SNAT.Mode == SNATOff || o.cfg.SNAT.Mode == SNATSource && !e.SNAT.IsValid()
	if key := o.strictParameter(o.primary); key != "" && masqueraded && (!own.IsValid() || onOtherLink(&o.node.Inventory, e.Link, own)) {
		o.warnf("the reverse-path check of %s drops replies to pods of %s, which has no address of its own for masquerading: %s is 1, and %s", o.primary, e.Link, key, why)
	}
}

// watchedSysctls returns the parameters that Warnings reads in addition to those that we set.
func watchedSysctls(cfg *Config, n *Node) []string {
	var keys []string
	for _, family := range cfg.Families {
		for _, key := range watchedSocketMarks(cfg, n, family) {
			if !slices.Contains(keys, key) {
				keys = append(keys, key)
			}
		}
	}
	return append(keys, watchedReversePath(cfg, n)...)
}

// watchedReversePath returns the parameters that reversePathConflicts reads.
func watchedReversePath(cfg *Config, n *Node) []string {
	found, pods := enis(cfg, n, ip.IPv4), branches(cfg, n, ip.IPv4)
	found = withGateways(found, gateways(cfg, n, ip.IPv4, found))
	if len(found) == 0 && len(pods) == 0 {
		return nil
	}
	var keys []string
	links := []string{"all", primaryLink(&n.Inventory, ip.IPv4)}
	for _, e := range found {
		links = append(links, e.Link)
	}
	for _, b := range pods {
		links = append(links, b.Link)
	}
	for _, link := range links {
		if link != "" {
			keys = append(keys, sysctl.LinkKey(ip.IPv4, link, "rp_filter"), sysctl.LinkKey(ip.IPv4, link, "src_valid_mark"))
		}
	}
	return keys
}
