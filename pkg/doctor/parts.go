package doctor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// part is an iptables extension that our rules may use.
type part struct {
	name   string
	target bool
	module string // the module that has it
	lost   string // without it; "" if everything is served
}

var parts = []part{
	{"set", false, "xt_set", "all rules of Services"},
	{"comment", false, "xt_comment", ""},
	{"conntrack", false, "xt_conntrack", "rules that match the connection state"},
	{"mark", false, "xt_mark", "rules that match marks, including masquerading"},
	{"connmark", false, "xt_connmark", "reply routing"},
	{"addrtype", false, "xt_addrtype", "rules that match addresses of the node"},
	{"ipvs", false, "xt_ipvs", "rules that match packets of IPVS"},
	{"MARK", true, "xt_mark", "marks, including masquerading"},
	{"CONNMARK", true, "xt_connmark", "reply routing"},
	{"MASQUERADE", true, "xt_MASQUERADE", "masquerading: replies of remote endpoints bypass this node"},
	{"SNAT", true, "xt_nat", "SNAT sources of ENIs"},
	{"REDIRECT", true, "xt_REDIRECT", "ping of VIPs that are claimed by port"},
	{"TCPMSS", true, "xt_TCPMSS", "the segment size of VIPs that are claimed by port: large uploads hang if the MTU of an uplink is smaller than the pods'"},
	{"REJECT", true, "ipt_REJECT", "rejecting: traffic that should be rejected passes"},
	{"SET", true, "xt_set", "fwmarks of externalTrafficPolicy: Local"},
}

// modules returns the names of a part's module for a family. Linux before 5.2 has
// ipt_MASQUERADE and ip6t_MASQUERADE.
func (p part) modules(family ip.Family) []string {
	prefix := "ipt_"
	if family == ip.IPv6 {
		prefix = "ip6t_"
	}
	if p.module == "ipt_"+p.name {
		return []string{prefix + p.name}
	}
	return []string{p.module, prefix + p.name}
}

// lacking returns the extensions that the kernel does not have. It asks nf_tables, which
// loads their modules. On a kernel without nf_tables it looks for loaded extensions and
// for modules; it returns nothing if the kernel's modules are unknown.
func lacking(family ip.Family) []string {
	return lackingParts(family, extension, readLegacy("/proc/thread-self/net", family), readModules(LoadedModules, InstalledModules, Release()))
}

func lackingParts(family ip.Family, ask func(ip.Family, string, bool) error, legacy legacyParts, modules kernelModules) []string {
	var out []string
	compat := false
	for _, p := range parts {
		err := ask(family, p.name, p.target)
		if errors.Is(err, unix.ENOENT) {
			out = append(out, p.name)
		} else if err == nil || errors.Is(err, unix.EPROTONOSUPPORT) {
			compat = true
		}
	}
	if compat {
		return out
	}
	out = nil
	for _, p := range parts {
		if !legacy.has(p) && modules.lack(p.modules(family)...) {
			out = append(out, p.name)
		}
	}
	return out
}

// legacyParts are the extensions that are loaded, by the files of iptables-legacy. An
// extension that is not among them may be loaded later.
type legacyParts struct{ matches, targets []string }

func readLegacy(proc string, family ip.Family) legacyParts {
	name := "ip"
	if family == ip.IPv6 {
		name = "ip6"
	}
	read := func(kind string) []string {
		text, _ := os.ReadFile(filepath.Join(proc, name+"_tables_"+kind)) // no extension is loaded
		return strings.Fields(string(text))
	}
	return legacyParts{read("matches"), read("targets")}
}

func (l legacyParts) has(p part) bool {
	if p.target {
		return slices.Contains(l.targets, p.name)
	}
	return slices.Contains(l.matches, p.name)
}

// setTypes are the types of our sets, with what is lost without each, and the sets.
var setTypes = []struct {
	kind ipset.Type
	lost string
}{
	{ipset.HashIPPort, "masquerading, policies and filters of Services (KUBE-CLUSTER-IP and others)"},
	{ipset.HashIPPortIP, "endpoints that connect to themselves through a Service (KUBE-LOOP-BACK)"},
	{ipset.HashIPPortNet, "loadBalancerSourceRanges: no client is admitted (KUBE-LOAD-BALANCER-SOURCE-CIDR)"},
	{ipset.HashIP, "rules about VIPs as a whole (KUBE-IPVS-IPS)"},
	{ipset.HashNet, "reply routing of pods' own sources (KUBE-IPVS-REPLY-SRC)"},
	{ipset.BitmapPort, "node ports (KUBE-NODE-PORT-TCP and others)"},
}

// lackingTypes returns the set types that the kernel does not have. Asking loads their
// modules.
func lackingTypes() []ipset.Type {
	var out []ipset.Type
	for _, t := range setTypes {
		if errors.Is(setType(t.kind), unix.Errno(nl.IPSET_ERR_FIND_TYPE)) {
			out = append(out, t.kind)
		}
	}
	return out
}

// lacksConntrack reports whether the kernel has no nf_conntrack_netlink. Asking loads it.
func lacksConntrack() bool {
	table, err := conntrack.New()
	if err == nil {
		table.Close()
	}
	return errors.Is(err, conntrack.ErrMissing)
}

