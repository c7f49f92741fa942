// Package ipset programs the kernel's IP sets, which iptables rules match in constant
// time, however many Services there are.
package ipset

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Type is a set type of ipset(8).
type Type string

// The types in use.
const (
	HashIP     Type = "hash:ip"
	HashNet    Type = "hash:net"
	HashIPPort Type = "hash:ip,port"
	// HashIPPortMark is hash:ip,port whose members carry marks that "-j SET --map-mark"
	// writes to packets.
	HashIPPortMark Type = "hash:ip,port" + withMarks
	HashIPPortIP   Type = "hash:ip,port,ip"
	HashIPPortNet  Type = "hash:ip,port,net"
	BitmapPort     Type = "bitmap:port" // ports 0 to 65535, no protocol
)

// withMarks is ipset(8)'s option for marks. For the kernel they are an extension of the
// set, not part of its type.
const withMarks = " skbinfo"

// kernel returns the type's name without its extension.
func (t Type) kernel() string { return strings.TrimSuffix(string(t), withMarks) }

func (t Type) hasMarks() bool { return strings.HasSuffix(string(t), withMarks) }

// Set is a set's name, type and family.
type Set struct {
	Name   string // at most 31 bytes
	Type   Type
	Family ip.Family // 0 for BitmapPort, which has none
}

// Entry is a member of a set. The set's type determines the fields in use; the others
// are zero, so that entries compare with ==.
type Entry struct {
	Addr     netip.Addr   // hash:*, the first ip
	Port     uint16       // *port*
	Protocol ip.Protocol  // hash:*port*
	Addr2    netip.Addr   // hash:ip,port,ip
	Net      netip.Prefix // hash:ip,port,net and hash:net; masked; never /0 (the kernel refuses it)
}

// String returns the entry as ipset(8) prints it, such as "10.96.0.1,tcp:443".
func (e Entry) String() string {
	s := ""
	if e.Addr.IsValid() {
		s = e.Addr.String()
	}
	switch {
	case e.Protocol != 0:
		s += fmt.Sprintf(",%s:%d", protocolName(e.Protocol), e.Port)
	case e.Port != 0 || s == "" && !e.Net.IsValid():
		s = fmt.Sprint(e.Port)
	}
	if e.Addr2.IsValid() {
		s += "," + e.Addr2.String()
	}
	if e.Net.IsValid() {
		if s != "" {
			s += ","
		}
		s += e.Net.String()
	}
	return s
}

// withMark returns an entry with its mark, as ipset(8) prints both.
func withMark(e Entry, mark uint32) string {
	if mark == 0 {
		return e.String()
	}
	return fmt.Sprintf("%s skbmark %#x", e, mark)
}

func protocolName(p ip.Protocol) string {
	switch p {
	case ip.TCP:
		return "tcp"
	case ip.UDP:
		return "udp"
	case ip.SCTP:
		return "sctp"
	}
	return fmt.Sprint(uint8(p))
}

// Contents is a set and its members with their marks, which are 0 except for
// HashIPPortMark.
type Contents struct {
	Set
	Entries map[Entry]uint32
	// Partial reports that Entries do not determine what the set matches: its type is not one
	// of ours, or it has exceptions ("nomatch") or a netmask. Only observed foreign sets are partial.
	Partial bool
}

// State holds all or some sets of a network namespace by name.
type State map[string]Contents

// Op is what a Change does.
type Op uint8

// The operations. Apply is idempotent: creating an existing set of the same type and
// family succeeds, as does adding an existing member, which then has the given mark,
// and deleting what does not exist.
const (
	CreateSet Op = iota + 1
	DestroySet
	AddEntry
	DeleteEntry
)

var opNames = map[Op]string{
	CreateSet:   "create set",
	DestroySet:  "destroy set",
	AddEntry:    "add entry",
	DeleteEntry: "delete entry",
}

// String names the operation.
func (o Op) String() string { return opNames[o] }

// Change is one operation on a set or on a member of it.
type Change struct {
	Op    Op
	Set   Set
	Entry Entry  // for AddEntry and DeleteEntry
	Mark  uint32 // for AddEntry to a HashIPPortMark: the member's mark
}

func (c Change) String() string {
	switch c.Op {
	case CreateSet, DestroySet:
		return c.Op.String() + " " + c.Set.Name
	case AddEntry:
		return "add " + withMark(c.Entry, c.Mark) + " to set " + c.Set.Name
	case DeleteEntry:
		return "delete " + c.Entry.String() + " from set " + c.Set.Name
	}
	return fmt.Sprintf("unknown operation %d on set %s", c.Op, c.Set.Name)
}

// Failure is a change that the kernel refused.
type Failure = kernel.Failure[Change]
