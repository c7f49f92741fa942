package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// Step is one action on a packet, or one decision about it.
type Step struct {
	// Where is a hook ("mangle PREROUTING"), "route", "reverse path", "IPVS" or
	// "conntrack".
	Where  string `json:"where"`
	What   string `json:"what"`           // in words
	Rule   string `json:"rule,omitempty"` // as iptables-save prints it
	Packet string `json:"packet"`         // source > destination after this step
	Mark   string `json:"mark,omitempty"` // after this step, unless 0
	// Rules is the number of iptables rules that the connection's packets were matched
	// against so far.
	Rules int `json:"rulesEvaluated"`
}

// walk follows packets and records the steps.
type walk struct {
	*Node
	eval   *Evaluator
	steps  []Step
	doubts []string // rules that could not be evaluated
	rules  int      // that a packet was matched against
	// routedBy is the mark of the last route lookup of a packet in OUTPUT. If the packet's mark
	// differs, the kernel looks up the route again. A mark that a chain of type filter sets does
	// not cause that, so routedBy changes with it.
	routedBy uint32
}

func (w *walk) note(where string, p *packet, rule, format string, args ...any) {
	if w.eval.Quiet {
		w.steps = append(w.steps[:0], Step{Where: where, What: format, Rule: rule})
		return
	}
	s := Step{Where: where, What: fmt.Sprintf(format, args...), Rule: rule, Packet: p.String(), Rules: w.rules}
	if p.mark != 0 {
		s.Mark = fmt.Sprintf("%#x", p.mark)
	}
	w.steps = append(w.steps, s)
}

// end is a verdict that ends a packet's traversal of a hook.
type end string

const (
	undecided end = ""
	accepted  end = "ACCEPT" // by this table; the next one follows
	dropped   end = "dropped"
	refused   end = "refused"
)

// hook evaluates a base chain and its policy, in both back ends of iptables. A connection whose
// address one of them has translated does not see table nat of the other (nf_nat_inet_fn).
func (w *walk) hook(table nat.Table, chain string, p *packet) end {
	verdict := w.hookOf(chainKey{false, table, chain}, p)
	translated := table == nat.NAT && verdict == accepted
	if w.Other == nil || translated || verdict == dropped || verdict == refused {
		return verdict
	}
	return w.hookOf(chainKey{true, table, chain}, p)
}

// text returns the name of a base chain as steps show it.
func (k chainKey) text() string {
	if k.other {
		return string(k.table) + " " + k.name + " of the other back end"
	}
	return string(k.table) + " " + k.name
}

func (w *walk) hookOf(key chainKey, p *packet) end {
	c := w.chainOf(key)
	verdict := w.chain(c, c.text, p)
	if verdict == undecided && c.policy == "DROP" {
		w.note(c.text, p, "", "the chain's policy is DROP")
		return dropped
	}
	return verdict
}

// hooks evaluates the tables of a hook in order, and the chains of nftables between them, until
// one ends the traversal. Chains of nftables with the priority of a table follow it.
func (w *walk) hooks(chain string, p *packet, tables ...nat.Table) end {
	nats := slices.Contains(tables, nat.NAT)
	next, last := span(chain, tables)
	for _, table := range tables {
		at := priority(chain, table)
		if verdict := w.native(chain, next, at-1, nats, p); verdict != undecided {
			return verdict
		}
		next = at
		if table == nat.NAT && !p.seesNAT() || table == security && !w.hasSecurity() {
			continue
		}
		if verdict := w.hook(table, chain, p); verdict == dropped || verdict == refused {
			return verdict
		}
		if w.eval.Interfere != nil {
			w.interfere(chainKey{false, table, chain}.text(), p)
		}
	}
	return w.native(chain, next, last, nats, p)
}

// chain returns the verdict of a chain, or undecided at its end. where is the base chain.
func (w *walk) chain(c *chain, where string, p *packet) end {
	if w.index.reads != nil {
		w.index.reads.add(c.part)
	}
	for i, r := range c.rules {
		w.rules++
		matched, err := w.matches(r, p)
		if w.eval.Near != nil && !matched {
			w.near(c.table, c.name, i, r, p)
		}
		if err != nil && !harmlessTargets[r.target] {
			matched = w.assumed("%s: -A %s %s: %s", c.table, c.name, r.text, err)
		}
		if !matched {
			continue
		}
		if w.eval.Matched != nil {
			w.eval.Matched(c.table, c.name, i)
		}
		verdict, returns := w.target(c, i, where, p)
		if verdict != undecided {
			return verdict
		}
		if returns {
			return undecided
		}
	}
	return undecided
}