// setType returns nil if the kernel has a set type.
func setType(t ipset.Type) error {
	family := uint8(unix.AF_INET)
	if t == ipset.BitmapPort {
		family = unix.AF_UNSPEC
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_IPSET<<8|nl.IPSET_CMD_TYPE, unix.NLM_F_ACK)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_TYPENAME, nl.ZeroTerminated(string(t))))
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_FAMILY, nl.Uint8Attr(family)))
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

// Messages and attributes of <linux/netfilter/nf_tables_compat.h>.
const (
	compatGet      = 0
	compatName     = 1
	compatRevision = 2
	compatType     = 3
)

// extension requests revision 0 of an extension. It returns ENOENT if the kernel does not have
// the extension, and EPROTONOSUPPORT if it has only other revisions.
func extension(family ip.Family, name string, target bool) error {
	// The response is flagged as multipart without an end; the ACK ends it.
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFT_COMPAT<<8|compatGet, unix.NLM_F_ACK)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: addressFamily(family), Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(compatName, nl.ZeroTerminated(name)))
	request.AddData(nl.NewRtAttr(compatRevision, binary.BigEndian.AppendUint32(nil, 0)))
	kind := uint32(0)
	if target {
		kind = 1
	}
	request.AddData(nl.NewRtAttr(compatType, binary.BigEndian.AppendUint32(nil, kind)))
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

func addressFamily(family ip.Family) uint8 {
	if family == ip.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func lost(f *Facts) []Finding {
	const where = " (often in the package kernel-modules-extra or linux-modules-extra)"
	const fix = "install the kernel's module" + where
	var out []Finding
	for _, t := range setTypes {
		if slices.Contains(f.LackingTypes, t.kind) {
			out = append(out, Finding{Warning, "sets", fmt.Sprintf("the kernel has no set type %s; rules that match sets of it are omitted. Lost: %s", t.kind, t.lost), fix})
		}
	}
	if f.LacksConntrack {
		out = append(out, Finding{Warning, "conntrack", "the kernel has no nf_conntrack_netlink; a UDP client that keeps sending from one port may stay with a removed endpoint", fix + " and restart kube-ipvs"})
	}
	if other := f.otherScheduler(); other != "" {
		out = append(out, Finding{Warning, "IPVS", fmt.Sprintf("no virtual server uses the configured scheduler %s; the kernel lacks it, and Services are served with %s", f.Config.Scheduler, other),
			"install the module ip_vs_" + f.Config.Scheduler + " and restart kube-ipvs"})
	}
	for _, family := range ip.Families {
		for _, p := range parts {
			fix := "install the kernel's module " + p.modules(family)[0] + where
			switch {
			case !slices.Contains(f.Lacking[family], p.name):
			case p.lost == "":
				out = append(out, Finding{Note, family.String(), fmt.Sprintf("the kernel lacks the iptables extension %s; rules are written without it, and everything is served", p.name), fix})
			default:
				out = append(out, Finding{Warning, family.String(), fmt.Sprintf("the kernel lacks the iptables extension %s; rules that need it are omitted. Lost: %s", p.name, p.lost), fix})
			}
		}
	}
	return out
}

// otherScheduler returns the scheduler of the virtual servers if the configured one is not
// used by any of them.
func (f *Facts) otherScheduler() string {
	other := ""
	for _, n := range f.Nodes {
		for key, server := range n.IPVS {
			if server.Scheduler == f.Config.Scheduler || f.Config.Scheduler == "" {
				return ""
			}
			if key.FWMark == 0 {
				other = server.Scheduler
			}
		}
	}
	return other
}

// readOthers reads the rules of the iptables back end that the node does not use.
func (f *Facts) readOthers() {
	choice, err := nat.Choose()
	if err != nil {
		return // reported by the reader of the rules
	}
	f.Unseen = choice.Unseen
	if !choice.HasOther {
		return
	}
	for _, family := range ip.Families {
		tables, err := nat.Open(family, choice.Other)
		if err == nil {
			var rules nat.Ruleset
			if rules, err = tables.Ruleset(); err == nil {
				f.Others = append(f.Others, OtherRules{choice.Other.String(), family, rules})
				continue
			}
		}
		f.Unseen = true
	}
}

// OtherRules are the rules of a family in the unused back end.
type OtherRules struct {
	Programs string
	Family   ip.Family
	Rules    nat.Ruleset
}

func otherBackEnd(f *Facts) []Finding {
	var out []Finding
	for _, o := range f.Others {
		if chain := proxysChain(o.Rules); chain != "" {
			out = append(out, Finding{Error, o.Programs, fmt.Sprintf("has rules of a service proxy for %s, such as the chain %s: the kernel evaluates them too, some before IPVS", o.Family, chain),
				"start kube-ipvs, which removes them; if it runs, see its log"})
		}
	}
	if f.Unseen {
		out = append(out, Finding{Note, "iptables", "the other iptables back end may contain rules of kube-proxy and cannot be read here", "install both iptables-nft and iptables-legacy"})
	}
	return out
}

func proxysChain(rules nat.Ruleset) string {
	for _, table := range []nat.Table{nat.NAT, nat.Filter, nat.Mangle} {
		for chain := range rules[table].Chains {
			for _, prefix := range append([]string{plan.ChainPostrouting}, plan.ReplacedPrefixes...) {
				if strings.HasPrefix(chain, prefix) {
					return string(table) + " " + chain
				}
			}
		}
	}
	return ""
}
