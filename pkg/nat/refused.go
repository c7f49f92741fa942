package nat

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// A part is what a rule needs in order to be accepted:
//
//	-m set                            an extension
//	-j MASQUERADE --random-fully      an option of an extension
//	-m addrtype --dst-type LOCAL      an extension with its options
//	set KUBE-CLUSTER-IP               a set
//	-p tcp -m set … -j RETURN         all of it, in this combination
//
// Rules are refused because of their parts, so a run of iptables-restore for each missing
// part finds all refused rules, however many there are. Failed runs are slow: the kernel
// starts modprobe for each revision of the extension, for each rule.
type part string

// randomFully is the option that iptables before 1.6.2 and Linux before 3.13 lack.
const randomFully = " --random-fully"

// comment is the extension without which rules are written without their comments.
const comment part = "-m comment"

// missing are the missing parts of a table.
type missing map[part]*absence

type absence struct {
	err error
	// witness is a rule that is refused because of the part alone.
	witness Rule
	tried   time.Time
}

// verdict reports why a rule is refused.
func (m missing) verdict(r Rule) (verdict, bool) {
	if len(m) == 0 {
		return verdict{}, false
	}
	for _, p := range needs(r) {
		a, ok := m[p]
		if !ok {
			continue
		}
		v := verdict{lacks: p, err: a.err}
		switch {
		case extension(string(p)) == comment:
			v.instead = withoutComment(r)
			if other, refused := m.verdict(v.instead); refused {
				return other, true
			}
		case strings.HasSuffix(string(p), randomFully):
			v.instead = Rule(strings.TrimSuffix(string(r), randomFully))
		}
		return v, true
	}
	return verdict{}, false
}

// withoutComment returns a rule without its comment, which has no effect on packets.
func withoutComment(r Rule) Rule {
	base, list := clauses(r)
	words := []string{base}
	for _, c := range list {
		if extension(c) != comment {
			words = append(words, c)
		}
	}
	return Rule(strings.TrimSpace(strings.Join(words, " ")))
}

// needs returns the parts of a rule. An option that may be omitted is the last one.
func needs(r Rule) []part {
	r = withoutJump(r)
	_, list := clauses(r)
	var out, options []part
	for _, c := range list {
		out = append(out, extension(c), part(c))
		if strings.HasSuffix(c, randomFully) {
			options = append(options, extension(c)+randomFully)
		}
	}
	for _, set := range Arguments(r, "--match-set", "--map-set", "--add-set") {
		out = append(out, part("set "+set))
	}
	return append(append(out, part(r)), options...)
}

// clauses splits a rule into what precedes its first extension, and its matches and
// target with their options.
func clauses(r Rule) (base string, list []string) {
	var starts []int
	quoted := false
	text := string(r)
	for i := range text {
		if text[i] == '"' && (i == 0 || text[i-1] != '\\') {
			quoted = !quoted
		}
		if rest := text[i:]; !quoted && (i == 0 || text[i-1] == ' ') && (strings.HasPrefix(rest, "-m ") || strings.HasPrefix(rest, "-j ")) {
			starts = append(starts, i)
		}
	}
	for i, start := range starts {
		end := len(text)
		if i+1 < len(starts) {
			end = starts[i+1]
		}
		list = append(list, strings.TrimSpace(text[start:end]))
	}
	if len(starts) > 0 {
		text = text[:starts[0]]
	}
	return strings.TrimSpace(text), list
}

// extension returns "-m NAME" or "-j NAME" of a clause.
func extension(clause string) part {
	words := strings.SplitN(clause, " ", 3)
	return part(strings.Join(words[:min(2, len(words))], " "))
}

// alone returns a rule with only one clause of another rule, after what precedes its
// extensions: some extensions require a protocol.
func alone(base, clause string) Rule {
	if strings.HasPrefix(clause, "-m ") {
		clause += " -j RETURN"
	}
	return Rule(strings.TrimSpace(base + " " + clause))
}

// find tries the rules of a table's changes and records the missing parts of those that
// are refused. It reports whether it found any that was not known.
func (l *omissions) find(b backend, t Table, changes []Change, err error) bool {
	if !mayBeRule(err) {
		return false
	}
	defer removeProbe(b, t)
	if probe(b, t, "-j RETURN") != nil {
		return false // the table cannot be written at all
	}
	found := false
	for {
		s := search{b, t, l.accepted(t, changes)}
		r, err := s.refused()
		if !mayBeRule(err) {
			return found
		}
		p, a := s.cause(r, err)
		if l.missing == nil {
			l.missing = map[Table]missing{}
		}
		if l.missing[t] == nil {
			l.missing[t] = missing{}
		}
		l.missing[t][p] = a
		found = true
	}
}

// accepted returns the distinct rules of changes that are not known to be refused, or their
// replacements.
func (l *omissions) accepted(t Table, changes []Change) []Rule {
	var out []Rule
	for _, c := range changes {
		if c.Op != WriteChain && c.Op != InsertJump && c.Op != AppendJump {
			continue
		}
		for _, r := range c.Rules {
			v, refused := l.verdict(t, r)
			if refused {
				r = v.instead
			}
			if r = withoutJump(r); r != "" && !slices.Contains(out, r) {
				out = append(out, r)
			}
		}
	}
	return out
}

