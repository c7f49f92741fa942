package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Difference is an allowed difference.
type Difference struct {
	// What describes the difference. Why is the sentence of the API or the issue that
	// justifies it.
	What, Why string
	Applies   func(*World, Diff) bool
}

// Differences lists all allowed differences; docs/differences.md shows them.
var Differences = []Difference{
	{
		What: "A VIP answers ping.",
		Why:  "kubernetes/website#41002: kube-proxy's rule for ports without a Service refuses ping.",
		Applies: func(_ *World, d Diff) bool {
			return d.Kind == "packet" && d.Protocol == "ICMP" && d.KubeProxy == "refused" && d.Ours == "the node's own"
		},
	}, {
		What: "Node ports are also served on 127.0.0.1.",
		Why:  "kubernetes#56320, #67730, #96879, #111840.",
		Applies: func(_ *World, d Diff) bool {
			return d.At.Addr().IsLoopback() && d.KubeProxy == ""
		},
	}, {
		What: "If two Services want one address and port, the one to which it was allocated takes precedence, then the one to whose load balancer it was assigned, then the older. Of two fields of one Service, the first takes precedence.",
		Why:  "The API does not define it. kube-proxy overwrites one with the other in every sync, in no order.",
		Applies: func(w *World, d Diff) bool {
			return w.followsPrecedence(d)
		},
	}, {
		What: "If several slices describe an endpoint differently, and not just one of them as not terminating, the same description always takes effect.",
		Why:  "The API does not define which. kube-proxy goes over the slices in no order: \"the result is undefined\" (`endpointslicecache.go`).",
		Applies: func(w *World, d Diff) bool {
			return (d.Kind == "real server" || d.Kind == "packet") &&
				w.anyClaim(d, func(c Claim) bool { return w.disputed(c, d.At.Addr()) })
		},
	}, {
		What: "`externalTrafficPolicy: Local`, from this node and its pods: all endpoints, and masqueraded if the reply would not return otherwise.",
		Why: "The API: \"traffic sent to an External IP or LoadBalancer IP from within the cluster will always get 'Cluster' semantics\"; " +
			"kubernetes#75262, #93456: kube-proxy keeps a source for which the endpoint's reply does not return through the node.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && Inside(d.Name) && w.anyClaim(d, externalLocal) && isSourceFromInside(d)
		},
	}, {
		What: "`externalTrafficPolicy: Local`, external clients, on a node without endpoints: dropped, unless another program may masquerade them or `--remote-fallback` is set.",
		Why: "The API: \"Traffic mistakenly sent to a node with no endpoints will be dropped\"; " +
			"kubernetes#97081: kube-proxy sends it to endpoints on other nodes, whose replies never arrive. Where a network plugin such as flannel " +
			"masquerades these packets, the replies arrive: there both programs serve these clients, who are seen with the node's address.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && !Inside(d.Name) && d.Ours == "dropped" && w.anyClaim(d, func(c Claim) bool {
				return externalLocal(c) && !w.servesHere(c, d.At.Addr())
			})
		},
	}, {
		What: "`internalTrafficPolicy: Local` without an endpoint on the node is refused, also if the Service is reachable from outside the cluster (not with `--remote-fallback`).",
		Why:  "The API: \"dropping the traffic if there are no local endpoints\"; kubernetes#121371: kube-proxy then uses all endpoints.",
		Applies: func(w *World, d Diff) bool {
			missing := d.Kind == "real server" && d.Ours == "" && onOtherNode(netip.MustParseAddrPort(d.Name))
			return (missing || d.Kind == "packet" && d.Ours == "refused") && w.anyClaim(d, func(c Claim) bool {
				return c.Kind == "cluster IP" && c.Service.InternalLocal && c.Service.Exposed() && !w.servesHere(c, d.At.Addr())
			})
		},
	}, {
		What: "A port of a LoadBalancer IP or external IP that no Service has does not belong to the node: packets of pods and the node are routed as without kube-ipvs. The first one is dropped, and makes kube-ipvs write the rules for it.",
		Why:  "The API leaves these ports to other owners of the address (vips.md).",
		Applies: func(w *World, d Diff) bool {
			dropped := d.Ours == "dropped" && d.KubeProxy == "refused"
			return d.Kind == "packet" && Inside(d.Name) && (d.Ours == "forwarded" || d.Ours == "sent away" || dropped) &&
				len(w.Claims(d.Protocol, d.At)) == 0 && !w.isClusterIP(d.At.Addr())
		},
	}, {
		What: "A VIP's port whose number is also a node port is not masqueraded for that reason.",
		Why:  "kubernetes#132068: kube-proxy's sets of node ports have no addresses.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && d.At.Port() >= FirstNodePort && !NodeAddress(d.At.Addr()) &&
				strings.ReplaceAll(d.KubeProxy, "masqueraded", "as itself") == strings.ReplaceAll(d.Ours, "masqueraded", "as itself")
		},
	}, {
		What: "`loadBalancerSourceRanges` that contain the node's address allow the source that the node's own packets really have.",
		Why:  "The node's packets carry the VIP only if it is an address of the node (vips.md); kube-proxy lists the VIP.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "member" && strings.HasSuffix(d.Name, "LOAD-BALANCER-SOURCE-IP") && d.KubeProxy == "" &&
				slices.Contains(nodeSources(d.At.Addr()), d.Member[strings.LastIndex(d.Member, ",")+1:]) && w.anyClaim(d, admitsNode(d.At.Addr()))
		},
	}, {
		What: "`loadBalancerSourceRanges` of one family close the LoadBalancer IPs of the other family.",
		Why:  "The API: \"restricts traffic through the cloud-provider load-balancer to the specified client IPs\", none of which is of that family.",
		Applies: func(w *World, d Diff) bool {
			return (d.Kind == "member" && strings.HasSuffix(d.Name, "LOAD-BALANCER-FW") && d.KubeProxy == "" || d.Kind == "packet" && d.Ours == "dropped") &&
				w.anyClaim(d, func(c Claim) bool { return c.Kind == "load balancer" && c.Service.onlyOtherRanges(d.At.Addr()) })
		},
	}, {
		What: "`loadBalancerSourceRanges` apply to the node's own packets.",
		Why:  "The API: \"restricts traffic through the cloud-provider load-balancer to the specified client IPs\"; kubernetes#119656: kube-proxy skips nodes.",
		Applies: func(w *World, d Diff) bool {
			return d.Kind == "packet" && d.Name == "node" && w.anyClaim(d, func(c Claim) bool {
				if admitsNode(d.At.Addr())(c) {
					return len(endpointsOf(d.Ours)) > 0 || d.Ours == "refused" && !w.alwaysReady(c, d.At.Addr())
				}
				return c.Kind == "load balancer" && len(c.Service.SourceRanges) > 0 && d.Ours == "dropped"
			})
		},
	},
}

