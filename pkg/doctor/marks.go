package doctor

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Priorities at which our marks are written and read (enum nf_ip_hook_priorities).
const (
	mangle     = -150
	beforeIPVS = 98 // the first function of IPVS in INPUT
)

// nativeMarks reports chains of nftables that overwrite the packet mark between the rule that sets
// one of our marks and its reader. plan.Warnings finds such rules of iptables.
func nativeMarks(n *trace.Node) []Finding {
	uses := func(set plan.SetName) bool { return len(n.Sets[set.In(n.Family)].Entries) > 0 }
	var out []Finding
	for _, w := range n.MarkWrites() {
		what := fmt.Sprintf("the nftables chain %s (hook %s, priority %d) overwrites the packet mark (%s)", w.Chain.ID, w.Chain.Hook, w.Chain.Priority, w.Rule)
		routing := w.Chain.Hook == "prerouting" && w.Chain.Priority > mangle
		switch {
		case routing && uses(plan.PortVIPs):
			out = append(out, Finding{Warning, n.Family.String(), what + ": where it does so, VIPs that are claimed by port are not reached", "the default, --claim-load-balancers auto and --claim-external-ips auto"})
		case (routing || w.Chain.Hook == "input" && w.Chain.Priority < beforeIPVS) && uses(plan.Local):
			out = append(out, Finding{Note, n.Family.String(), what + ": where it does so, internal clients get only node-local endpoints under externalTrafficPolicy Local", "let that program set only bits of its own"})
		}
	}
	return out
}
