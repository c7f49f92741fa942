package nlmsg

import (
	"errors"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Execute runs a request through a shared socket. The kernel refuses a request for a list with
// EBUSY while the socket has one in progress (__netlink_dump_start in
// net/netlink/af_netlink.c). A failed read leaves such a list, which goes on only while the
// socket is read. Execute then reads the rest of it, and runs the request once more.
func Execute(sockets map[int]*nl.SocketHandle, protocol int, request func() error) error {
	err := request()
	if handle := sockets[protocol]; errors.Is(err, unix.EBUSY) && handle != nil {
		drain(handle.Socket.GetFd())
		err = request()
	}
	return err
}

// drain discards what a socket has to read, including the rest of a list.
func drain(fd int) {
	one := make([]byte, 1) // longer messages are cut off
	for {
		_, _, err := unix.Recvfrom(fd, one, unix.MSG_DONTWAIT)
		if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
			return
		}
	}
}
