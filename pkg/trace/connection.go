package trace

import (
	"fmt"
	"strings"
)

// Connection is an established connection, as conntrack and IPVS store it.
type Connection struct {
	path  *serverPath
	first packet // as it left the node
}

// RealServer returns the endpoint that answers.
func (c *Connection) RealServer() string { return c.path.to.String() }

// Continue follows the client's next packet of an established connection, and the reply
// to it. The rules may have changed since the connection was opened. If some rule cannot be
// evaluated, the verdict is Undecided.
func (e *Evaluator) Continue(n *Node, c *Connection) Verdict {
	n = e.at(n)
	server, _ := n.server(c.path.key)
	if _, ok := server.RealServers[c.path.to]; !ok {
		return Verdict{Dropped, "IPVS no longer has the real server of the connection"}
	}
	b, first, conn := *c.path, c.first, *c.first.conn
	b.walk, first.conn = &walk{Node: n, eval: e}, &conn
	v := b.continued(&first)
	if len(b.doubts) > 0 {
		return Verdict{Undecided, fmt.Sprintf("%s, but %s", v, strings.Join(b.doubts, "; "))}
	}
	return v
}

// continued follows the next packet after the first one, and the reply to it.
func (b *serverPath) continued(first *packet) Verdict {
	if v := b.followNext(first); v.Outcome != "" {
		return v
	}
	end, v := b.comeBack(first)
	if v.Outcome == "" {
		_, v = b.answer(first, end)
	}
	return v
}
