package nat

import "fmt"

// Ruleset holds all tables of a family, including foreign rules.
type Ruleset map[Table]Contents

// Contents holds a table's chains, including base chains, with their rules in order.
type Contents struct {
	Chains   map[string][]Rule
	Policies map[string]string // of base chains: ACCEPT, DROP
}

// ParseSave parses the output of iptables-save. It returns an error for anything it
// does not understand.
func ParseSave(text string) (Ruleset, error) {
	parsed, err := parseSave(text)
	if err != nil {
		return nil, err
	}
	out := Ruleset{}
	for name, t := range parsed {
		out[name] = Contents{Chains: t.chains, Policies: t.policies}
	}
	return out, nil
}

// Ruleset reads all tables.
func (t *IPTables) Ruleset() (Ruleset, error) {
	text, err := t.save()
	if err == nil {
		var out Ruleset
		if out, err = ParseSave(text); err == nil {
			return out, nil
		}
	}
	return nil, fmt.Errorf("read the rules of %s: %w", t.family, err)
}
