package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Difference is one that is allowed.
type Difference struct {
	// What differs, and the sentence of the API or the issue that justifies it.
	What, Why string
	Applies   func(*World, Diff) bool
}

// Differences are all that may be; docs/differences.md shows them.
var Differences = []Difference{
	{
		What: "A VIP answers ping.",
		Why:  "kubernetes/website#41002: a rule for ports without a Service refuses it.",
		Applies: func(_ *World, d Diff) bool {
			return d.Kind == "packet" && d.Protocol == "ICMP" && d.KubeProxy == "refused"
		},
	}, {
		What: "Node ports are served at 127.0.0.1, too.",
		Why:  "kubernetes#56320, #67730, #96879, #111840.",
		Applies: func(_ *World, d Diff) bool {
			return d.At.Addr().IsLoopback() && d.KubeProxy == ""
		},
	}, {
		What: "Of two Services that claim one address and port, the one to which it was allotted has it, then the one to whose load balancer it was assigned, then the older; of two fields of one Service, the first.",
		Why:  "The API does not say. kube-proxy writes one over the other in every pass, in no order.",
		Applies: func(w *World, d Diff) bool {
			return len(w.Claims(d.Protocol, d.At)) > 1
		},
	}, {
		What: "An endpoint that several slices describe differently, and not just one of them as not terminating: the same one always counts.",
		Why:  "The API does not say which. kube-proxy goes over the slices in no order: \"the result is undefined\" (`endpointslicecache.go`).",
		Applies: func(w *World, d Diff) bool {
			return (d.Kind == "real server" || d.Kind == "packet") &&
				w.anyClaim(d, func(c Claim) bool { return w.disputed(c, d.At.Addr()) })
		},
	}, {
		What: "`externalTrafficPolicy: Local`, from this node and its pods: all endpoints; masqueraded where a reply would not come back otherwise.",
		Why: "The API: \"traffic sent to an External IP or LoadBalancer IP from within the cluster will always get 'Cluster' semantics\"; " +
			"kubernetes#75262, #93456: kube-proxy keeps a source that the endpoint does not answer by way of the node.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && Inside(d.Name) && w.anyClaim(d, externalLocal) && isSourceFromInside(d)
		},
	}, {
		What: "`externalTrafficPolicy: Local`, from outside, on a node without endpoints: dropped.",
		Why: "The API: \"Traffic mistakenly sent to a node with no endpoints will be dropped\"; " +
			"kubernetes#97081: kube-proxy sends it to other nodes' endpoints, whose answers never arrive.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && !Inside(d.Name) && w.anyClaim(d, externalLocal) && d.Ours == "dropped"
		},
	}, {
		What: "`internalTrafficPolicy: Local` without an endpoint on the node is refused, also if the Service is reached from outside.",
		Why:  "The API: \"dropping the traffic if there are no local endpoints\"; kubernetes#121371: kube-proxy then uses all endpoints.",
		Applies: func(w *World, d Diff) bool {
			return (d.Kind == "real server" && d.Ours == "" || d.Kind == "packet" && d.Ours == "refused") && w.anyClaim(d, func(c Claim) bool {
				return c.Kind == "cluster IP" && c.Service.InternalLocal && c.Service.Exposed()
			})
		},
	}, {
		What: "A load balancer's or external IP on a port that no Service has is not the node's: from inside it goes where it would go without kube-ipvs.",
		Why:  "The API leaves these ports to whoever else has the address (vips.md).",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && (d.Ours == "forwarded" || d.Ours == "sent away") && len(w.Claims(d.Protocol, d.At)) == 0
		},
	}, {
		What: "A VIP's port that has the number of somebody's node port is not masqueraded for that.",
		Why:  "kubernetes#132068: kube-proxy's sets of node ports have no addresses.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && d.At.Port() >= FirstNodePort && !NodeAddress(d.At.Addr()) &&
				strings.ReplaceAll(d.KubeProxy, "masqueraded", "as itself") == strings.ReplaceAll(d.Ours, "masqueraded", "as itself")
		},
	}, {
		What: "`loadBalancerSourceRanges` with the node's address in them allow what source the node's own packets really have.",
		Why:  "The node's packets carry the VIP only where it is an address of the node (vips.md); kube-proxy lists the VIP.",
		Applies: func(_ *World, d Diff) bool {
			return d.Kind == "member" && strings.HasSuffix(d.Name, "LOAD-BALANCER-SOURCE-IP")
		},
	}, {
		What: "`loadBalancerSourceRanges` of one family close a load balancer's IPs of the other.",
		Why:  "The API: \"restricts traffic through the cloud-provider load-balancer to the specified client IPs\", of which none is of that family.",
		Applies: func(w *World, d Diff) bool {
			return (d.Kind == "member" && strings.HasSuffix(d.Name, "LOAD-BALANCER-FW") && d.KubeProxy == "" || d.Kind == "packet" && d.Ours == "dropped") &&
				w.anyClaim(d, func(c Claim) bool { return c.Kind == "load balancer" && c.Service.onlyOtherRanges(d.At.Addr()) })
		},
	}, {
		What: "`loadBalancerSourceRanges` hold for the node's own packets.",
		Why:  "The API: \"restricts traffic through the cloud-provider load-balancer to the specified client IPs\"; kubernetes#119656: nodes are skipped.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && d.Name == "node" && w.anyClaim(d, func(c Claim) bool {
				return c.Kind == "load balancer" && len(c.Service.SourceRanges) > 0
			})
		},
	},
}

// isSourceFromInside reports whether somebody answers, and endpoints of a Service
// with externalTrafficPolicy Local see whom they should: at a VIP this node's pods,
// except for one that reaches itself, and otherwise the node.
func isSourceFromInside(d Diff) bool {
	source, answered := Sources[d.Name], false
	for answer := range strings.SplitSeq(d.Ours, ", ") {
		address, how, _ := strings.Cut(answer, " ")
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return false
		}
		answered = true
		if source.In == "" && how != "masqueraded" {
			return false
		}
		itself := to.Addr().String() == source.IPv4 || to.Addr().String() == source.IPv6 || NodeAddress(d.At.Addr())
		if source.In == "cni0" && itself != (how == "masqueraded") {
			return false
		}
	}
	return answered
}

// anyClaim tells whether the difference is about an address and port that
// somebody wants in a certain way.
func (w *World) anyClaim(d Diff, which func(Claim) bool) bool {
	return slices.ContainsFunc(w.Claims(d.Protocol, d.At), which)
}

func externalLocal(c Claim) bool { return c.Kind != "cluster IP" && c.Service.ExternalLocal }

// Allowed finds the entry for a difference.
func Allowed(w *World, d Diff) *Difference {
	for i := range Differences {
		if Differences[i].Applies(w, d) {
			return &Differences[i]
		}
	}
	return nil
}

const tableHead = "| difference | why |\n|---|---|\n"

// Table shows the differences as docs/differences.md has them.
func Table() string {
	var text strings.Builder
	text.WriteString(tableHead)
	for _, d := range Differences {
		fmt.Fprintf(&text, "| %s | %s |\n", d.What, d.Why)
	}
	return text.String()
}
