package routing

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// groups are the multicast groups that Watch subscribes to.
var groups = []uint{
	unix.RTNLGRP_LINK,
	unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_RULE,
	unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_RULE,
}

// Watch calls inventory when the result of Inventory may have changed, and removed with
// objects of ours that were deleted. A guarded rule has been restored by then; the caller
// must add addresses and routes again. Apply's own deletions of
// addresses and routes are reported too. A call of removed without arguments means that anything
// may have been deleted: the kernel dropped messages because they were not read in time,
// DummyLink was deleted (by any program) or renamed, lo was set down, or a rule could not be restored.
//
// Once the subscription is active, and after each new subscription, both are called,
// removed without arguments, so that no change since an earlier read is missed. All
// changes during a callback cause one more call. The callbacks are never called
// concurrently.
//
// Routes other than default routes change by the thousand. For these, inventory is called
// once for all changes of a few seconds; for routes to single addresses it is not called. For
// the links of pods it is called once for all changes of a fifth of a second.
// When a link is set down, the kernel removes its IPv4 routes without a message; the
// message about the link covers them.
//
// Watch returns the context's error when the context ends, and otherwise only if the first
// subscription fails. It watches the network namespace of the calling thread.
func (n *Netlink) Watch(ctx context.Context, inventory func(), removed func(...Removal)) error {
	socket, err := n.subscribe()
	if err != nil {
		return err
	}
	w := newWatcher(&n.cache)
	w.pause, w.lookup = n.pause, n.dummyLinkIndex
	w.restore = func(changed rawRule, deleted bool) ([]Removal, bool) {
		return n.guard.restore(n.session(Protocol), changed, deleted)
	}
	watchIPsec(ctx, func() { w.changed(false) })
	notified := make(chan struct{})
	go func() {
		defer close(notified)
		w.notify(ctx, inventory, removed)
	}()
	for ctx.Err() == nil {
		n.receive(ctx, w, socket)
		socket = resubscribe(ctx, n.subscribe)
	}
	<-notified
	return ctx.Err()
}

// watchBuffer is large, because an overflow costs a read of everything. The kernel accepts
// it only with CAP_NET_ADMIN; otherwise the default size applies.
const watchBuffer = 4 << 20

func (n *Netlink) subscribe() (*nl.NetlinkSocket, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, groups...)
	if err != nil {
		return nil, fmt.Errorf("subscribe to network changes: %w", err)
	}
	_ = socket.SetReceiveBufferSize(n.buffer, true)
	// The filter is an optimization: without it, more messages are read and ignored.
	_ = unix.SetsockoptSockFprog(socket.GetFd(), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{
		Len: uint16(len(messageFilter)), Filter: &messageFilter[0],
	})
	return socket, nil
}

// messageFilter passes all messages except those about routes to single addresses, which we
// and other programs write by the thousand. Of these it passes only deletions of routes with
// our Protocol. Filters load half-words in network byte order, so it loads the low byte of
// the message type, whose offset depends on the machine.
var messageFilter = []unix.SockFilter{
	/*  0 */ {Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: typeByte()},
	/*  1 */ {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.RTM_NEWROUTE, Jt: 3},
	/*  2 */ {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.RTM_DELROUTE, Jf: 8},
	/*  3 */ {Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: unix.SizeofNlMsghdr + 5}, // rtm_protocol
	/*  4 */ {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: Protocol, Jt: 6},
	/*  5 */ {Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: unix.SizeofNlMsghdr}, // rtm_family
	/*  6 */ {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.AF_INET6, Jt: 2},
	/*  7 */ {Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: unix.SizeofNlMsghdr + 1}, // rtm_dst_len
	/*  8 */ {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 32, Jt: 3, Jf: 2},
	/*  9 */ {Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: unix.SizeofNlMsghdr + 1},
	/* 10 */ {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 128, Jt: 1},
	/* 11 */ {Code: unix.BPF_RET | unix.BPF_K, K: 1 << 30},
	/* 12 */ {Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

// typeByte returns the offset of the low byte of the type in a message header.
func typeByte() uint32 {
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		return 4
	}
	return 5
}

// resubscribePause limits how often a failing subscription is retried.
const resubscribePause = time.Second

// resubscribe retries until it succeeds. It returns nil if the context ends.
func resubscribe(ctx context.Context, subscribe func() (*nl.NetlinkSocket, error)) *nl.NetlinkSocket {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(resubscribePause):
		}
		if socket, err := subscribe(); err == nil {
			return socket
		}
	}
}

// receive reads messages until the socket fails or the context ends, and closes the socket.
func (n *Netlink) receive(ctx context.Context, w *watcher, socket *nl.NetlinkSocket) {
	defer n.cache.follow(false)
	_ = nlmsg.Follow(ctx, socket, w.message, w.dropped)
}

// dummyLinkIndex returns 0 if there is no DummyLink.
func (n *Netlink) dummyLinkIndex() int32 {
	link, err := n.linkByName(DummyLink)
	if err != nil {
		return 0
	}
	return int32(link.Attrs().Index)
}

// watcher classifies messages. A value in one of its channels is a pending call.
type watcher struct {
	inventory, removed chan struct{}
	later              chan struct{} // a call of inventory after pause
	soon               chan struct{} // one after linksPause
	pause              time.Duration
	cache              *cache
	dummyLink          int32        // index; 0: there is none
	lookup             func() int32 // reads dummyLink
	restore            func(changed rawRule, deleted bool) ([]Removal, bool)

	mu       sync.Mutex
	removals []Removal // for the next call of removed
	anything bool      // the next call of removed has no arguments
}

