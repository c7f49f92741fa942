package nft

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

// MarkUse is a rule of another program that sets or matches a packet mark or a connmark, or
// translates the source of packets. Or it is a base chain, without a rule, whose table may drop
// forwarded packets.
type MarkUse struct {
	Chain ID
	Rule  string // as nft prints it

	// Values are the marks that the rule sets or matches, without their masks. Those in named sets
	// and maps, and those that the rule computes, are missing.
	Values []uint32
	// Bits are the bits of the values, those that the rule sets or clears while it keeps others, and
	// those that it tests.
	Bits uint32
	// Translates means that it translates the source of packets without a mark.
	Translates bool
	// Refuses means that the table of the chain may drop forwarded packets, before they are
	// translated or without that.
	Refuses bool
}

// Affects reports whether packets of a family pass the rule.
func (u MarkUse) Affects(f ip.Family) bool {
	return u.Chain.Family != "ip" && u.Chain.Family != "ip6" || u.Chain.Family == string(familyOf(f))
}

// MarkReader reads rules that other programs wrote with nftables directly. Package nat reads those
// of iptables-nft.
type MarkReader struct{}

// Observe returns the rules that use marks or translate sources, and a base chain of each table
// that may drop forwarded packets. It omits those of kube-proxy. It runs nft, in the network namespace
// of the calling thread: once on a node without such tables, and up to twice more for each table. The
// error is exec.ErrNotFound if nft is not installed.
func (MarkReader) Observe() ([]MarkUse, error) {
	tables, err := Tables()
	if err != nil {
		return nil, err
	}
	var out []MarkUse
	for _, table := range tables {
		if !mayMark(table) {
			continue
		}
		uses, err := usesIn(table)
		if err != nil {
			if now, again := Tables(); again == nil && !slices.Contains(now, table) {
				continue // deleted meanwhile
			}
			return nil, err
		}
		out = append(out, uses...)
	}
	return out, nil
}

// mayMark reports whether a table, such as "inet filter", may hold rules that are read.
func mayMark(table string) bool {
	family, name, _ := strings.Cut(table, " ")
	c := Chain{ID: ID{Family: family, Table: name}}
	return family != "arp" && name != KubeProxyTable && !c.isOwn() && !c.isIPTables()
}

// telling are the parts of a listing without which usesIn returns nothing.
var telling = []string{`"mark"`, `"masquerade"`, `"snat"`, `"drop"`, `"reject"`, `"vmap"`, `"queue"`}

// usesIn returns the MarkUses of a table. It does not list the elements of sets, of
// which there may be many.
func usesIn(table string) ([]MarkUse, error) {
	list := func(format string) (string, error) {
		arguments := append([]string{format, "-t", "list", "table"}, strings.Fields(table)...)
		out, stderr, err := program.Run("nft", "", arguments...)
		if err != nil {
			return "", fmt.Errorf("nft %s: %w: %s", strings.Join(arguments, " "), err, strings.TrimSpace(stderr))
		}
		return out, nil
	}
	listing, err := list("-j")
	if err != nil || !slices.ContainsFunc(telling, func(word string) bool { return strings.Contains(listing, word) }) {
		return nil, err
	}
	text, err := list("-a")
	if err != nil {
		return nil, err
	}
	rules, err := ParseRuleset([]byte(listing), text)
	if err != nil {
		return nil, fmt.Errorf("table %s: %w", table, err)
	}
	return append(rules.markUses(), rules.refusals()...), nil
}

// refusals returns the base chain at the first hook that forwarded packets pass, if a chain at such a
// hook has the policy drop, or any rule of the ruleset may drop packets.
func (r *Ruleset) refusals() []MarkUse {
	hooks := filter(r.Base, func(c *Chain) bool {
		return c.Type != "nat" && slices.Contains([]string{"prerouting", "forward", "postrouting"}, c.Hook)
	})
	drops := slices.ContainsFunc(hooks, func(c *Chain) bool { return c.Policy == "drop" })
	for _, c := range r.Chains {
		drops = drops || slices.ContainsFunc(c.Rules, func(rule *Rule) bool { return slices.ContainsFunc(rule.Expr, mayDrop) })
	}
	if len(hooks) == 0 || !drops {
		return nil
	}
	return []MarkUse{{Chain: hooks[0].ID, Refuses: true}}
}

// mayDrop reports whether an expression, or one within it, is a verdict that drops packets, or
// depends on the verdicts of a map whose elements are not listed.
func mayDrop[V any](expr map[string]V) bool {
	for name, body := range expr {
		if name == "drop" || name == "reject" || name == "queue" || contains(name, body) {
			return true
		}
	}
	return false
}

