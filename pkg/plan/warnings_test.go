package plan_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// use returns a foreign rule that uses the given bits.
func use(rule string, bits uint32) nat.MarkUse {
	return nat.MarkUse{Chain: nat.Chain{Family: ip.IPv4, Table: nat.Mangle, Name: "THEIRS"}, Rule: nat.Rule(rule), Bits: bits}
}

// strictly returns the parameters of a node with strict reverse-path checks on which
// reply routing works.
func strictly(change ...string) sysctl.State {
	s := sysctl.State{
		"net/ipv4/conf/all/src_valid_mark": "1", "net/ipv4/vs/snat_reroute": "1",
		"net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/eth0/rp_filter": "1", "net/ipv4/conf/eth1/rp_filter": "1",
		"net/ipv4/conf/eth0/src_valid_mark": "0", "net/ipv4/conf/eth1/src_valid_mark": "0",
	}
	for _, c := range change {
		key, value, _ := strings.Cut(c, "=")
		s[key] = value
	}
	return s
}

func TestWarnings(t *testing.T) {
	eni := []string{"link eth0 10.0.0.1/24", "link eth1", "default dev eth0 via 10.0.0.254", "default dev eth1 via 10.0.1.254 table 101",
		"rule 1536 from 10.0.1.8 lookup 101"}
	bridge := []string{"link cni0 10.244.1.1/24", "link veth1"}
	var (
		aws     = use("-i eth0 -j CONNMARK --set-xmark 0x80/0x80", 0x80)
		kubelet = use("-j MARK --set-xmark 0x8000/0x8000", 0x8000)
		flannel = use("-m mark --mark 0x4000/0x4000 -j RETURN", 0x4000)
		portmap = use("-j MARK --set-xmark 0x2000/0x2000", 0x2000)
		istio   = use("-m mark --mark 0x539 -j RETURN", 0xffffffff)
		wide    = use("-j MARK --set-xmark 0x40/0xf0", 0xf0)
	)
	for _, tc := range []struct {
		name    string
		network []string
		mode    plan.SNATMode
		mark    uint32
		marks   []nat.MarkUse
		sysctls sysctl.State
		want    []string // a substring of each warning
	}{
		{"no conflict", eni, plan.SNATAuto, 0x3060, []nat.MarkUse{aws, kubelet, flannel, portmap}, strictly(), nil},
		{"no ENI, no reply mark", eni[:3], plan.SNATAuto, 0x3060, []nat.MarkUse{wide}, nil, nil},
		{"bridge without br_netfilter", append(bridge, eni[:3]...), plan.SNATAuto, 0x3060, nil, nil, []string{"Service traffic between pods of cni0"}},
		{"a policy rule with our bits", append(eni, "rule 100 fwmark 0x40/0x60 lookup 7"), plan.SNATAuto, 0x3060, nil, nil,
			[]string{`"IPv4 rule 100: fwmark 0x40/0x60 lookup 7", of another program, uses bits 0x60`}},
		{"a policy rule with other bits", append(eni, "rule 100 fwmark 0x200/0xf00 lookup 7"), plan.SNATAuto, 0x3060, nil, nil, nil},
		{"a policy rule at our priority", append(eni, "rule 480 from 10.9.9.9 lookup 7"), plan.SNATAuto, 0x3060, nil, nil,
			[]string{"has the priority of a kube-ipvs rule: choose another --reply-rule-priority"}},
		{"a policy rule at the priority of claimed ports", append(eni, "rule 98 from 10.9.9.9 lookup 7"), plan.SNATAuto, 0x3060, nil, nil,
			[]string{"has the priority of a kube-ipvs rule: choose another --claim-rule-priority"}},
		{"a pod's rule before ours", append(eni[:4:4], "rule 111 from 10.0.1.8 lookup 101"), plan.SNATAuto, 0x3060, nil, nil,
			[]string{`"IPv4 rule 111: from 10.0.1.8/32 lookup 101" precedes reply routing: choose a --reply-rule-priority below 111`}},
		{"rules with our bits", eni, plan.SNATAuto, 0x3060, []nat.MarkUse{wide}, nil,
			[]string{`the rule "-j MARK --set-xmark 0x40/0xf0" in IPv4 mangle/THEIRS, of another program, uses bits 0x60`}},
		{"a rule that matches the whole mark", eni, plan.SNATAuto, 0x3060, []nat.MarkUse{istio}, nil,
			[]string{"0x4000 of the mark, which kube-ipvs uses: choose another --iptables-masquerade-bit", "0x60 of the mark, which kube-ipvs uses: choose another --reply-mark",
				"0x4 of the mark, which kube-ipvs uses: choose another --claim-mark"}},
		{"src_valid_mark is 0", eni, plan.SNATAuto, 0x3060, nil, strictly("net/ipv4/conf/all/src_valid_mark=0", "net/ipv4/conf/eth1/rp_filter=2"),
			[]string{"check of eth0 ignores marks and drops packets under reply routing: net/ipv4/conf/eth0/rp_filter is 1, and net/ipv4/conf/all/src_valid_mark is 0"}},
		{"src_valid_mark is 0 except on the interface", eni, plan.SNATAuto, 0x3060, nil, strictly("net/ipv4/conf/all/src_valid_mark=0",
			"net/ipv4/conf/eth1/rp_filter=0", "net/ipv4/conf/eth0/src_valid_mark=1"), nil},
		{"snat_reroute is 0", eni, plan.SNATAuto, 0x3060, nil, strictly("net/ipv4/vs/snat_reroute=0"), []string{"net/ipv4/vs/snat_reroute is 0"}},
		{"sockets take marks", eni, plan.SNATAuto, 0x3060, nil, strictly("net/ipv4/tcp_fwmark_accept=1"),
			[]string{"IPv4 replies of endpoints on the host network to internal clients may leave by the wrong interface: net/ipv4/tcp_fwmark_accept is 1"}},
		{"replies take marks", eni, plan.SNATAuto, 0x3060, nil, strictly("net/ipv4/fwmark_reflect=1", "net/ipv4/tcp_fwmark_accept=0"), []string{"net/ipv4/fwmark_reflect is 1"}},
		{"IPv6 replies take marks, without an ENI for IPv6", eni, plan.SNATAuto, 0x3060, nil, strictly("net/ipv6/fwmark_reflect=1"), nil},
		{"sockets take marks, no ENI", eni[:3], plan.SNATAuto, 0x3060, nil, strictly("net/ipv4/tcp_fwmark_accept=1"), nil},
		{"sockets take marks, other bits", eni, plan.SNATAuto, 0x60000, nil, strictly("net/ipv4/tcp_fwmark_accept=1"), nil},
		{"too few values", eni, plan.SNATAuto, 0x20, nil, strictly(), []string{"of eth1 drops external traffic for Services: net/ipv4/conf/eth1/rp_filter is 1, and --reply-mark has too few bits"}},
		{"no value without another program's marks", append(eni, "rule 220 fwmark 0x20/0x20 lookup 7"), plan.SNATAuto, 0x20, nil, strictly(), []string{
			"IPv4 Service traffic by eth1 is left to the kernel: marks of other programs conflict with the values of --reply-mark",
			"of eth1 drops external traffic for Services: net/ipv4/conf/eth1/rp_filter is 1, and --reply-mark has too few bits"}},
		{"another value than another program's", append(eni, "rule 220 fwmark 0x20/0x20 lookup 7"), plan.SNATAuto, 0x3060, nil, strictly(), []string{}},
		{"off", eni, plan.SNATOff, 0x3060, nil, strictly(), []string{
			"of eth1 drops external traffic for Services: net/ipv4/conf/eth1/rp_filter is 1, and --snat-mode is off",
			"of eth0 drops replies to pods of eth1, which has no address of its own for masquerading: net/ipv4/conf/eth0/rp_filter is 1, and --snat-mode is off"}},
		{"off, all strict", eni, plan.SNATOff, 0x3060, nil, sysctl.State{"net/ipv4/conf/all/rp_filter": "1", "net/ipv4/conf/eth0/rp_filter": "0", "net/ipv4/conf/eth1/rp_filter": "2"},
			[]string{"of eth0 drops replies to pods of eth1, which has no address of its own for masquerading: net/ipv4/conf/all/rp_filter is 1"}},
		{"off, loose", eni, plan.SNATOff, 0x3060, nil, strictly("net/ipv4/conf/all/rp_filter=2"), nil},
		{"snat, with an address", append([]string{"link eth0 10.0.0.1/24", "link eth1 10.0.1.1/24"}, eni[2:]...), plan.SNATSource, 0x3060, nil, strictly(),
			[]string{"of eth1 drops external traffic for Services"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := withNetwork(tc.network...)
			if i := slices.Index(tc.network, "link veth1"); i > 0 {
				s.Node.Inventory.Links[0].Type, s.Node.Inventory.Links[i].Master = "bridge", "cni0"
				s.Node.Inventory.Links[i].Type = "veth"
			}
			s.Config.SNAT.Mode, s.Config.SNAT.Mark = tc.mode, tc.mark
			part := plan.ForNode(&s.Config, &s.Node)
			for key := range tc.sysctls {
				if _, ours := part.Sysctls[key]; !ours && strings.Contains(key, "fwmark") && len(tc.want) > 0 && !slices.Contains(part.Watched, key) {
					t.Errorf("%s is not read", key)
				}
			}
			got := plan.Warnings(&s.Config, &s.Node, &part, plan.Foreign{Marks: tc.marks, Sysctls: tc.sysctls})
			if len(got) != len(tc.want) {
				t.Fatalf("got %d warnings, want %d:\n%s", len(got), len(tc.want), strings.Join(got, "\n"))
			}
			for i := range got {
				if !strings.Contains(got[i], tc.want[i]) {
					t.Errorf("%s\nwant %s", got[i], tc.want[i])
				}
			}
		})
	}
}
