//go:build e2e

package nat_test

import (
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat/nattest"
)

// TestCanonicalForms checks the kinds of rules that Services need.
func TestCanonicalForms(t *testing.T) {
	hosts := map[ip.Family]string{ip.IPv4: "10.12.115.101/32", ip.IPv6: "fd00::115:101/128"}
	loopback := map[ip.Family]string{ip.IPv4: "127.0.0.0/8", ip.IPv6: "::1/128"}
	source := map[ip.Family]string{ip.IPv4: "10.12.192.10", ip.IPv6: "fd00::192:10"}
	unreachable := map[ip.Family]string{ip.IPv4: "icmp-port-unreachable", ip.IPv6: "icmp6-port-unreachable"}
	for _, f := range ip.Families {
		nattest.CheckCanonical(t, f, map[nat.Table][]nat.Rule{
			nat.NAT: {
				`-m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
				"-m comment --comment portals -j KUBE-SERVICES",
				nat.Rule("-s " + loopback[f] + " -j RETURN"),
				"-m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE",
				"-p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ",
				"-m set ! --match-set KUBE-NODE-IPS src -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN",
				nat.Rule("! -s " + hosts[f] + " -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ"),
				"-m set --match-set KUBE-EXTERNAL-IP dst,dst -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT",
				"-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT",
				"-m mark ! --mark 0x4000/0x4000 -j RETURN",
				"-j MARK --set-xmark 0x4000/0x4000",
				"-j MARK --set-xmark 0x4000/0x0",
				"-j MASQUERADE --random-fully",
				nat.Rule("-o eth1 -j SNAT --to-source " + source[f] + " --random-fully"),
				nat.Rule("-o eth1 -j SNAT --to-source " + source[f]),
			},
			nat.Filter: {
				"-m mark --mark 0x4000/0x4000 -j ACCEPT",
				"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
				nat.Rule("-m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT --reject-with " + unreachable[f]),
				nat.Rule("-s " + hosts[f] + " -m ipvs --vproto 6 --vaddr " + source[f] + " --vport 80 -j DROP"),
				"-i veth+ -g KUBE-FORWARD",
			},
			nat.Mangle: {
				"-m conntrack --ctdir REPLY -m connmark --mark 0x20000/0x20000 -j CONNMARK --restore-mark --nfmask 0x20000 --ctmask 0x20000",
				"-m mark --mark 0x20000/0x20000 -j CONNMARK --save-mark --nfmask 0x20000 --ctmask 0x20000",
				"-j CONNMARK --set-xmark 0x20000/0x20000",
				"-p icmp -j RETURN",
			},
		})
	}
}