func newWatcher(c *cache) *watcher {
	return &watcher{
		inventory: make(chan struct{}, 1), removed: make(chan struct{}, 1), later: make(chan struct{}, 1), soon: make(chan struct{}, 1),
		cache:   c,
		lookup:  func() int32 { return 0 },
		restore: func(rawRule, bool) ([]Removal, bool) { return nil, true },
	}
}

// dropped handles the loss of messages, and the beginning. DummyLink may have been replaced.
func (w *watcher) dropped() {
	w.dummyLink = w.lookup()
	w.cache.follow(true)
	w.all()
}

// changed discards rules and routes, and links if they may have changed too, and calls inventory.
func (w *watcher) changed(links bool) {
	w.cache.changed(links)
	signal(w.inventory)
}

func (w *watcher) all() {
	signal(w.inventory)
	w.reportAnything()
}

func (w *watcher) reportAnything() {
	w.mu.Lock()
	w.anything = true
	w.mu.Unlock()
	signal(w.removed)
}

func (w *watcher) reportRemovals(removals ...Removal) {
	if len(removals) == 0 {
		return
	}
	w.mu.Lock()
	w.removals = append(w.removals, removals...)
	w.mu.Unlock()
	signal(w.removed)
}

func (w *watcher) take() (removals []Removal, anything bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	removals, anything = w.removals, w.anything
	w.removals, w.anything = nil, false
	return removals, anything
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // one is pending already
	}
}

// routesPause is how long changes of routes are collected before inventory is called, and
// linksPause how long those of pods' links are: the start of a pod sends several messages.
const (
	routesPause = 3 * time.Second
	linksPause  = 200 * time.Millisecond
)

func (w *watcher) notify(ctx context.Context, inventory func(), removed func(...Removal)) {
	var due time.Time // of a delayed call of inventory; zero: there is none
	timer := time.NewTimer(0)
	defer timer.Stop()
	delay := func(pause time.Duration) {
		if at := time.Now().Add(pause); due.IsZero() || at.Before(due) {
			due = at
			timer.Reset(pause)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.later:
			delay(w.pause)
		case <-w.soon:
			delay(linksPause)
		case <-timer.C:
			if !due.IsZero() {
				due = time.Time{}
				inventory()
			}
		case <-w.inventory:
			due = time.Time{}
			inventory()
		case <-w.removed:
			removals, anything := w.take()
			if len(removals) > 0 {
				removed(removals...)
			}
			if anything {
				removed()
			}
		}
	}
}

func (w *watcher) message(m syscall.NetlinkMessage) {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		w.link(m)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		w.address(m)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		w.route(m)
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		w.rule(m)
	}
}

// rule restores a guarded rule at once, before it reports anything.
func (w *watcher) rule(m syscall.NetlinkMessage) {
	w.changed(false)
	changed, ok := parseRule(m.Data)
	if !ok {
		return
	}
	removals, ok := w.restore(changed, m.Header.Type == unix.RTM_DELRULE)
	w.reportRemovals(removals...)
	if !ok {
		w.reportAnything()
	}
}

// link handles a message about an interface. It ignores those about a bridge port, which
// accompany it.
func (w *watcher) link(m syscall.NetlinkMessage) {
	if len(m.Data) < unix.SizeofIfInfomsg {
		return
	}
	info := nl.DeserializeIfInfomsg(m.Data)
	if info.Family == unix.AF_BRIDGE {
		return
	}
	link := parseLink(m.Data)
	changed := w.cache.link(m.Header.Type, link)
	switch {
	case info.Index == w.dummyLink && link.Name != DummyLink:
		w.dummyLink = 0
		w.all() // renamed, it belongs to the inventory
	case info.Index == w.dummyLink && m.Header.Type == unix.RTM_DELLINK:
		w.dummyLink = 0
		w.reportAnything()
	case link.Name == DummyLink && m.Header.Type == unix.RTM_NEWLINK:
		w.dummyLink = info.Index
	case link.Name == "lo":
		w.all() // set down, it loses the routes of VIPs without a message
	case changed == podLink:
		signal(w.soon)
	case changed == more:
		signal(w.inventory)
	}
}

func (w *watcher) address(m syscall.NetlinkMessage) {
	if len(m.Data) < unix.SizeofIfAddrmsg {
		return
	}
	switch info := nl.DeserializeIfAddrmsg(m.Data); {
	case int32(info.Index) != w.dummyLink:
		if a, ok := parseAddress(m.Data); ok && w.cache.address(m.Header.Type, int(info.Index), a) {
			signal(w.soon)
			return
		}
		w.changed(true)
	case m.Header.Type == unix.RTM_DELADDR:
		if r, ok := removedAddress(m.Data); ok {
			w.reportRemovals(r)
		}
	}
}

func (w *watcher) route(m syscall.NetlinkMessage) {
	if len(m.Data) < unix.SizeofRtMsg {
		return
	}
	info := nl.DeserializeRtMsg(m.Data)
	if info.Flags&unix.RTM_F_CLONED != 0 {
		return
	}
	if info.Type == unix.RTN_UNICAST {
		link, _ := uint32Of(m.Data, unix.SizeofRtMsg, unix.RTA_OIF) // 0: several
		w.cache.route(int(link), info.Protocol == unix.RTPROT_KERNEL)
	}
	switch {
	case info.Dst_len == 0:
		signal(w.inventory)
	case info.Type == unix.RTN_UNICAST && info.Protocol != unix.RTPROT_KERNEL && info.Protocol != Protocol:
		signal(w.later)
	}
	if info.Protocol == Protocol && m.Header.Type == unix.RTM_DELROUTE {
		if r, ok := removedRoute(m.Data); ok {
			w.reportRemovals(r)
		}
	}
}
