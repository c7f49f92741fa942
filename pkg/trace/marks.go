package trace

import (
	"encoding/json"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
)

// MarkWrite is a base chain of nftables that overwrites the packet mark.
type MarkWrite struct {
	Chain *nft.Chain
	Rule  string // the first rule that does, in this chain or in one that it jumps to, as nft prints it
}

// MarkWrites returns the chains of nftables that set the packet mark of the node's family to a value
// that does not depend on the mark before, in the order of their priorities.
func (n *Node) MarkWrites() []MarkWrite {
	if n.Native == nil {
		return nil
	}
	var out []MarkWrite
	for _, c := range n.Native.Base {
		if c.Family != "inet" && c.Family != familyName(n.Family) {
			continue
		}
		if rule := n.markWrite(c, map[nft.ID]bool{}); rule != "" {
			out = append(out, MarkWrite{c, rule})
		}
	}
	return out
}

func (n *Node) markWrite(c *nft.Chain, seen map[nft.ID]bool) string {
	if c == nil || seen[c.ID] {
		return ""
	}
	seen[c.ID] = true
	for _, rule := range c.Rules {
		for _, expr := range rule.Expr {
			if body, ok := expr["mangle"]; ok && overwritesMark(body) {
				return rule.Text
			}
			for _, kind := range []string{"jump", "goto"} {
				target, _ := member(expr[kind], "target").(string)
				if text := n.markWrite(n.Native.Chains[c.In(target)], seen); text != "" {
					return text
				}
			}
		}
	}
	return ""
}

func overwritesMark(mangle any) bool {
	if member(member(member(mangle, "key"), "meta"), "key") != "mark" {
		return false
	}
	value, err := json.Marshal(member(mangle, "value"))
	return err == nil && !strings.Contains(string(value), `"meta"`)
}
