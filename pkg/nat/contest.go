package nat

import "time"

// contests bounds how often jumps of ours are moved back to the head of a
// chain, for programs that insist on it as we do: Calico's Felix
// (ChainInsertMode=Insert) puts its jumps first at every refresh, and whenever
// it finds them elsewhere.
type contests struct {
	displaced map[Chain]bool        // ours were seen behind a rule that can keep packets from them
	moved     map[Chain][]time.Time // when they were put before it
	given     map[Chain]time.Time   // when that was given up
}

// After movesAtMost within movesWithin, jumps stay where they are for stayFor.
const (
	movesAtMost = 3
	movesWithin = 10 * time.Minute
	stayFor     = time.Hour
)

// stays reports whether the jumps of a chain are to stay where they are.
func (c *contests) stays(chain Chain, now time.Time) bool {
	at, given := c.given[chain]
	if given && now.Sub(at) >= stayFor {
		delete(c.given, chain)
		given = false
	}
	return given
}

// seen notes in which chains ours were displaced.
func (c *contests) seen(displaced map[Chain]bool) { c.displaced = displaced }

// inserted notes that jumps were put at the head of a chain.
func (c *contests) inserted(chain Chain, now time.Time) {
	if !c.displaced[chain] {
		return // no other program has anything to do with it
	}
	delete(c.displaced, chain)
	recent := []time.Time{now}
	for _, at := range c.moved[chain] {
		if now.Sub(at) < movesWithin {
			recent = append(recent, at)
		}
	}
	if c.moved == nil {
		c.moved, c.given = map[Chain][]time.Time{}, map[Chain]time.Time{}
	}
	if c.moved[chain] = recent; len(recent) >= movesAtMost {
		c.given[chain] = now
		delete(c.moved, chain)
	}
}

// passing are the targets after which a packet meets the next rule.
var passing = map[string]bool{
	"": true, "AUDIT": true, "CHECKSUM": true, "CLASSIFY": true, "CONNMARK": true, "CONNSECMARK": true, "CT": true,
	"DSCP": true, "ECN": true, "HL": true, "HMARK": true, "IDLETIMER": true, "LED": true, "LOG": true, "MARK": true,
	"NFLOG": true, "NOTRACK": true, "RATEEST": true, "SECMARK": true, "SET": true, "TCPMSS": true, "TCPOPTSTRIP": true,
	"TEE": true, "TOS": true, "TRACE": true, "TTL": true, "ULOG": true,
}

// decides reports whether a rule of a base chain can keep packets from those
// behind it. An unknown target can. The chains in seen have been looked at, and
// cannot.
func (t *table) decides(r Rule, seen map[string]bool) bool {
	to := target(r)
	rules, isChain := t.chains[to]
	switch {
	case passing[to]:
		return false
	case !isChain:
		return true
	case len(Arguments(r, "-g")) > 0:
		return true // nothing comes back
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
