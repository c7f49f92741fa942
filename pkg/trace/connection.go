package trace

// Connection is an established connection: what conntrack and IPVS keep of it.
type Connection struct {
	branch *branch
	first  packet // as it left the node
}

// RealServer returns the endpoint that answers.
func (c *Connection) RealServer() string { return c.branch.to.String() }

// Continue follows the client's next packet of a connection that was opened earlier,
// when the node may have had other rules, and its reply.
func (e *Evaluator) Continue(n *Node, c *Connection) Verdict {
	if _, ok := n.IPVS[c.branch.key].RealServers[c.branch.to]; !ok {
		return Verdict{Dropped, "IPVS has no longer the real server of the connection"}
	}
	b, first, conn := *c.branch, c.first, *c.first.conn
	b.walk, first.conn = &walk{Node: n, eval: e}, &conn
	if v := b.goOn(&first); v.Outcome != "" {
		return v
	}
	return b.comeBack(b.reply(&first))
}
