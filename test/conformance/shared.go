package conformance

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// contenders returns the claims of a shared address and port that may be served, and those
// that must not be. The model does not know which of two Services is older, so all claims of
// the highest rank may be served. Each field of such a Service may be, since all lead to it.
func (w *World) contenders(d Diff) (first, rest []Claim) {
	claims := w.Claims(d.Protocol, d.At)
	if len(claims) < 2 {
		return nil, nil
	}
	best := slices.MinFunc(claims, func(a, b Claim) int { return cmp.Compare(a.rank(), b.rank()) }).rank()
	for _, c := range claims {
		if slices.ContainsFunc(claims, func(o Claim) bool { return o.Service == c.Service && o.rank() == best }) {
			first = append(first, c)
		} else {
			rest = append(rest, c)
		}
	}
	return first, rest
}

func (c Claim) rank() int {
	return map[string]int{"cluster IP": 0, "node port": 0, "load balancer": 1, "external IP": 2}[c.Kind]
}

// followsPrecedence reports whether kube-ipvs has, at an address and port that is claimed
// more than once, what a claim of the highest rank gives it.
func (w *World) followsPrecedence(d Diff) bool {
	first, rest := w.contenders(d)
	if len(first) == 0 {
		return false
	}
	switch d.Kind {
	case "virtual server":
		return slices.ContainsFunc(first, func(c Claim) bool { return d.Ours == c.Service.options() })
	case "real server":
		to := netip.MustParseAddrPort(d.Name)
		has := func(c Claim) bool { return w.hasEndpoint(c, d.At.Addr(), to) }
		if d.Ours != "" {
			return slices.ContainsFunc(first, has)
		}
		return slices.ContainsFunc(rest, has) || differ(first)
	case "member":
		lists := func(c Claim) bool { return c.lists(d.Name) }
		if d.Ours != "" {
			return slices.ContainsFunc(first, lists)
		}
		return slices.ContainsFunc(rest, lists) || len(first) > 1 && slices.ContainsFunc(first, lists)
	case "packet":
		return slices.ContainsFunc(first, func(c Claim) bool { return w.mayAnswer(c, d) })
	}
	return false
}

// differ reports whether claims may have different endpoints.
func differ(claims []Claim) bool {
	return slices.ContainsFunc(claims, func(c Claim) bool {
		return c.Service != claims[0].Service || c.Port != claims[0].Port || (c.Kind == "cluster IP") != (claims[0].Kind == "cluster IP")
	})
}

// options are those of the Service's virtual servers, as ipvsadm writes them.
func (s *Service) options() string {
	if s.AffinitySeconds > 0 {
		return fmt.Sprintf("-s rr -p %d", s.AffinitySeconds)
	}
	return "-s rr"
}

// hasEndpoint reports whether a slice lists an endpoint of a claim, in any state.
func (w *World) hasEndpoint(c Claim, family netip.Addr, to netip.AddrPort) bool {
	for key := range w.copies(c, family) {
		host := Hosts[key[0]]
		if to.Port() == uint16(key[1]) && (to.Addr().String() == host.IPv4 || to.Addr().String() == host.IPv6) {
			return true
		}
	}
	return false
}

// kindSets are the sets in which a claim of a kind may be listed.
var kindSets = map[string][]string{
	"cluster IP":    {"CLUSTER-IP"},
	"external IP":   {"EXTERNAL-IP", "EXTERNAL-IP-LOCAL"},
	"load balancer": {"LOAD-BALANCER", "LOAD-BALANCER-LOCAL", "LOAD-BALANCER-FW", "LOAD-BALANCER-SOURCE-CIDR", "LOAD-BALANCER-SOURCE-IP"},
	"node port":     {"NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH"},
}

func (c Claim) lists(set string) bool {
	return slices.Contains(kindSets[c.Kind], strings.TrimPrefix(strings.TrimPrefix(set, "KUBE-"), "6-"))
}

// mayAnswer reports whether a packet's result can be that of one claim alone: endpoints of
// the claim, or no connection if its endpoints or policies allow for that.
func (w *World) mayAnswer(c Claim, d Diff) bool {
	switch d.Ours {
	case "refused":
		return !w.alwaysReady(c, d.At.Addr()) || c.Kind == "cluster IP" && c.Service.InternalLocal && !w.servesHere(c, d.At.Addr())
	case "dropped":
		return c.Kind == "load balancer" && len(c.Service.SourceRanges) > 0 ||
			externalLocal(c) && !Inside(d.Name) && !w.servesHere(c, d.At.Addr())
	}
	answers := endpointsOf(d.Ours)
	return len(answers) > 0 && !slices.ContainsFunc(answers, func(to netip.AddrPort) bool { return !w.hasEndpoint(c, d.At.Addr(), to) })
}

// alwaysReady reports whether some endpoint of a claim is ready in all slices that list it,
// and has no hints.
func (w *World) alwaysReady(c Claim, family netip.Addr) bool {
	for _, copies := range w.copies(c, family) {
		unusable := func(e Endpoint) bool {
			return e.State != "ready" && e.State != "unset" || len(e.Zones)+len(e.Nodes) > 0
		}
		if !slices.ContainsFunc(copies, unusable) {
			return true
		}
	}
	return false
}

// endpointsOf returns the endpoints that a packet may reach, sorted, or nil if it does not
// reach one of them.
func endpointsOf(answer string) []netip.AddrPort {
	var out []netip.AddrPort
	for one := range strings.SplitSeq(answer, ", ") {
		address, how, _ := strings.Cut(one, " ")
		to, err := netip.ParseAddrPort(address)
		if err != nil || how != "as itself" && how != "masqueraded" {
			return nil
		}
		out = append(out, to)
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out
}
