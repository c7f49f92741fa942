package ipset

import (
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// This file uses only the library's sockets and attributes, not its functions for sets:
//   - They send a protocol with each port, which a bitmap refuses.
//   - They cannot list only names or headers.
//   - They can create a set with marks, but not write the marks of members.
//   - They print attributes that they do not know.
//   - They panic on any error that is not an errno, such as an interrupted dump.

// answerTimeout limits one request. Creating a set may load the type's module, which
// takes seconds on a busy node.
const answerTimeout = 15 * time.Second

const (
	// IPSET_FLAG_LIST_HEADER of <linux/netfilter/ipset/ip_set.h>: without members.
	flagListHeader = 1 << 2
	// Initial size of hash sets; the kernel doubles the table as members are added.
	hashSize = 1024
)

// revisions are the types' revisions: the lowest ones that ipset(8) still reads. No feature
// of later ones is used.
var revisions = map[Type]uint8{
	HashIP: 0, HashNet: 0, HashIPPort: 1, HashIPPortIP: 1, HashIPPortNet: 2, BitmapPort: 0,
	HashIPPortMark: 5,
}

// Netlink programs the sets of the network namespace in which it was created.
type Netlink struct{ client }

// New connects to the kernel in the network namespace of the calling thread. It returns
// an error that names the fix if the kernel has no sets and their module cannot be
// loaded.
func New() (*Netlink, error) {
	sockets, err := nlmsg.Netfilter(answerTimeout)
	if err != nil {
		return nil, err
	}
	s := &socket{sockets}
	if _, err := s.list("", false); err != nil {
		s.close()
		return nil, fmt.Errorf("the kernel does not list its sets (%w); run \"modprobe ip_set\" on the node, and check that the process has CAP_NET_ADMIN", err)
	}
	return &Netlink{client{raw: s}}, nil
}

// socket implements raw through a netlink socket. The client's lock guards it.
type socket struct {
	sockets map[int]*nl.SocketHandle
}

func (s *socket) close() {
	for _, handle := range s.sockets {
		handle.Close()
	}
}

// request sends one request and returns the messages of the response.
func (s *socket) request(command, flags int, attributes ...*nl.RtAttr) ([][]byte, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_IPSET<<8|command, flags)
	req.Sockets = s.sockets
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	for _, attribute := range attributes {
		req.AddData(attribute)
	}
	var messages [][]byte
	err := nlmsg.Execute(s.sockets, unix.NETLINK_NETFILTER, func() (err error) {
		messages, err = req.Execute(unix.NETLINK_NETFILTER, 0)
		return err
	})
	if err != nil {
		return nil, named(err) // an interrupted dump has messages too
	}
	return messages, nil
}

func (s *socket) list(name string, members bool) ([]listing, error) {
	var attributes []*nl.RtAttr
	if name != "" {
		attributes = append(attributes, nameAttr(name))
	}
	if !members {
		attributes = append(attributes, nl.NewRtAttr(nl.IPSET_ATTR_FLAGS|netOrder, nl.BEUint32Attr(flagListHeader)))
	}
	messages, err := s.request(nl.IPSET_CMD_LIST, unix.NLM_F_ACK|unix.NLM_F_DUMP, attributes...)
	if err != nil {
		return nil, err
	}
	return parseListings(messages)
}

func (s *socket) create(set Set, maxElem uint32) error {
	options := nl.NewRtAttr(nl.IPSET_ATTR_DATA|nested, nil)
	if set.Type == BitmapPort {
		options.AddRtAttr(nl.IPSET_ATTR_PORT_FROM|netOrder, nl.BEUint16Attr(0))
		options.AddRtAttr(nl.IPSET_ATTR_PORT_TO|netOrder, nl.BEUint16Attr(65535))
	} else {
		options.AddRtAttr(nl.IPSET_ATTR_HASHSIZE|netOrder, nl.BEUint32Attr(hashSize))
		options.AddRtAttr(nl.IPSET_ATTR_MAXELEM|netOrder, nl.BEUint32Attr(maxElem))
	}
	if set.Type.hasMarks() {
		options.AddRtAttr(nl.IPSET_ATTR_CADT_FLAGS|netOrder, nl.BEUint32Attr(nl.IPSET_FLAG_WITH_SKBINFO))
	}
	// NLM_F_EXCL, because the kernel compares more than the type with an existing set.
	_, err := s.request(nl.IPSET_CMD_CREATE, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		nameAttr(set.Name),
		nl.NewRtAttr(nl.IPSET_ATTR_TYPENAME, nl.ZeroTerminated(set.Type.kernel())),
		nl.NewRtAttr(nl.IPSET_ATTR_REVISION, nl.Uint8Attr(revisions[set.Type])),
		nl.NewRtAttr(nl.IPSET_ATTR_FAMILY, nl.Uint8Attr(set.Family.AF())),
		options)
	return err
}

// With NLM_F_EXCL kernels of all versions return ENOENT for a missing set.
func (s *socket) destroy(name string) error {
	_, err := s.request(nl.IPSET_CMD_DESTROY, unix.NLM_F_ACK|unix.NLM_F_EXCL, nameAttr(name))
	return err
}

func (s *socket) swap(name, other string) error {
	_, err := s.request(nl.IPSET_CMD_SWAP, unix.NLM_F_ACK, nameAttr(name),
		nl.NewRtAttr(nl.IPSET_ATTR_SETNAME2, nl.ZeroTerminated(other)))
	return err
}

// Without NLM_F_EXCL adding an existing member and removing a missing one succeed.
func (s *socket) members(changes []Change) error {
	command := nl.IPSET_CMD_ADD
	if changes[0].Op == DeleteEntry {
		command = nl.IPSET_CMD_DEL
	}
	entries := make([]*nl.RtAttr, len(changes))
	for i, c := range changes {
		entries[i] = entryAttr(c.Set.Type, c.Entry, c.Mark)
	}
	set := nameAttr(changes[0].Set.Name)
	if len(entries) == 1 {
		_, err := s.request(command, unix.NLM_F_ACK, set, entries[0])
		return err
	}
	list := nl.NewRtAttr(nl.IPSET_ATTR_ADT|nested, nil)
	for _, entry := range entries {
		list.AddChild(entry)
	}
	// The kernel requires the attribute for line numbers in a list. It writes the
	// failing line into a copy of the request.
	line := nl.NewRtAttr(nl.IPSET_ATTR_LINENO|netOrder, nl.BEUint32Attr(0))
	_, err := s.request(command, unix.NLM_F_ACK, set, line, list)
	return err
}

func (s *socket) has(set Set, e Entry) error {
	_, err := s.request(nl.IPSET_CMD_TEST, unix.NLM_F_ACK, nameAttr(set.Name), entryAttr(set.Type, e, 0))
	return err
}
