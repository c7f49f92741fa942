package nat

import (
	"slices"
	"time"
)

// contests limits how often jumps with Moves are moved back to the head, and those with Append to
// the end, of a chain. Some programs insist on the same place: Calico's Felix
// (ChainInsertMode=Insert) moves its jumps first at every refresh, and whenever it finds them
// elsewhere. With Append it moves them last.
type contests struct {
	displaced map[Chain]bool        // these jumps are on the wrong side of a rule that can keep packets from what follows
	moved     map[Chain][]time.Time // when they were moved to the other side
	given     map[Chain]time.Time   // when we gave up
}

// After maxMoves moves to the head of a chain, or maxAppends to its end, within moveWindow, we
// give up for giveUpFor. maxAppends is larger, because some firewalls append their rules again
// whenever they are reloaded (ufw).
const (
	maxMoves   = 3
	maxAppends = 10
	moveWindow = 10 * time.Minute
	giveUpFor  = time.Hour
)

// stays reports whether no jump of a chain may be moved.
func (c *contests) stays(chain Chain, now time.Time) bool {
	at, given := c.given[chain]
	if given && now.Sub(at) >= giveUpFor {
		delete(c.given, chain)
		given = false
	}
	return given
}

// seen records the chains in which such jumps are displaced.
func (c *contests) seen(displaced map[Chain]bool) { c.displaced = displaced }

// move records that jumps of a chain were moved. After most moves, stays returns true.
func (c *contests) move(chain Chain, now time.Time, most int) {
	if !c.displaced[chain] {
		return // no other program is involved
	}
	delete(c.displaced, chain)
	recent := []time.Time{now}
	for _, at := range c.moved[chain] {
		if now.Sub(at) < moveWindow {
			recent = append(recent, at)
		}
	}
	if c.moved == nil {
		c.moved, c.given = map[Chain][]time.Time{}, map[Chain]time.Time{}
	}
	if c.moved[chain] = recent; len(recent) >= most {
		c.given[chain] = now
		delete(c.moved, chain)
	}
}

// passing are the targets after which evaluation continues with the next rule.
var passing = map[string]bool{
	"": true, "AUDIT": true, "CHECKSUM": true, "CLASSIFY": true, "CONNMARK": true, "CONNSECMARK": true, "CT": true,
	"DSCP": true, "ECN": true, "HL": true, "HMARK": true, "IDLETIMER": true, "LED": true, "LOG": true, "MARK": true,
	"NFLOG": true, "NOTRACK": true, "RATEEST": true, "SECMARK": true, "SET": true, "TCPMSS": true, "TCPOPTSTRIP": true,
	"TEE": true, "TOS": true, "TRACE": true, "TTL": true, "ULOG": true,
}

// refuses reports whether a rule may drop packets. An unknown target may. Chains in seen have been
// examined.
func (t *table) refuses(r Rule, seen map[string]bool) bool {
	to := target(r)
	rules, isChain := t.chains[to]
	if !isChain {
		return !passing[to] && to != "ACCEPT" && to != "RETURN"
	}
	known := seen[to]
	seen[to] = true
	return !known && slices.ContainsFunc(rules, func(r Rule) bool { return t.refuses(r, seen) })
}

// decides reports whether a rule of a base chain can keep packets from the rules after
// it. An unknown target can. Chains in seen have been examined and cannot.
func (t *table) decides(r Rule, seen map[string]bool) bool {
	to := target(r)
	rules, isChain := t.chains[to]
	switch {
	case passing[to]:
		return false
	case !isChain:
		return true
	case len(Arguments(r, "-g")) > 0:
		return true // it does not return
	case seen[to]:
		return false
	}
	seen[to] = true
	for _, r := range rules {
		if target(r) != "RETURN" && t.decides(r, seen) {
			return true
		}
	}
	return false
}
