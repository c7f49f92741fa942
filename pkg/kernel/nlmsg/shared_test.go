package nlmsg

import (
	"errors"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TestExecuteAfterAbandonedList asks for a list of interfaces without reading the response, as
// after a failed read, and then for another one through the same socket.
func TestExecuteAfterAbandonedList(t *testing.T) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	limit := unix.NsecToTimeval((10 * time.Second).Nanoseconds())
	if err := socket.SetReceiveTimeout(&limit); err != nil {
		t.Fatal(err)
	}
	sockets := map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
	list := func() *nl.NetlinkRequest {
		r := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		r.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		r.Sockets = sockets
		return r
	}
	abandoned := list()
	abandoned.Seq = 1 << 30
	if err := socket.Send(abandoned); err != nil {
		t.Fatal(err)
	}
	var messages [][]byte
	first := true
	err = Execute(sockets, unix.NETLINK_ROUTE, func() (err error) {
		messages, err = list().Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
		if first && !errors.Is(err, unix.EBUSY) {
			t.Errorf("the first try: %v, want EBUSY", err)
		}
		first = false
		return err
	})
	if err != nil || len(messages) == 0 {
		t.Errorf("%d interfaces, %v", len(messages), err)
	}
}
