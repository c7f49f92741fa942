// Package generation distinguishes the nf_tables transactions of this process from those
// of other programs.
package generation

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// generations remembers the nf_tables transactions of this process. The kernel numbers
// transactions in each network namespace. The sender's process ID does not identify it:
// it belongs to the sender's PID namespace, so programs in other containers may have the
// same one.
type generations struct {
	mu      sync.Mutex
	running int
	crossed bool // several ran at once: their transactions cannot be attributed
	own     map[uint32]bool
	order   []uint32 // own transactions, oldest first
	waiting []decision
}

// decision is about a transaction that was reported while one of ours was running.
type decision struct {
	generation uint32
	foreign    func()
}

var written generations

// keptGenerations is how many of our transactions are remembered: more than this process
// makes before it reads the notification of the first one.
const keptGenerations = 256

// Change runs a function that makes a number of nf_tables transactions, or none with
// iptables-legacy.
func Change(transactions int, run func() error) error {
	return written.change(transactions, Last, run)
}

// Foreign calls a function if a transaction is not of this process, as soon as that is
// known.
func Foreign(generation uint32, foreign func()) { written.decide(generation, foreign) }

func (g *generations) change(transactions int, generation func() (uint32, error), run func() error) error {
	g.mu.Lock()
	g.running++
	g.crossed = g.crossed || g.running > 1
	g.mu.Unlock()
	before, errBefore := generation()
	err := run()
	after, errAfter := generation()
	g.mu.Lock()
	// Any other number means that another program made a transaction in between.
	if errBefore == nil && errAfter == nil && !g.crossed && after-before == uint32(transactions) {
		g.remember(before, after)
	}
	g.running--
	var decided []decision
	if g.running == 0 {
		g.crossed = false
		decided, g.waiting = g.waiting, nil
	}
	g.mu.Unlock()
	for _, d := range decided {
		g.decide(d.generation, d.foreign)
	}
	return err
}

// remember records the transactions after before, up to and including after, as ours.
func (g *generations) remember(before, after uint32) {
	if g.own == nil {
		g.own = map[uint32]bool{}
	}
	for n := before + 1; n != after+1; n++ {
		g.own[n] = true
		g.order = append(g.order, n)
	}
	for len(g.order) > keptGenerations {
		delete(g.own, g.order[0])
		g.order = g.order[1:]
	}
}

func (g *generations) decide(generation uint32, foreign func()) {
	g.mu.Lock()
	waits, own := g.running > 0, g.own[generation]
	if waits && !own {
		g.waiting = append(g.waiting, decision{generation, foreign})
	}
	g.mu.Unlock()
	if !waits && !own {
		foreign()
	}
}

// Messages and attributes of <linux/netfilter/nf_tables.h>.
const (
	nftMsgGetGen  = 16
	nftAttrGenID  = 1
	sizeofNfgen   = 4
	nftSubsysBits = 8
)

// Last returns the number of the last nf_tables transaction in the network
// namespace of the calling thread.
func Last() (uint32, error) {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<nftSubsysBits|nftMsgGetGen, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	replies, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, err
	}
	for _, reply := range replies {
		if n, ok := Of(reply); ok {
			return n, nil
		}
	}
	return 0, errors.New("nf_tables does not report its generation")
}

// Supported returns an error if the kernel has no nf_tables and cannot load it: without a
// receiver, nfnetlink answers with EINVAL (nfnetlink_rcv_msg). Any other error of the kernel may
// be temporary, and does not count.
func Supported() error {
	if _, err := Last(); errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return fmt.Errorf("the kernel has no nf_tables: %w", err)
	}
	return nil
}

// Of returns the number of a transaction from its notification.
func Of(message []byte) (uint32, bool) {
	if len(message) < sizeofNfgen {
		return 0, false
	}
	attributes, err := nlmsg.Attributes(message[sizeofNfgen:])
	if err != nil {
		return 0, false
	}
	for _, a := range attributes {
		if a.Attr.Type&^unix.NLA_F_NESTED&^unix.NLA_F_NET_BYTEORDER == nftAttrGenID && len(a.Value) >= 4 {
			return binary.BigEndian.Uint32(a.Value), true
		}
	}
	return 0, false
}
