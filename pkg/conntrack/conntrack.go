// Package conntrack deletes entries of the kernel's connection tracking table that
// translate to endpoints which no longer serve. A UDP client that keeps sending from
// one port keeps its entry alive, and with it the translation to a removed endpoint.
// It also reads how long entries still live.
//
// Unlike the other kernel packages it has no desired state: packets create the entries. The
// caller names those to delete.
package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Entry is a tracked connection, or a flow of a connectionless protocol.
type Entry struct {
	Protocol                 ip.Protocol
	OriginalSrc, OriginalDst netip.AddrPort // of the client's packets as sent
	ReplySrc, ReplyDst       netip.AddrPort // of the replies: ReplySrc is the endpoint
}

func (e Entry) String() string {
	return fmt.Sprintf("%s %s > %s, answered %s > %s", e.Protocol, e.OriginalSrc, e.OriginalDst, e.ReplySrc, e.ReplyDst)
}

// Match selects the entries to delete. With OriginalDst, it selects entries of packets
// that clients send to that address and port:
//   - with ReplySrc, those that ReplySrc answers;
//   - otherwise, all except those that an endpoint in Keep answers.
//
// So with the serving endpoints in Keep, it selects entries that translate to other
// endpoints, and untranslated entries that are older than the Service.
//
// With Source, it selects entries whose client address is translated to Source: those of
// Protocol, or of any protocol if that is 0.
//
// With only Client, it selects UDP entries whose client address is within Client and whose
// source and destination are both translated.
type Match struct {
	Protocol    ip.Protocol
	OriginalDst netip.AddrPort
	ReplySrc    netip.AddrPort
	Keep        map[netip.AddrPort]struct{}

	Source netip.Addr
	Client netip.Prefix
}

// raw is the kernel's interface to the table.
type raw interface {
	// dump returns the wanted entries of one family. The filter may exclude entries
	// from being read at all.
	dump(family ip.Family, f filter, wanted func(Entry) bool) ([]tracked, error)
	// remove returns ENOENT if the entry does not exist.
	remove(ip.Family, tracked) error
	close()
}

// tracked is an entry with the kernel's identity of it.
type tracked struct {
	Entry
	timeout  time.Duration // until it expires if no further packet arrives
	identity []byte        // attributes in the kernel's format; nil in a Fake
}

// client's methods may be called concurrently; they are serialized.
type client struct {
	mu  sync.Mutex
	raw raw
}

// Close closes the socket. No other method may be called afterwards.
func (c *client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raw.close()
}

// Delete deletes all entries that any of the matches selects, and returns their number.
// For a few matches the kernel filters; for many, the table is read once per family, at
// a few microseconds an entry.
//
// An entry that expires meanwhile is not an error. On an error it still tries all entries and
// returns the number of deleted ones. It returns EPERM without CAP_NET_ADMIN.
func (c *client) Delete(matches []Match) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	index := newIndex(matches)
	deleted := 0
	var errs []error
	for _, family := range ip.Families {
		if len(index.filters(family)) == 0 {
			continue
		}
		err := kernel.Retry(func() error {
			n, err := c.delete(family, index)
			deleted += n
			return err
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("delete %s conntrack entries: %w", family, err))
		}
	}
	return deleted, errors.Join(errs...)
}

func (c *client) delete(family ip.Family, index index) (int, error) {
	entries, err := c.list(family, index)
	if err != nil {
		return 0, fmt.Errorf("list: %w", err)
	}
	deleted := 0
	for _, entry := range entries {
		switch removeErr := c.raw.remove(family, entry); {
		case removeErr == nil:
			deleted++
		case kernel.IsNotExist(removeErr):
		case err == nil: // one error suffices
			err = fmt.Errorf("%s: %w", entry, removeErr)
		}
	}
	return deleted, err
}

// list returns the entries of one family that the matches of an index select.
func (c *client) list(family ip.Family, index index) ([]tracked, error) {
	var entries []tracked
	for _, f := range index.filters(family) {
		list, err := c.raw.dump(family, f, index.selects)
		if err != nil {
			return nil, err
		}
		entries = append(entries, list...)
	}
	return entries, nil
}

