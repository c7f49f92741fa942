package nft

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

// Ruleset are the chains that programs wrote with nftables directly, and those of iptables-nft in
// table security. It excludes all other chains of iptables-nft, and those of kube-ipvs.
type Ruleset struct {
	// Base are the chains at hooks of the families ip, ip6 and inet, in the order of their
	// priorities. Link are those of devices (hooks "ingress" and "egress") and of bridges.
	Base   []*Chain
	Link   []*Chain
	Chains map[ID]*Chain
	Sets   map[ID][]any // elements of sets and of maps, decoded like Rule.Expr
}

// ID names a chain or a set.
type ID struct {
	Family string `json:"family"` // "ip", "ip6", "inet", "netdev" or "bridge"
	Table  string `json:"table"`
	Name   string `json:"name"`
}

// In returns the name of a chain or set in the same table.
func (id ID) In(name string) ID { return ID{id.Family, id.Table, name} }

func (id ID) String() string { return id.Family + " " + id.Table + " " + id.Name }

// Chain is a chain of nftables.
type Chain struct {
	ID
	// Of a base chain.
	Type     string `json:"type"` // "filter", "nat" or "route"
	Hook     string `json:"hook"` // "" if it is not a base chain
	Priority int    `json:"prio"`
	Policy   string `json:"policy"`
	Devices  names  `json:"dev"` // of the hooks "ingress" and "egress"; nil if unknown

	Rules []*Rule `json:"-"`
}

// Rule is a rule of nftables.
type Rule struct {
	Text string // as nft prints it
	// Expr are its conditions and statements, as decoded from nft's JSON (libnftables-json(5)):
	// objects with one member each.
	Expr []map[string]any
}

// ReadRuleset runs nft, in the network namespace of the calling thread. The error is
// exec.ErrNotFound if nft is not installed.
func ReadRuleset() (*Ruleset, error) {
	listing, stderr, err := program.Run("nft", "", "-j", "list", "ruleset")
	if err != nil {
		return nil, fmt.Errorf("nft -j list ruleset: %w: %s", err, strings.TrimSpace(stderr))
	}
	// For the text of rules, and for devices, which nft 1.0.6 leaves out of the JSON. They are
	// the same, unless another program has just changed them.
	text, stderr, err := program.Run("nft", "", "-a", "list", "ruleset")
	if err != nil {
		return nil, fmt.Errorf("nft -a list ruleset: %w: %s", err, strings.TrimSpace(stderr))
	}
	return ParseRuleset([]byte(listing), text)
}

// object is a member of the list that nft prints. At most one of its fields is set.
type object struct {
	Chain *Chain `json:"chain"`
	Rule  *struct {
		ID
		Chain  string           `json:"chain"`
		Handle int              `json:"handle"`
		Expr   []map[string]any `json:"expr"`
	} `json:"rule"`
	Set *elements `json:"set"`
	Map *elements `json:"map"`
}

type elements struct {
	ID
	Elem []any `json:"elem"`
}

// ParseRuleset parses the output of "nft -j list ruleset". text is that of "nft -a list
// ruleset". It fails if the listing is not of that format.
func ParseRuleset(listing []byte, text string) (*Ruleset, error) {
	var list struct {
		Nftables []object `json:"nftables"`
	}
	if err := json.Unmarshal(listing, &list); err != nil {
		return nil, fmt.Errorf("nft -j list ruleset: %w", err)
	}
	out := &Ruleset{Chains: map[ID]*Chain{}, Sets: map[ID][]any{}}
	texts, devices := parseText(text)
	for _, o := range list.Nftables {
		switch {
		case o.Chain != nil:
			if o.Chain.Devices == nil {
				o.Chain.Devices = devices[o.Chain.ID]
			}
			out.addChain(o.Chain)
		case o.Rule != nil:
			if c := out.Chains[o.Rule.In(o.Rule.Chain)]; c != nil {
				c.Rules = append(c.Rules, &Rule{texts[c.In(strconv.Itoa(o.Rule.Handle))], o.Rule.Expr})
			}
		case o.Set != nil:
			out.Sets[o.Set.ID] = o.Set.Elem
		case o.Map != nil:
			out.Sets[o.Map.ID] = o.Map.Elem
		}
	}
	for _, chains := range [][]*Chain{out.Base, out.Link} {
		slices.SortStableFunc(chains, func(a, b *Chain) int { return a.Priority - b.Priority })
	}
	return out, nil
}

// names is a name or a list of names.
type names []string

func (n *names) UnmarshalJSON(text []byte) error {
	var one string
	if json.Unmarshal(text, &one) == nil {
		*n = names{one}
		return nil
	}
	return json.Unmarshal(text, (*[]string)(n))
}

func (r *Ruleset) addChain(c *Chain) {
	if c.isOwn() || c.isIPTables() {
		return
	}
	switch {
	case !slices.Contains([]string{"ip", "ip6", "inet", "netdev", "bridge"}, c.Family):
		return
	case c.Hook == "ingress" || c.Hook == "egress" || c.Hook != "" && c.Family == "bridge":
		r.Link = append(r.Link, c)
	case c.Hook != "":
		r.Base = append(r.Base, c)
	}
	r.Chains[c.ID] = c
}

// isOwn reports whether a chain is one of kube-ipvs.
func (c *Chain) isOwn() bool { return c.Table == Table }

// isIPTables reports whether a chain is one that iptables-nft can list. Table security is not
// among them: its priority is 150 in iptables-nft, and 50 in iptables-legacy.
func (c *Chain) isIPTables() bool {
	return (c.Family == "ip" || c.Family == "ip6") && slices.Contains([]string{"raw", "mangle", "nat", "filter"}, c.Table) &&
		(c.Hook == "" || c.Name == strings.ToUpper(c.Hook))
}

// parseText returns the rules of "nft -a list ruleset", whose names in the keys are handles, and
// the devices of chains.
func parseText(text string) (rules map[ID]string, devices map[ID]names) {
	rules, devices = map[ID]string{}, map[ID]names{}
	var table, chain ID
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		words := strings.Fields(line)
		if len(words) > 2 && words[0] == "table" {
			table = ID{Family: words[1], Table: words[2]}
			continue
		}
		if len(words) > 2 && words[0] == "chain" && words[2] == "{" {
			chain = table.In(words[1])
			continue
		}
		if m := deviceList.FindStringSubmatch(line); m != nil {
			devices[chain] = strings.FieldsFunc(m[1], func(r rune) bool { return strings.ContainsRune(`{}=," `, r) })
			continue
		}
		if rule, handle, ok := strings.Cut(line, " # handle "); ok && !strings.HasSuffix(rule, "{") {
			rules[table.In(handle)] = rule
		}
	}
	return rules, devices
}

// deviceList matches the devices of a base chain: device "eth0", or devices = { eth0, eth1 }.
var deviceList = regexp.MustCompile(`^type filter hook (?:ingress|egress) devices? (.*) priority `)
