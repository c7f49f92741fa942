package nft

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/knftables"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// IPVS does not send packets with a loopback source to another host
// (crosses_local_route_boundary), and decides so before masquerading. So the source of
// the node's own requests is replaced before conntrack sees them, and the destination of
// the reply after IPVS, by two stateless rules of nftables; iptables cannot change
// addresses without conntrack. The sysctl route_localnet stays 0, so that the kernel
// still drops packets of other hosts to loopback addresses (CVE-2020-8558).

// Exchange holds the parameters of the rules of one family: the source of packets from the node
// to its loopback address is replaced by Source if they carry Mark.
type Exchange struct {
	Mark   uint32     // bits that must all be set
	Source netip.Addr // an address of the node, not a loopback address
}

// Loopback holds the rules by family. The Exchange of a family is zero if its rules are
// incomplete or differ from ours.
type Loopback map[ip.Family]Exchange

// LoopbackChange sets the rules of a family, or removes them if the Exchange is zero.
type LoopbackChange struct {
	Family   ip.Family
	Exchange Exchange
}

func (c LoopbackChange) String() string {
	if c.Exchange == (Exchange{}) {
		return fmt.Sprintf("delete the %s rules for the loopback address", c.Family)
	}
	return fmt.Sprintf("set the source of the node's requests to its loopback address to %s", c.Exchange.Source)
}

// LoopbackFailure is a change that the kernel or nft refused.
type LoopbackFailure = kernel.Failure[LoopbackChange]

// DiffLoopback returns the changes from have to want, by family.
func DiffLoopback(have, want Loopback) []LoopbackChange {
	var changes []LoopbackChange
	for _, f := range ip.Families {
		w, wanted := want[f]
		if h, there := have[f]; there != wanted || h != w {
			changes = append(changes, LoopbackChange{f, w})
		}
	}
	return changes
}

// check rejects an Exchange that cannot be written as rules.
func (c LoopbackChange) check() error {
	e := c.Exchange
	switch {
	case !slices.Contains(ip.Families, c.Family):
		return fmt.Errorf("%s: %w", c.Family, unix.EAFNOSUPPORT)
	case e == Exchange{}:
		return nil
	case !e.Source.IsValid() || ip.Of(e.Source) != c.Family || e.Source.IsLoopback() || e.Source.Zone() != "" || e.Mark == 0:
		return fmt.Errorf("source %s, mark %#x: %w", e.Source, e.Mark, unix.EINVAL)
	}
	return nil
}

func (s Loopback) apply(c LoopbackChange) {
	if c.Exchange == (Exchange{}) {
		delete(s, c.Family)
	} else {
		s[c.Family] = c.Exchange
	}
}

func (s Loopback) clone() Loopback {
	if s == nil {
		return Loopback{}
	}
	return maps.Clone(s)
}

// LoopbackRules accesses our rules in the kernel. It may be used concurrently, and acts
// on the network namespace of the calling thread.
type LoopbackRules struct{ *client }

// NewLoopbackRules returns an error if nft is not installed or the kernel has no
// nf_tables.
func NewLoopbackRules() (*LoopbackRules, error) {
	c, err := newClient(Table)
	if err != nil {
		return nil, err
	}
	l := &LoopbackRules{c}
	_, err = l.Observe()
	return l, err
}

// Observe reads our rules.
func (l *LoopbackRules) Observe() (Loopback, error) {
	families, err := l.families()
	if err != nil {
		return nil, err
	}
	have := Loopback{}
	for _, f := range families {
		rules, err := l.rules(f)
		if err != nil {
			return nil, err
		}
		have[f] = exchangeOf(rules)
	}
	return have, nil
}

// Apply makes the changes, each in one transaction, and returns those that failed.
func (l *LoopbackRules) Apply(changes []LoopbackChange) []LoopbackFailure {
	var failures []LoopbackFailure
	for _, c := range changes {
		err := c.check()
		if err == nil {
			err = l.replace(c.Family, c.fill())
		}
		if err != nil {
			failures = append(failures, LoopbackFailure{Change: c, Err: err})
		}
	}
	return failures
}

// The chains of our table. Requests are changed before conntrack (-200), replies after
// IPVS (98 and 99), which has set the loopback address as their source.
const (
	requestChain, requestPriority = "request", "-290"
	answerChain, answerPriority   = "answer", "110"
)

// fill returns the function that adds the rules to an empty table, or nil if there are none.
//
// Conntrack's tuples show that IPVS has routed the connection: it started from a source
// that is not a loopback address, and another host replies. Its status shows that no
// DNAT was involved, such as that of a host port at an address of the node.
func (c LoopbackChange) fill() func(*knftables.Transaction) {
	e := c.Exchange
	if e == (Exchange{}) {
		return nil
	}
	family, any, one := familyOf(c.Family), "127.0.0.0/8", "127.0.0.1"
	if c.Family == ip.IPv6 {
		any, one = "::1", "::1"
	}
	comment := knftables.PtrTo(e.comment())
	return func(tx *knftables.Transaction) {
		addChain(tx, requestChain, knftables.OutputHook, requestPriority)
		addChain(tx, answerChain, knftables.InputHook, answerPriority)
		mark := fmt.Sprintf("%#x", e.Mark)
		tx.Add(&knftables.Rule{Chain: requestChain, Comment: comment, Rule: knftables.Concat(
			"meta mark &", mark, "==", mark, family, "saddr", any, family, "daddr", one, family, "saddr set", e.Source)})
		tx.Add(&knftables.Rule{Chain: answerChain, Comment: comment, Rule: knftables.Concat(
			"ct direction reply ct status & dnat == 0 ct original", family, "daddr", one, "ct original", family, "saddr !=", any,
			"ct reply", family, "saddr !=", any, family, "saddr", one, family, "daddr set", one)})
	}
}

func addChain(tx *knftables.Transaction, name string, hook knftables.BaseChainHook, priority knftables.BaseChainPriority) {
	tx.Add(&knftables.Chain{
		Name: name, Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(hook), Priority: knftables.PtrTo(priority),
	})
}

// The comment of both rules holds the Exchange; Observe reads it from there.
const commentFormat = "mark 0x%x source %s"

func (e Exchange) comment() string { return fmt.Sprintf(commentFormat, e.Mark, e.Source) }

// exchangeOf parses the Exchange from the comments of both rules. It returns the zero
// Exchange if the rules are not exactly ours.
func exchangeOf(rules []*knftables.Rule) Exchange {
	chains := map[string]bool{}
	var e Exchange
	for _, r := range rules {
		comment := ""
		if r.Comment != nil {
			comment = *r.Comment
		}
		this := parseComment(comment)
		if len(chains) > 0 && this != e {
			return Exchange{}
		}
		e, chains[r.Chain] = this, true
	}
	if len(rules) != 2 || !chains[requestChain] || !chains[answerChain] {
		return Exchange{}
	}
	return e
}

func parseComment(comment string) Exchange {
	var e Exchange
	var source string
	if _, err := fmt.Sscanf(comment, commentFormat, &e.Mark, &source); err != nil {
		return Exchange{}
	}
	a, err := netip.ParseAddr(source)
	if e.Source = a; err != nil || e.comment() != comment {
		return Exchange{}
	}
	return e
}