// retry tries missing parts, at most every probePeriod, and forgets those that exist now:
// the next comparison writes their rules. It tries only a few at a time, unless one of
// them exists now: then the others may exist, too.
func (l *omissions) retry(b backend, now time.Time) {
	if len(l.missing) == 0 || now.Sub(l.probed) < probePeriod {
		return
	}
	l.probed = now
	for t, known := range l.missing {
		most := probesPerPeriod
		for i, p := range slices.SortedFunc(maps.Keys(known), func(a, b part) int {
			return cmp.Or(known[a].tried.Compare(known[b].tried), cmp.Compare(a, b))
		}) {
			if i >= most {
				break
			}
			known[p].tried = now
			if probe(b, t, known[p].witness) == nil {
				delete(known, p)
				most = i + 1 + len(known)
			}
		}
		removeProbe(b, t)
		if len(known) == 0 {
			delete(l.missing, t)
		}
	}
}

const (
	// probePeriod is the minimum time between two attempts to write refused rules: a
	// module may have been installed meanwhile.
	probePeriod = 20 * time.Second
	// probesPerPeriod is how many missing parts are tried then in each table.
	probesPerPeriod = 4
	// samples is how many uses of an extension must be refused before the extension
	// itself counts as missing.
	samples = 3
	// probeChain is the chain in which rules are tried. It has our prefix, so that the
	// next process removes one that a crash has left.
	probeChain = "KUBE-IPVS-PROBE"
)

// mayBeRule reports whether a single rule may have caused an error. Other errors are
// temporary or concern every rule.
func mayBeRule(err error) bool {
	var r *refusal
	return errors.As(err, &r) && !kernel.IsTransient(err) && !kernel.IsPermission(err) &&
		!errors.Is(err, unix.ENOMEM) && !errors.Is(err, unix.ENOSPC)
}

// search looks for refused rules of a table.
type search struct {
	b     backend
	t     Table
	rules []Rule
}

// refused returns a rule that is refused by itself, and the error; or "" and nil if there
// is none. iptables names the line that it refuses in most cases.
func (s *search) refused() (Rule, error) {
	err := probe(s.b, s.t, s.rules...)
	if err == nil {
		return "", nil
	}
	var r *refusal
	if errors.As(err, &r) && r.line > probeHead && r.line <= probeHead+len(s.rules) {
		rule := s.rules[r.line-probeHead-1]
		if err := probe(s.b, s.t, rule); err != nil {
			return rule, err
		}
	}
	return s.bisect(s.rules)
}

func (s *search) bisect(rules []Rule) (Rule, error) {
	for len(rules) > 1 {
		half := rules[:len(rules)/2]
		if probe(s.b, s.t, half...) == nil {
			half = rules[len(rules)/2:]
		}
		rules = half
	}
	if len(rules) == 0 {
		return "", nil
	}
	return rules[0], probe(s.b, s.t, rules[0])
}

// cause returns the part of a refused rule that is missing.
func (s *search) cause(r Rule, err error) (part, *absence) {
	if set := missingSet(err); set != "" {
		return part("set " + set), &absence{err: err, witness: r}
	}
	base, list := clauses(r)
	for _, c := range list {
		lone := alone(base, c)
		err := probe(s.b, s.t, lone)
		if !mayBeRule(err) {
			continue
		}
		a := &absence{err: err, witness: lone}
		if plain, ok := strings.CutSuffix(c, randomFully); ok && probe(s.b, s.t, alone(base, plain)) == nil {
			return extension(c) + randomFully, a
		}
		if s.hasExtension(c) {
			return part(c), a
		}
		return extension(c), a
	}
	return part(r), &absence{err: err, witness: r}
}

// hasExtension reports whether other uses of the extension of a clause are accepted. A
// use whose set is missing does not count.
func (s *search) hasExtension(clause string) bool {
	tried := []string{clause}
	for _, r := range s.rules {
		base, list := clauses(r)
		for _, c := range list {
			if extension(c) != extension(clause) || slices.Contains(tried, c) {
				continue
			}
			err := probe(s.b, s.t, alone(base, c))
			if err == nil {
				return true
			}
			if missingSet(err) == "" {
				tried = append(tried, c)
			}
			if len(tried) == samples {
				return false
			}
		}
	}
	return false
}

// noSet finds the name in "Set KUBE-CLUSTER-IP doesn't exist."
var noSet = regexp.MustCompile(`(?i)\bset (\S+) does(?:n't| not) exist`)

// missingSet returns the set that iptables names as the reason of an error, or "".
func missingSet(err error) string {
	var r *refusal
	if !errors.As(err, &r) {
		return ""
	}
	if m := noSet.FindStringSubmatch(r.output); m != nil {
		return m[1]
	}
	return ""
}

// probeHead is the number of lines before the rules of a probe.
const probeHead = 2

// probe writes rules to a chain that no packet traverses. It replaces jumps to other
// chains, which may not exist, by RETURN.
func probe(b backend, t Table, rules ...Rule) error {
	var in strings.Builder
	fmt.Fprintf(&in, "*%s\n:%s - [0:0]\n", t, probeChain)
	for _, r := range rules {
		fmt.Fprintf(&in, "-A %s %s\n", probeChain, withoutJump(r))
	}
	in.WriteString("COMMIT\n")
	return b.restore(in.String())
}

func removeProbe(b backend, t Table) {
	// The next comparison removes what remains.
	_ = b.restore(fmt.Sprintf("*%[1]s\n:%[2]s - [0:0]\n-X %[2]s\nCOMMIT\n", t, probeChain))
}

// withoutJump replaces a target that is a chain by RETURN. Names of our chains contain a
// hyphen, names of extensions do not.
func withoutJump(r Rule) Rule {
	to := target(r)
	if !strings.Contains(to, "-") {
		return r
	}
	return Rule(strings.TrimSuffix(string(r), "-j "+to) + "-j RETURN")
}
