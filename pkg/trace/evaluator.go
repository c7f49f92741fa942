package trace

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// Phase is the packet of a connection that is followed.
type Phase string

// The phases, in order.
const (
	Request Phase = "request" // the first packet
	Reply   Phase = "reply"
	Later   Phase = "later" // the client's next packet
)

// Point is a point at which other programs can act on a packet: after a table's chain
// of a hook, or "arrival", "sent by the node" and "sent by IPVS". Acting before a chain
// means acting after the previous one.
type Point struct {
	Phase Phase
	Where string
}

func (p Point) String() string { return fmt.Sprintf("%s, after %s", p.Phase, p.Where) }

// Evaluator explains connections. The zero value does what Explain does. It caches parsed rules of
// all nodes, and an index of the last two nodes, which must not change meanwhile. An Evaluator must
// not be used concurrently.
type Evaluator struct {
	Quiet bool // leave out Steps
	// Interfere, if set, is called at every point, and may change the marks of the
	// packet and the connection as another program would.
	Interfere func(at Point, mark, connmark *uint32)
	// Matched, if set, is called for each rule that matched.
	Matched func(table nat.Table, chain string, index int)
	// Near, if set, is called for each rule that exactly one condition kept from matching,
	// with the condition's index.
	Near func(table nat.Table, chain string, index, condition int)
	// Member, if set, is called for each set member that a packet matched.
	Member func(set string, entry ipset.Entry)
	// Added, if set, is called for each member that a rule adds to a set.
	Added func(set string, entry ipset.Entry)
	// Opened, if set, is called for each connection that a real server answers.
	Opened func(*Connection)
	// Evaluated counts the rules, and their conditions, that packets were matched against, since the
	// Evaluator was created.
	Evaluated int
	// Reads, if set, receives the parts of the node on which results depend.
	Reads *Reads

	rules  map[nat.Rule]*rule
	assume map[string]bool // doubts; see walk.assumed
	// nodes are the last two nodes, the one before the last first. Checks compare one node with others.
	nodes [2]indexed
}

// indexed is a node, and a copy of it that has an index.
type indexed struct{ node, copy *Node }

// at returns a copy of a node that has an index.
func (e *Evaluator) at(n *Node) *Node {
	before, last := e.nodes[0], e.nodes[1]
	switch {
	case last.node == n:
	case before.node == n:
		e.nodes = [2]indexed{last, before}
	default:
		x := &index{chains: map[chainKey]*chain{}}
		if last.copy != nil {
			x.routes = last.copy.index.routes.of(n)
		} else {
			x.routes = newRoutes(n)
		}
		c := *n
		c.index = x
		e.nodes = [2]indexed{last, {n, &c}}
	}
	out := e.nodes[1].copy
	out.index.reads = e.Reads
	return out
}

func (e *Evaluator) rule(text nat.Rule) *rule {
	r, ok := e.rules[text]
	if !ok {
		if e.rules == nil {
			e.rules = map[nat.Rule]*rule{}
		}
		r = parse(text)
		e.rules[text] = r
	}
	return r
}

// interfere lets other programs act on a packet.
func (w *walk) interfere(where string, p *packet) {
	if w.eval.Interfere == nil {
		return
	}
	mark, conn := p.mark, p.conn.mark
	w.eval.Interfere(Point{p.phase, where}, &p.mark, &p.conn.mark)
	if p.mark != mark {
		w.note(where, p, "", "another program sets the mark %#x", p.mark)
	}
	if p.conn.mark != conn {
		w.note(where, p, "", "another program sets the connmark %#x", p.conn.mark)
	}
}