// Longest returns the longest time after which an entry that a match selects expires if no further
// packet arrives, in whole seconds; 0 if it selects none. The match must have an OriginalDst.
func (c *client) Longest(m Match) (time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	family, index := ip.Of(m.OriginalDst.Addr()), newIndex([]Match{m})
	var longest time.Duration
	err := kernel.Retry(func() error {
		entries, err := c.list(family, index)
		for _, entry := range entries {
			longest = max(longest, entry.timeout)
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("list %s conntrack entries: %w", family, err)
	}
	return longest, nil
}

// filter holds the fields that all wanted entries share. The zero filter passes all entries.
type filter struct {
	protocol    ip.Protocol    // 0: any
	originalDst netip.AddrPort // with a protocol
	replyDst    netip.Addr
}

// passes reports whether an entry passes.
func (f filter) passes(e Entry) bool {
	return (f.protocol == 0 || f.protocol == e.Protocol) && (!f.originalDst.IsValid() || f.originalDst == e.OriginalDst) &&
		(!f.replyDst.IsValid() || f.replyDst == e.ReplyDst.Addr())
}

// fewFilters is the number of matches up to which the kernel's filter is cheaper than
// reading the table once. A filtered dump walks the whole table too, but skipping an
// entry costs a hundredth of reading it.
const fewFilters = 8

// index finds the matches for an entry by the fields that all matches set.
type index struct {
	to map[destination][]Match
	// Of matches with a Source.
	sources map[source]struct{}
	clients []netip.Prefix
}

type source struct {
	protocol ip.Protocol // 0: any
	addr     netip.Addr
}

type destination struct {
	protocol ip.Protocol
	addr     netip.AddrPort
}

func newIndex(matches []Match) index {
	index := index{to: make(map[destination][]Match, len(matches)), sources: map[source]struct{}{}}
	for _, m := range matches {
		if m.Client.IsValid() {
			index.clients = append(index.clients, m.Client)
			continue
		}
		if m.Source.IsValid() {
			index.sources[source{m.Protocol, m.Source}] = struct{}{}
			continue
		}
		key := destination{m.Protocol, m.OriginalDst}
		index.to[key] = append(index.to[key], m)
	}
	return index
}

// filters returns the filters with which the table is read for one family, or none if
// no match has the family.
func (i index) filters(family ip.Family) []filter {
	var out []filter
	for key := range i.to {
		if key.addr.IsValid() && ip.Of(key.addr.Addr()) == family {
			out = append(out, filter{protocol: key.protocol, originalDst: key.addr})
		}
	}
	for s := range i.sources {
		if f := (filter{replyDst: s.addr}); ip.Of(s.addr) == family && !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	for _, client := range i.clients {
		if ip.Of(client.Addr()) == family && !slices.Contains(out, filter{protocol: ip.UDP}) {
			out = append(out, filter{protocol: ip.UDP})
		}
	}
	if len(out) <= fewFilters {
		return out
	}
	common := filter{protocol: out[0].protocol}
	for _, f := range out {
		if f.protocol != common.protocol {
			common.protocol = 0
		}
	}
	return []filter{common}
}

func (i index) selects(e Entry) bool {
	for _, m := range i.to[destination{e.Protocol, e.OriginalDst}] {
		if m.selects(e) {
			return true
		}
	}
	if e.OriginalSrc.Addr() == e.ReplyDst.Addr() {
		return false
	}
	if e.OriginalDst == e.ReplySrc {
		return false // not through IPVS
	}
	for _, protocol := range []ip.Protocol{0, e.Protocol} {
		if _, found := i.sources[source{protocol, e.ReplyDst.Addr()}]; found {
			return true
		}
	}
	return e.Protocol == ip.UDP &&
		slices.ContainsFunc(i.clients, func(p netip.Prefix) bool { return p.Contains(e.OriginalSrc.Addr()) })
}

// selects must only be called for entries to OriginalDst.
func (m Match) selects(e Entry) bool {
	if m.ReplySrc.IsValid() {
		return m.ReplySrc == e.ReplySrc
	}
	_, keep := m.Keep[e.ReplySrc]
	return !keep
}