func (w *walk) doubt(format string, args ...any) {
	w.doubts = append(w.doubts, fmt.Sprintf(format, args...))
}

// assumed registers a doubt about a rule. It reports whether this evaluation assumes that the
// rule matches, or, if what the rule does is unknown, that it drops the packet.
func (w *walk) assumed(format string, args ...any) bool {
	text := fmt.Sprintf(format, args...)
	w.doubts = append(w.doubts, text)
	return w.eval.assume[text]
}

// target executes the target of a chain's rule. returns reports whether the chain ends here.
func (w *walk) target(c *chain, index int, where string, p *packet) (_ end, returns bool) {
	r := c.rules[index]
	if to := c.to[index]; to != nil {
		return w.chain(to, where, p), r.isGoto
	}
	text := c.line(index)
	switch r.target {
	case "ACCEPT":
		w.note(where, p, text, "accepted")
		return accepted, false
	case "DROP":
		w.note(where, p, text, "dropped")
		return dropped, false
	case "REJECT":
		w.note(where, p, text, "refused")
		return refused, false
	case "RETURN":
		return undecided, true
	case "MARK", "CONNMARK", "SET":
		w.markBy(r, where, text, p)
		return undecided, false
	case "MASQUERADE", "SNAT":
		return w.translateSource(r, where, text, p), false
	case "DNAT", "REDIRECT":
		return w.translateDestination(r, where, text, p), false
	}
	read(w.Node, chainKey{c.other, c.table, r.target})
	if !harmlessTargets[r.target] && w.assumed("%s: unsupported target %s", text, r.target) {
		w.note(where, p, text, "assumed to be dropped")
		return dropped, false
	}
	return undecided, false
}

// harmlessTargets change nothing that matters here.
var harmlessTargets = map[string]bool{
	"": true, "LOG": true, "NFLOG": true, "ULOG": true, "CT": true, "NOTRACK": true, "TCPMSS": true, "TCPOPTSTRIP": true,
	"CHECKSUM": true, "TRACE": true, "CLASSIFY": true, "DSCP": true, "TOS": true, "ECN": true, "TTL": true, "HL": true,
	"TEE": true, "LED": true, "AUDIT": true, "IDLETIMER": true, "RATEEST": true, "SECMARK": true, "CONNSECMARK": true,
}

// markBy sets the mark of the packet or of the connection.
func (w *walk) markBy(r *rule, where, text string, p *packet) {
	before, conn := p.mark, p.conn.mark
	_, save := r.option("--save-mark")
	_, restore := r.option("--restore-mark")
	nf, ct := r.mask("--nfmask"), r.mask("--ctmask")
	switch {
	case r.target == "SET":
		w.mapSet(r, p)
		w.addToSet(r, where, text, p)
	case save:
		p.conn.mark = p.conn.mark&^ct ^ p.mark&nf
	case restore:
		p.mark = p.mark&^nf ^ p.conn.mark&ct
	default:
		w.setMark(r, text, p)
	}
	if p.mark != before {
		w.note(where, p, text, "mark %#x", p.mark)
	}
	if p.conn.mark != conn {
		w.note(where, p, text, "connmark %#x", p.conn.mark)
	}
}

// mapSet sets the mark that a set member carries.
func (w *walk) mapSet(r *rule, p *packet) {
	args := r.options["--map-set"]
	_, marks := r.option("--map-mark")
	if len(args) != 2 || !marks {
		return
	}
	mark, entry, found, _ := w.member(args[0], args[1], p)
	if !found {
		return
	}
	if w.eval.Member != nil {
		w.eval.Member(args[0], entry)
	}
	p.mark = mark
}

// addToSet notes that a packet becomes a member of a set. Rules that match the set do not
// see that.
func (w *walk) addToSet(r *rule, where, text string, p *packet) {
	args := r.options["--add-set"]
	if len(args) != 2 {
		return
	}
	_, entry, _, known := w.member(args[0], args[1], p)
	if !known {
		w.doubt("%s: unknown set %s", text, args[0])
		return
	}
	w.note(where, p, text, "%s is added to the set %s", entry, args[0])
	if w.eval.Added != nil {
		w.eval.Added(args[0], entry)
	}
}

func (w *walk) setMark(r *rule, text string, p *packet) {
	arg, _ := r.option("--set-xmark")
	value, bits, err := parseMark(arg)
	if err != nil {
		w.doubt("%s: %s", text, err)
		return
	}
	if r.target == "MARK" {
		p.mark = p.mark&^bits ^ value
	} else {
		p.conn.mark = p.conn.mark&^bits ^ value
	}
}

