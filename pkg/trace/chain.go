package trace

import (
	"fmt"
	"net/netip"

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

// hook evaluates a base chain and its policy.
func (w *walk) hook(table nat.Table, chain string, p *packet) end {
	contents, exists := w.Ruleset[table]
	if !exists {
		return undecided
	}
	where := string(table) + " " + chain
	verdict := w.chain(table, chain, where, p)
	if verdict == undecided && contents.Policies[chain] == "DROP" {
		w.note(where, p, "", "the chain's policy is DROP")
		return dropped
	}
	return verdict
}

// hooks evaluates the tables of a hook in order, until one ends the traversal.
func (w *walk) hooks(chain string, p *packet, tables ...nat.Table) end {
	for _, table := range tables {
		if table == nat.NAT && !p.seesNAT() {
			continue
		}
		if verdict := w.hook(table, chain, p); verdict == dropped || verdict == refused {
			return verdict
		}
		w.interfere(string(table)+" "+chain, p)
	}
	return undecided
}

// chain returns the verdict of a chain, or undecided at its end.
func (w *walk) chain(table nat.Table, name, where string, p *packet) end {
	for i, text := range w.Ruleset[table].Chains[name] {
		w.rules++
		r := w.eval.rule(text)
		matched, err := w.matches(r, p)
		if w.eval.Near != nil && !matched {
			w.near(table, name, i, r, p)
		}
		if err != nil {
			w.doubt("%s: -A %s %s: %s", table, name, text, err)
			continue
		}
		if !matched {
			continue
		}
		if w.eval.Matched != nil {
			w.eval.Matched(table, name, i)
		}
		verdict, returns := w.target(table, r, where, name, p)
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

// target executes a rule's target. returns reports whether the chain ends here.
func (w *walk) target(table nat.Table, r *rule, where, chain string, p *packet) (_ end, returns bool) {
	text := "-A " + chain + " " + string(r.text)
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
		w.translateSource(r, where, text, p)
		return accepted, false
	case "DNAT", "REDIRECT":
		return w.translateDestination(r, where, text, p), false
	}
	return w.jump(table, r, where, text, p)
}

// jump follows a rule into a chain. Other targets that do not matter here change
// nothing (LOG, NFLOG, CT, TCPMSS, …).
func (w *walk) jump(table nat.Table, r *rule, where, text string, p *packet) (_ end, returns bool) {
	if _, ok := w.Ruleset[table].Chains[r.target]; ok {
		return w.chain(table, r.target, where, p), r.jumps
	}
	switch r.target {
	case "", "LOG", "NFLOG", "CT", "NOTRACK", "TCPMSS", "CHECKSUM", "TRACE", "CLASSIFY":
	default:
		w.doubt("%s: unsupported target %s", text, r.target)
	}
	return undecided, false
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
func (w *walk) translateSource(r *rule, where, text string, p *packet) {
	arg, _ := r.option("--to-source")
	to, err := netip.ParseAddr(arg)
	if r.target == "MASQUERADE" {
		to, err = w.masquerade(p), nil
	}
	if err != nil || !to.IsValid() {
		w.doubt("%s: no address to translate to", text)
		return
	}
	p.src = netip.AddrPortFrom(to, p.src.Port())
	_, random := r.option("--random-fully")
	p.conn.random = p.conn.random || random
	w.note(where, p, text, "source becomes %s", to)
}

// translateDestination sets another destination. A redirected connection goes to the
// node; if the interface has no address it is dropped (nf_nat_redirect_ipv4).
func (w *walk) translateDestination(r *rule, where, text string, p *packet) end {
	if r.target == "REDIRECT" {
		if ports, given := r.option("--to-ports"); given {
			w.doubt("%s: the new port %s is ignored", text, ports)
		}
		to := w.redirected(p)
		if !to.IsValid() {
			w.note(where, p, text, "dropped: %s has no address", p.in)
			return dropped
		}
		p.dst = netip.AddrPortFrom(to, p.dst.Port())
		w.note(where, p, text, "destination becomes %s", p.dst)
		return accepted
	}
	arg, _ := r.option("--to-destination")
	to, err := netip.ParseAddrPort(arg)
	if err != nil {
		var a netip.Addr
		a, err = netip.ParseAddr(arg)
		to = netip.AddrPortFrom(a, p.dst.Port())
	}
	if err != nil {
		w.doubt("%s: no address to translate to", text)
		return accepted
	}
	p.dst = to
	w.note(where, p, text, "destination becomes %s", to)
	return accepted
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
