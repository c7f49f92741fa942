//go:build e2e

package bench

import "strings"

// untrackedChanges leave traffic of pods to cluster IPs untracked, in steps: each of the later
// ones repairs what the earlier ones break. TestBehaviourUntracked in test/e2e shows what that
// is. Prefixes, because a set match costs more.
var untrackedChanges = []change{
	untracked("two NOTRACK rules in raw PREROUTING", []string{floorName, KubeIPVS}, requests, answers),
	untracked("the same with snat_reroute=0", []string{floorName}, requests, answers, noReroute),
	untracked("rules of INPUT and FORWARD skip these packets", []string{KubeIPVS}, requests, answers, skipFilter),
	untracked("and packets to the node's own addresses are tracked", []string{KubeIPVS}, requests, toNode, answers, skipFilter),
	untracked("and what IPVS does not serve is refused", []string{KubeIPVS}, requests, toNode, answers, skipFilter, refuse),
	untracked("and what must be masqueraded is tracked again after IPVS", []string{KubeIPVS}, requests, toNode, answers, skipFilter, refuse, trackAgain),
	untracked("by sets of the Services' ports and endpoints", []string{KubeIPVS}, endpointsSet, requestsBySet, answersBySet, skipFilter),
}

// The ranges of the testbed.
const podRange, serviceRange = "10.255.0.0/24", "10.96.0.0/16"

// Commands of untrackedChanges.
const (
	toPrerouting = "iptables -w -t raw -A PREROUTING -s " + podRange + " "
	notrack      = " -j CT --notrack"
	requests     = toPrerouting + "-d " + serviceRange + notrack
	answers      = toPrerouting + "-d " + podRange + notrack
	toNode       = toPrerouting + "-d 10.255.0.1/32 -j ACCEPT"

	noReroute = "echo 0 >/proc/sys/net/ipv4/vs/snat_reroute"

	endpointsSet  = "ipset create -exist endpoints hash:ip,port && ipset add -exist endpoints 10.255.0.2,tcp:8000 && ipset add -exist endpoints 10.255.0.2,udp:8000"
	requestsBySet = toPrerouting + "-m set --match-set KUBE-CLUSTER-IP dst,dst" + notrack
	answersBySet  = toPrerouting + "-m set --match-set endpoints src,src" + notrack

	// In these chains the rule that is replaced is the only one.
	skipFilter = "iptables -w -R INPUT 1 -m conntrack ! --ctstate RELATED,ESTABLISHED,UNTRACKED -j KUBE-IPVS-FILTER && " +
		"iptables -w -R FORWARD 1 -m conntrack ! --ctstate UNTRACKED -j KUBE-FORWARD"

	refuse = "nft 'add table ip untracked; add chain ip untracked input { type filter hook input priority 110; }; " +
		"add rule ip untracked input ct state untracked ip daddr " + serviceRange + " reject'"
	trackAgain = "nft 'add chain ip untracked output { type filter hook output priority -250; }; " +
		"add set ip untracked itself { type ipv4_addr . ipv4_addr; elements = { 10.255.0.2 . 10.255.0.2, 10.255.0.9 . 10.255.0.9 }; }; " +
		"add rule ip untracked output ip saddr " + podRange + " ip daddr != " + podRange + " ct zone set 0; " +
		"add rule ip untracked output ip saddr . ip daddr @itself ct zone set 0'"
)

// untracked returns a change of the table raw, and of others that its undo restores.
func untracked(name string, subjects []string, do ...string) change {
	undo := "nft delete table ip raw; nft delete table ip untracked; ipset destroy endpoints"
	if strings.Contains(strings.Join(do, " "), skipFilter) {
		undo += "; iptables -w -R INPUT 1 -m conntrack ! --ctstate RELATED,ESTABLISHED -j KUBE-IPVS-FILTER; iptables -w -R FORWARD 1 -j KUBE-FORWARD"
	}
	if strings.Contains(strings.Join(do, " "), noReroute) {
		undo += "; echo 1 >/proc/sys/net/ipv4/vs/snat_reroute"
	}
	return change{name: "untracked: " + name, subjects: subjects, do: do, undo: []string{undo + "; true"}, check: (*counting).hairpin}
}