func contains(name string, body any) bool {
	switch b := body.(type) {
	case map[string]any:
		_, isName := b["data"].(string)
		return name == "vmap" && isName || mayDrop(b)
	case []any:
		return slices.ContainsFunc(b, func(part any) bool { return contains(name, part) })
	}
	return false
}

func filter[T any](list []T, keep func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(list), func(v T) bool { return !keep(v) })
}

// markUses returns the rules that use marks or translate sources, sorted by chain.
func (r *Ruleset) markUses() []MarkUse {
	var out []MarkUse
	for _, c := range r.Chains {
		for _, rule := range c.Rules {
			u := MarkUse{Chain: c.ID, Rule: rule.Text}
			for _, expr := range rule.Expr {
				for name, body := range expr {
					u.add(name, body)
				}
			}
			if u.Translates = u.Translates && !requiresMark(rule.Expr); u.Bits != 0 || u.Translates {
				out = append(out, u)
			}
		}
	}
	slices.SortStableFunc(out, func(a, b MarkUse) int { return strings.Compare(a.Chain.String(), b.Chain.String()) })
	return out
}

// requiresMark reports whether a rule matches only packets with a mark.
func requiresMark(exprs []map[string]any) bool {
	return slices.ContainsFunc(exprs, func(expr map[string]any) bool {
		fields, _ := expr["match"].(map[string]any)
		return isMark(operand(fields["left"])) && (fields["op"] != "!=" || fields["right"] == 0.0)
	})
}

// add adds the marks of one expression of a rule: its name and its body.
func (u *MarkUse) add(name string, body any) {
	fields, _ := body.(map[string]any)
	var n numbers
	switch {
	case name == "masquerade" || name == "snat":
		u.Translates = true
	case name == "match" && isMark(operand(fields["left"])):
		n.read(fields["left"])
		n.read(fields["right"])
		u.Bits |= union(n.masks)
		if union(n.values) == 0 {
			n.values = n.masks // a test of bits, such as "meta mark & 0x80 != 0"
		}
	case name == "vmap" && isMark(operand(fields["key"])):
		n.readElements(fields["data"], 0)
	case name == "mangle" && isMark(fields["key"]):
		n.read(fields["value"])
		if reflect.DeepEqual(operand(fields["value"]), fields["key"]) && len(n.masks) > 0 {
			u.Bits |= ^union(n.masks)
		}
	}
	u.Values = append(u.Values, n.values...)
	u.Bits |= union(n.values)
}

// isMark reports whether an expression is the packet mark or the connmark.
func isMark(expr any) bool {
	e, _ := expr.(map[string]any)
	for name, body := range e {
		fields, _ := body.(map[string]any)
		return (name == "meta" || name == "ct") && fields["key"] == "mark"
	}
	return false
}

// operand returns the first operand of the innermost bitwise operation, or the expression if it is
// none.
func operand(expr any) any {
	e, _ := expr.(map[string]any)
	for name, body := range e {
		if operands, ok := body.([]any); ok && len(operands) > 0 && strings.Contains("&|^", name) {
			return operand(operands[0])
		}
	}
	return expr
}

// numbers are those of an expression: values of a mark, and operands of &.
type numbers struct{ values, masks []uint32 }

func (n *numbers) read(expr any) {
	switch e := expr.(type) {
	case float64:
		n.values = append(n.values, uint32(e))
	case []any:
		for _, part := range e {
			n.read(part)
		}
	case map[string]any:
		for name, body := range e {
			fields, _ := body.(map[string]any)
			switch name {
			case "&":
				var of numbers
				of.read(body)
				n.masks = append(n.masks, append(of.values, of.masks...)...)
			case "|", "^", "set", "range":
				n.read(body)
			case "prefix":
				n.read(fields["addr"])
			case "elem":
				n.read(fields["val"])
			case "map":
				n.readElements(fields["data"], 1)
			}
		}
	}
}

// readElements reads the keys (part 0) or the values (part 1) of a map without a name.
func (n *numbers) readElements(data any, part int) {
	fields, _ := data.(map[string]any)
	pairs, _ := fields["set"].([]any)
	for _, p := range pairs {
		if pair, ok := p.([]any); ok && len(pair) == 2 {
			n.read(pair[part])
		}
	}
}

func union(bits []uint32) uint32 {
	var out uint32
	for _, b := range bits {
		out |= b
	}
	return out
}