// mask returns an option's mask, or that of all bits.
func (r *rule) mask(option string) uint32 {
	arg, given := r.option(option)
	bits, _, err := parseMark(arg)
	if !given || err != nil {
		return ^uint32(0)
	}
	return bits
}

// translateSource sets another source for the whole connection.
func (w *walk) translateSource(r *rule, where, text string, p *packet) end {
	arg, _ := r.option("--to-source")
	to, err := translated(arg)
	if r.target == "MASQUERADE" {
		to, err = netip.AddrPortFrom(w.masquerade(p), 0), nil
	}
	if err != nil || !to.IsValid() {
		return w.untranslated(where, text, p)
	}
	p.src, p.conn.snat = netip.AddrPortFrom(to.Addr(), p.src.Port()), true
	_, random := r.option("--random-fully")
	p.conn.random = p.conn.random || random
	w.note(where, p, text, "source becomes %s", to.Addr())
	return accepted
}

// untranslated is for a rule whose new address is unknown.
func (w *walk) untranslated(where, text string, p *packet) end {
	if w.assumed("%s: no address to translate to", text) {
		w.note(where, p, text, "assumed to be dropped")
		return dropped
	}
	return accepted
}

// translated parses "ADDRESS[-ADDRESS][:PORT[-PORT]]", the argument of SNAT and DNAT, in which
// an IPv6 address with a port is in brackets. Of ranges it returns the first. The port is 0 if
// none is given.
func translated(arg string) (netip.AddrPort, error) {
	host, port := arg, ""
	if inside, ok := strings.CutPrefix(arg, "["); ok {
		host, port, _ = strings.Cut(inside, "]")
		port = strings.TrimPrefix(port, ":")
	} else if strings.Count(arg, ":") == 1 {
		host, port, _ = strings.Cut(arg, ":")
	}
	host, _, _ = strings.Cut(host, "-")
	port, _, _ = strings.Cut(port, "-")
	address, err := netip.ParseAddr(host)
	if err != nil || port == "" {
		return netip.AddrPortFrom(address, 0), err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return netip.AddrPortFrom(address, uint16(n)), err
}

// translateDestination sets another destination. A redirected connection goes to the
// node; if the interface has no address it is dropped (nf_nat_redirect_ipv4).
func (w *walk) translateDestination(r *rule, where, text string, p *packet) end {
	arg, _ := r.option("--to-destination")
	to, err := translated(arg)
	if r.target == "REDIRECT" {
		to, err = w.redirectedTo(r, p)
		if err == nil && !to.Addr().IsValid() {
			w.note(where, p, text, "dropped: %s has no address", p.in)
			return dropped
		}
	}
	if err != nil {
		return w.untranslated(where, text, p)
	}
	p.dst, p.conn.dnat = netip.AddrPortFrom(to.Addr(), cmp.Or(to.Port(), p.dst.Port())), true
	w.note(where, p, text, "destination becomes %s", p.dst)
	return accepted
}

// redirectedTo returns the new destination of REDIRECT. The port is 0 if it does not change.
func (w *walk) redirectedTo(r *rule, p *packet) (netip.AddrPort, error) {
	ports, given := r.option("--to-ports")
	first, _, _ := strings.Cut(ports, "-")
	if !given {
		first = "0"
	}
	port, err := strconv.ParseUint(first, 10, 16)
	return netip.AddrPortFrom(w.redirected(p), uint16(port)), err
}

// redirected returns the address that REDIRECT chooses: the first one of the interface
// on which the packet entered, or a loopback address for the node's own packets.
func (w *walk) redirected(p *packet) netip.Addr {
	if p.in == "" {
		if w.Family == ip.IPv6 {
			return netip.IPv6Loopback()
		}
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	l, _ := w.Link(p.in)
	for _, a := range l.Addresses {
		if ip.Of(a.Prefix.Addr()) == w.Family && (a.Global || w.Family == ip.IPv4) {
			return a.Prefix.Addr()
		}
	}
	return netip.Addr{}
}

// masquerade chooses an address towards the next hop for IPv4, and towards the
// destination for IPv6.
func (w *walk) masquerade(p *packet) netip.Addr {
	next := p.dst.Addr()
	way, ok, _ := w.route(lookup{src: p.src.Addr(), dst: next, in: "lo", mark: p.mark})
	if ok && way.Via.IsValid() && w.Family == ip.IPv4 {
		next = way.Via
	}
	return w.SourceOn(p.out, next)
}
