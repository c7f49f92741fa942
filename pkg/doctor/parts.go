package doctor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// parts are the extensions of iptables that kube-ipvs's rules may use, and what is
// lost without one.
var parts = []struct {
	name   string
	target bool
	lost   string
}{
	{"set", false, "no rule about Services works"},
	{"conntrack", false, "rules that look at the state of connections"},
	{"mark", false, "rules that look at marks, and with them masquerading"},
	{"connmark", false, "reply routing"},
	{"addrtype", false, "rules that look for addresses of the node"},
	{"physdev", false, "rules about bridged packets"},
	{"ipvs", false, "rules about what IPVS sends"},
	{"MARK", true, "marks, and with them masquerading"},
	{"CONNMARK", true, "reply routing"},
	{"MASQUERADE", true, "masquerading: remote endpoints do not answer through this node"},
	{"SNAT", true, "SNAT sources of ENIs"},
	{"REDIRECT", true, "VIPs claimed by port do not answer to ping"},
	{"REJECT", true, "what should be refused passes"},
	{"SET", true, "externalTrafficPolicy Local by a mark"},
}

// lacking lists the extensions that the kernel does not have, as far as nf_tables
// tells; to ask loads their modules.
func lacking(family ip.Family) []string {
	var out []string
	for _, p := range parts {
		if err := extension(family, p.name, p.target); errors.Is(err, unix.ENOENT) {
			out = append(out, p.name)
		}
	}
	if len(out) == len(parts) {
		return nil // it is nft_compat that is not there
	}
	return out
}

// Messages and attributes of <linux/netfilter/nf_tables_compat.h>.
const (
	compatGet      = 0
	compatName     = 1
	compatRevision = 2
	compatType     = 3
)

// extension is nil or EPROTONOSUPPORT if the kernel has an extension, in whatever
// revision.
func extension(family ip.Family, name string, target bool) error {
	// The answer counts as one of several, of which no message tells the end: the ACK
	// does.
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
	var out []Finding
	for _, family := range ip.Families {
		for _, p := range parts {
			if slices.Contains(f.Lacking[family], p.name) {
				out = append(out, Finding{Warning, family.String(), fmt.Sprintf("the kernel has no xt_%s; rules that need it are left out. Lost: %s", p.name, p.lost),
					"install the kernel's module (often in the package kernel-modules-extra or linux-modules-extra)"})
			}
		}
	}
	return out
}

// others reads the rules of the back end of iptables that the node does not use.
func (f *Facts) readOthers() {
	choice, err := nat.Choose()
	if err != nil {
		return // whoever reads the rules says so
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

// OtherRules are those of a family in the back end that is not used.
type OtherRules struct {
	Programs string
	Family   ip.Family
	Rules    nat.Ruleset
}

func otherBackEnd(f *Facts) []Finding {
	var out []Finding
	for _, o := range f.Others {
		if chain := proxysChain(o.Rules); chain != "" {
			out = append(out, Finding{Error, o.Programs, fmt.Sprintf("has rules of a service proxy for %s, such as the chain %s: the kernel evaluates them as well, some before IPVS", o.Family, chain),
				"start kube-ipvs, which removes them; if it runs, see its log"})
		}
	}
	if f.Unseen {
		out = append(out, Finding{Note, "iptables", "the other back end of iptables may hold rules of kube-proxy, and cannot be read here", "install both iptables-nft and iptables-legacy"})
	}
	return out
}

func proxysChain(rules nat.Ruleset) string {
	for _, table := range []nat.Table{nat.NAT, nat.Filter, nat.Mangle} {
		for chain := range rules[table].Chains {
			for _, prefix := range []string{"KUBE-SERVICES", "KUBE-SVC-", "KUBE-SEP-", "KUBE-IPVS-", "KUBE-NODEPORTS", "KUBE-POSTROUTING"} {
				if strings.HasPrefix(chain, prefix) {
					return string(table) + " " + chain
				}
			}
		}
	}
	return ""
}