// isSourceFromInside reports whether an endpoint answers, and endpoints of a Service
// with externalTrafficPolicy Local see the right source address: at a VIP that of this
// node's pods, except for a pod that reaches itself, and otherwise the node's.
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

// anyClaim reports whether a claim of the difference's address and port satisfies
// which.
func (w *World) anyClaim(d Diff, which func(Claim) bool) bool {
	return slices.ContainsFunc(w.Claims(d.Protocol, d.At), which)
}

// admitsNode returns a condition for claims of load balancer IPs whose source ranges contain
// the node's own address of a family.
func admitsNode(family netip.Addr) func(Claim) bool {
	return func(c Claim) bool { return c.Kind == "load balancer" && c.Service.admitsNode(family) }
}

// nodeSources returns the sources that the node's own packets to a VIP can have.
func nodeSources(vip netip.Addr) []string {
	out := []string{vip.String()}
	for _, a := range NodeAddresses {
		if netip.MustParseAddr(a).Is4() == vip.Is4() {
			out = append(out, a)
		}
	}
	return out
}

func externalLocal(c Claim) bool { return c.Kind != "cluster IP" && c.Service.ExternalLocal }

// Allowed returns the entry that allows a difference, or nil.
func Allowed(w *World, d Diff) *Difference {
	for i := range Differences {
		if Differences[i].Applies(w, d) {
			return &Differences[i]
		}
	}
	return nil
}

const tableHead = "| difference | why |\n|---|---|\n"

// Table returns the table of differences in docs/differences.md.
func Table() string {
	var text strings.Builder
	text.WriteString(tableHead)
	for _, d := range Differences {
		fmt.Fprintf(&text, "| %s | %s |\n", d.What, d.Why)
	}
	return text.String()
}
