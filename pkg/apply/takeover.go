package apply

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kubeproxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// iptablesModes are beginnings of the names of chains that kube-proxy makes in
// iptables mode, now or in earlier versions, and we do not. None of kubelet's
// begins so.
var iptablesModes = []string{
	"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-",
	"KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-SERVICES", "KUBE-PROXY-CANARY",
}

// rulesServe reports whether rules must stay until every Service is programmed:
// kube-proxy's, or those of another version or configuration of ours.
// In iptables mode nothing else leads to the endpoints; in IPVS mode they match
// sets that we do not fill, and ours match sets that are still empty, so that a
// connection that began in between would never be masqueraded. Where none stand,
// ours come before everything else. (In nftables mode kube-proxy's table stands
// beside our rules meanwhile.)
func (f *flush) rulesServe() bool {
	if f.swept || f.current {
		return false
	}
	for family := range f.kernel.NAT {
		if len(f.have.nat[family].Chains[servicesChain(family)]) > 0 || len(f.have.leftovers.nat[family].Chains[servicesChain(family)]) > 0 {
			return true
		}
	}
	return false
}

// servicesChain is where kube-proxy's rules begin, in two of its modes, and ours.
func servicesChain(family ip.Family) nat.Chain {
	return nat.Chain{Family: family, Table: nat.NAT, Name: "KUBE-SERVICES"}
}

// findCurrent notes that the rules in the kernel are those of the plan: an
// earlier process of this version and configuration has written them, and they
// may grow at once.
func (f *flush) findCurrent() {
	if f.swept || f.current {
		return
	}
	for family := range f.kernel.NAT {
		if len(nat.Diff(f.have.nat[family], ofFamily(f.node.NAT, family))) > 0 {
			return
		}
	}
	f.current = true
}

// replacesLater reports whether something waits for every Service to be served.
func (f *flush) replacesLater() bool {
	return f.rulesServe() || !f.swept && (len(f.have.kubeProxy) > 0 || f.have.leftovers.count() > 0 || len(f.strays) > 0)
}

// deleteStrays deletes routes that an earlier configuration has left, once
// every VIP is claimed as configured now.
func (f *flush) deleteStrays() {
	if !f.swept {
		return
	}
	var changes []routing.Change
	for r := range f.strays {
		changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: r})
	}
	settle(changes, f.kernel.Routing.Apply, func(c routing.Change) { delete(f.strays, c.Route) },
		func(_ routing.Change, err error) { f.fail(nil, err) })
}

// leadsToStrays reports whether VIPs are still served by a policy rule of an
// earlier configuration, which looks up a table of its own.
func (f *flush) leadsToStrays(rule routing.Rule) bool {
	if f.swept || rule.Action != routing.Lookup {
		return false
	}
	for r := range f.strays {
		if r.Table == rule.Table && r.Family == rule.Family {
			return true
		}
	}
	return false
}

// removeKubeProxysTables removes those of nftables mode when every Service is
// served without them. Connections that they have led somewhere go on: conntrack
// remembers where.
func (f *flush) removeKubeProxysTables() {
	if !f.swept || f.kernel.KubeProxy == nil {
		return
	}
	settle(f.have.kubeProxy.Removals(), f.kernel.KubeProxy.Apply,
		func(c kubeproxy.Change) { delete(f.have.kubeProxy, c.Family) },
		func(_ kubeproxy.Change, err error) { f.fail(nil, err) })
}
