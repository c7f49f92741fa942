package nlmsg

import (
	"context"
	"errors"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Follow passes on the messages of a subscribed netlink socket until the socket fails
// or the context ends, and closes it. It calls dropped first, so that nothing between
// an earlier read and the subscription is missed, and again whenever the kernel has
// dropped messages that were not read in time. The error is the context's if that has
// ended.
func Follow(ctx context.Context, socket *nl.NetlinkSocket, message func(syscall.NetlinkMessage), dropped func()) error {
	stop := context.AfterFunc(ctx, socket.Close)
	defer func() {
		if stop() {
			socket.Close()
		}
	}()
	dropped()
	for {
		messages, _, err := socket.Receive()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.ENOBUFS):
			// The kernel goes on dropping messages, without another error, until everything
			// that it queued before has been read (netlink_rcv_wake in af_netlink.c).
			drain(socket.GetFd())
			dropped()
		case err != nil:
			return err
		}
		for _, m := range messages {
			message(m)
		}
	}
}
