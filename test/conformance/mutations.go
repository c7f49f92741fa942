package conformance

import (
	"fmt"
	"strings"
)

// Mutation is a small change that breaks the plan. The comparison must detect it.
type Mutation struct {
	Name     string
	File     string // of pkg/plan
	Old, New string
}

// Mutations break different behaviors. What has no counterpart in kube-proxy, as ENIs and
// claims by port, test/prove breaks (TestNecessity).
var Mutations = []Mutation{
	{
		"terminating endpoints are never used", "endpoints.go",
		"\t\tc.cluster = c.terminating\n", "\t\tc.cluster = nil\n",
	}, {
		"internalTrafficPolicy is ignored", "service.go",
		"\t\tendpoints = b.eps.local\n\t}\n\tfor _, a := range ofFamily(b.service.ClusterIPs", "\t}\n\tfor _, a := range ofFamily(b.service.ClusterIPs",
	}, {
		"internalTrafficPolicy Local has no endpoints", "service.go",
		"\t\tendpoints = b.eps.local\n\t}\n\tfor _, a := range ofFamily(b.service.ClusterIPs", "\t\tendpoints = nil\n\t}\n\tfor _, a := range ofFamily(b.service.ClusterIPs",
	}, {
		"every Service under externalTrafficPolicy Local counts as one without endpoints on this node", "service.go",
		"\tif noLocal {\n", "\tif noLocal || b.service.ExternalLocal {\n",
	}, {
		"source ranges are not enforced", "service.go",
		"\tb.addMember(LoadBalancerFW, EntryOf(key))\n", "",
	}, {
		"a pod that reaches itself is not masqueraded", "ruleset.go",
		`r.match(LoopBack, "dst,dst,src"), "MASQUERADE`, `r.match(LoopBack, "src,src,src"), "MASQUERADE`,
	}, {
		"UDP node ports are listed as TCP's", "sets.go",
		"return NodePortUDP, NodePortLocalUDP", "return NodePortTCP, NodePortLocalTCP",
	}, {
		"pods are masqueraded on their way to cluster IPs, and others are not", "ruleset.go",
		`strings.TrimSpace("! " + match + " " + m)`, `strings.TrimSpace(match + " " + m)`,
	}, {
		"session affinity ends a second later", "service.go",
		"vs.Timeout = s.AffinitySeconds", "vs.Timeout = s.AffinitySeconds + 1",
	}, {
		"hints for nodes are ignored", "endpoints.go",
		"\tif len(byNode) > 0 {", "\tif false {",
	}, {
		"ports without a Service are the node's own", "ruleset.go",
		`"-m conntrack --ctstate NEW "+r.match(VIPAddresses, "dst"), "KUBE-IPVS-NO-PORT")`, `"-m conntrack --ctstate NEW "+r.match(Refused, "dst,dst"), "KUBE-IPVS-NO-PORT")`,
	}, {
		"external clients get endpoints of other nodes", "service.go",
		"\tif b.service.ExternalLocal && len(b.eps.local) > 0 {\n\t\treturn b.eps.local, false", "\tif b.service.ExternalLocal && len(b.eps.local) > 0 {\n\t\treturn b.eps.cluster, false",
	}, {
		"internal clients get only endpoints of this node under externalTrafficPolicy Local", "local.go",
		"if !b.service.ExternalLocal || len(b.eps.local) == 0 || b.cfg", "if len(b.eps.local) >= 0 || b.cfg",
	}, {
		"the fwmark of a node port does not include the masquerade mark", "local.go",
		"\tif in.Masquerade {\n", "\tif false {\n",
	}, {
		"external clients use endpoints of other nodes if there is none on this node", "local.go",
		`rule("internal clients only", external, "DROP")`, `rule("internal clients only", external, "RETURN")`,
	}, {
		"the node keeps a VIP as its source under externalTrafficPolicy Local", "local.go",
		`fmt.Sprintf("MARK --set-xmark %#[1]x/%#[1]x", masq)`, `fmt.Sprintf("MARK --set-xmark 0x0/%#x", masq)`,
	}, {
		"served ports of an external IP are left to another device", "ruleset.go",
		"chainInside))\n\t}\n\tfor _, set := range r.used(LoadBalancer, ExternalIP, ExternalIPLocal)",
		"chainInside))\n\t}\n\tfor _, set := range r.used(LoadBalancer, ExternalIPLocal)",
	},
}

// Apply returns the mutated source. It fails unless the source contains the old text
// exactly once.
func (m *Mutation) Apply(source string) (string, error) {
	if n := strings.Count(source, m.Old); n != 1 {
		return "", fmt.Errorf("mutation %q: pkg/plan/%s has its text %d times, want once", m.Name, m.File, n)
	}
	return strings.Replace(source, m.Old, m.New, 1), nil
}
