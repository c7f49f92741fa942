package nlmsg

import (
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Netfilter connects to netfilter in the network namespace of the calling thread. Sending and
// each part of a response may take up to timeout. The map is for nl.NetlinkRequest.Sockets;
// the caller closes its handle.
func Netfilter(timeout time.Duration) (map[int]*nl.SocketHandle, error) {
	sock, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("connect to netfilter: %w", err)
	}
	limit := unix.NsecToTimeval(timeout.Nanoseconds())
	if err := errors.Join(sock.SetSendTimeout(&limit), sock.SetReceiveTimeout(&limit)); err != nil {
		sock.Close()
		return nil, fmt.Errorf("set the timeout of a netlink socket: %w", err)
	}
	return map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: sock}}, nil
}
