package nat

import (
	"context"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// Watcher reports changes of rules that the kernel announces: those of nf_tables. It
// does not announce those of iptables-legacy.
type Watcher struct{}

// watchBuffer is large because other programs write thousands of rules at once, each with
// a message. Setting it requires CAP_NET_ADMIN; otherwise the kernel's default applies.
const watchBuffer = 4 << 20

// Watch calls changed after another program has changed a chain, if concerns returns true for
// the chain. It reports rules that are added or deleted, and a deleted chain; of a base chain also
// its creation and a new policy. A deleted table is passed to concerns as a chain without a name.
// Watch ignores changes of this process, which it recognizes by the number of their transaction;
// the kernel announces that after the changes.
//
// Watch calls changed first when it is subscribed, so that nothing between an earlier
// read and the subscription is missed, and again when the kernel has dropped messages
// that were not read in time. Both functions must return at once; changed may be called
// by any goroutine.
//
// Watch returns when the context ends or the subscription fails. It watches the network
// namespace of the calling thread.
func (Watcher) Watch(ctx context.Context, concerns func(Chain) bool, changed func()) error {
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return fmt.Errorf("subscribe to changes of rules: %w", err)
	}
	_ = socket.SetReceiveBufferSize(watchBuffer, true)
	pending := false // a change of the transaction being announced
	err = nlmsg.Follow(ctx, socket, func(m syscall.NetlinkMessage) {
		if c, ok := changedChain(m); ok && concerns(c) {
			pending = true
		}
		if m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|msgNewGen && pending {
			pending = false
			if n, ok := generation.Of(m.Data); ok {
				generation.Foreign(n, changed)
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
	msgNewChain = 3
	msgDelChain = 5
	msgNewRule  = 6
	msgDelRule  = 8
	msgNewGen   = 15

	attrTable     = 1 // of all three kinds of messages
	attrChainName = 3
	attrRuleChain = 2

	sizeofNfgenmsg = 4
)

// changedChain returns the chain that a message is about; one without a name stands for
// a whole table. It returns false for messages that do not matter.
func changedChain(m syscall.NetlinkMessage) (Chain, bool) {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < sizeofNfgenmsg {
		return Chain{}, false
	}
	var named uint16 // attribute with the chain's name
	switch m.Header.Type & 0xff {
	case msgDelTable:
	case msgNewChain, msgDelChain:
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
		return Chain{}, false // not a table of iptables
	}
	attributes, err := nlmsg.Attributes(m.Data[sizeofNfgenmsg:])
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
	if m.Header.Type&0xff == msgNewChain && !isBase(c.Name) {
		return Chain{}, false // its rules are announced
	}
	return c, c.Table != ""
}

// Concerns reports whether a changed chain is ours, or a base chain with our jumps.
func (o Owned) Concerns(c Chain) bool {
	_, used := baseChains[c.Table]
	return used && (c.Name == "" || isBase(c.Name) || o.has(c))
}
