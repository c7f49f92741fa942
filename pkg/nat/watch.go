package nat

import (
	"context"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Watcher tells of changes of rules, as far as the kernel does: of those of
// nf_tables, with which iptables of today works. Of those of iptables-legacy it
// tells nobody.
type Watcher struct{}

// watchBuffer is large since others write thousands of rules at once, of which
// each is a message. The kernel takes it only from CAP_NET_ADMIN; else its default
// must do.
const watchBuffer = 4 << 20

// Watch calls changed when another program has changed rules in a chain that
// concerns the caller, or deleted such a chain; and for a table that is gone, which
// is asked for as a chain without a name. A new chain is not told, only its rules
// are. What this process has had done is known by the number of its transaction,
// which the kernel tells after the changes.
//
// It is first called once the subscription stands, so that nothing between an
// earlier read and it is missed; then also when the kernel dropped messages because
// they were not read in time. Both functions must return at once; changed may be
// called by any goroutine.
//
// Watch returns when the context ends or the subscription fails. It watches the
// network namespace that the calling thread is in.
func (Watcher) Watch(ctx context.Context, concerns func(Chain) bool, changed func()) error {
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return fmt.Errorf("subscribe to changes of rules: %w", err)
	}
	_ = socket.SetReceiveBufferSize(watchBuffer, true)
	pending := false // a change of the transaction that is being told
	err = kernel.Follow(ctx, socket, func(m syscall.NetlinkMessage) {
		if c, ok := changedChain(m); ok && concerns(c) {
			pending = true
		}
		if m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|msgNewGen && pending {
			pending = false
			if n, ok := kernel.GenerationOf(m.Data); ok {
				kernel.Foreign(n, changed)
			} else {
				changed()
			}
		}
	}, changed)
	if ctx.Err() == nil {
		err = fmt.Errorf("read changes of rules: %w", err)
	}
	return err
}

// Messages and attributes of <linux/netfilter/nf_tables.h>.
const (
	msgDelTable = 2
	msgDelChain = 5
	msgNewRule  = 6
	msgDelRule  = 8
	msgNewGen   = 15

	attrTable     = 1 // of all three kinds
	attrChainName = 3
	attrRuleChain = 2

	sizeofNfgenmsg = 4
)

// changedChain is the chain that a message is about; one without a name stands for
// a table as a whole. It is false for what is no news.
func changedChain(m syscall.NetlinkMessage) (Chain, bool) {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < sizeofNfgenmsg {
		return Chain{}, false
	}
	var named uint16 // the attribute with the chain's name
	switch m.Header.Type & 0xff {
	case msgDelTable:
	case msgDelChain:
		named = attrChainName
	case msgNewRule, msgDelRule:
		named = attrRuleChain
	default:
		return Chain{}, false
	}
	var c Chain
	switch m.Data[0] {
	case unix.AF_INET:
		c.Family = ip.IPv4
	case unix.AF_INET6:
		c.Family = ip.IPv6
	default:
		return Chain{}, false // of no table that iptables has
	}
	attributes, err := kernel.Attributes(m.Data[sizeofNfgenmsg:])
	if err != nil {
		return Chain{}, false
	}
	for _, a := range attributes {
		switch a.Attr.Type {
		case attrTable:
			c.Table = Table(unix.ByteSliceToString(a.Value))
		case named:
			c.Name = unix.ByteSliceToString(a.Value)
		}
	}
	return c, c.Table != ""
}

// Concerns tells whether a change of a chain is one of what is ours, or of where
// our jumps stand.
func (o Own) Concerns(c Chain) bool {
	_, used := baseChains[c.Table]
	return used && (c.Name == "" || isBase(c.Name) || o.has(c))
}
