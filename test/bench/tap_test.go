//go:build e2e

package bench

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// tap captures every netlink request in a network namespace, of any program, through an
// nlmon interface. So all programs are measured in the same way: by their requests and
// the time of each.
type tap struct {
	socket int
	family uint16 // IPVS's number in generic netlink
	ended  chan struct{}

	mu      sync.Mutex
	stopped bool
	held    bool // packets stay in the kernel's buffer for now
	changed *sync.Cond
	seen    tally
	awaited map[[4]byte]*arrival
	missing int // addresses with must that were not seen yet
}

// arrival is the time at which a request first named an address; zero if none has.
type arrival struct {
	at   time.Time
	must bool // met waits for it
}

// tally counts requests.
type tally struct {
	Writes, Reads map[string]int          // by kind
	First         time.Time               // when the first real server was added, except those of DNS and of the API server
	DNS           time.Time               // when that of DNS was
	BeforeDNS     int                     // virtual servers added by then
	Spans         map[string][2]time.Time // when the first and the last request were made, by what they are for
	Dropped       bool                    // some requests were not captured
}

func newTally() tally {
	return tally{Writes: map[string]int{}, Reads: map[string]int{}, Spans: map[string][2]time.Time{}}
}

// total is the number of all writes.
func (t tally) total() int {
	sum := 0
	for _, n := range t.Writes {
		sum += n
	}
	return sum
}

const tapLink = "nlmon0"

// addTap creates the interface. Call it before a program starts that watches interfaces.
func addTap(n *lab.Namespace) {
	n.Link(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: tapLink}, LinkType: "nlmon"})
}

// openTap starts capturing. The interface must exist.
func openTap(t testing.TB, n *lab.Namespace) *tap {
	t.Helper()
	family, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		t.Fatal(err)
	}
	tp := &tap{family: family.ID, ended: make(chan struct{}), seen: newTally(), awaited: map[[4]byte]*arrival{}}
	tp.changed = sync.NewCond(&tp.mu)
	if err := n.Do(tp.open); err != nil {
		t.Fatalf("listening to netlink: %v", err)
	}
	go tp.listen()
	return tp
}

// requestsOnly accepts packets whose first message has NLM_F_REQUEST.
var requestsOnly = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 6},
	{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: unix.NLM_F_REQUEST, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: tapBuffer},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

const (
	tapBuffer  = 4 << 20
	tapBacklog = 256 << 20
	// tapPause is how long a closing tap may still capture.
	tapPause = 200 * time.Millisecond
)

func (tp *tap) open() error {
	link, err := netlink.LinkByName(tapLink)
	if err != nil {
		return err
	}
	const everything = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	tp.socket = fd
	timeout := unix.NsecToTimeval(tapPause.Nanoseconds())
	program := unix.SockFprog{Len: uint16(len(requestsOnly)), Filter: &requestsOnly[0]}
	for _, set := range []func() error{
		func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, tapBacklog) },
		func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1) },
		func() error { return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout) },
		func() error { return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program) },
		func() error {
			return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: link.Attrs().Index})
		},
	} {
		if err := set(); err != nil {
			return err
		}
	}
	return nil
}

func (tp *tap) listen() {
	defer close(tp.ended)
	buffer, control := make([]byte, tapBuffer), make([]byte, 256)
	for {
		tp.whileHeld()
		n, oobn, _, from, err := unix.Recvmsg(tp.socket, buffer, control, 0)
		if err == unix.EAGAIN || err == unix.EINTR {
			if tp.isStopped() {
				return
			}
			continue
		}
		if err != nil {
			return
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok {
			tp.note(int(ll.Protocol>>8), buffer[:n], stamp(control[:oobn]))
		}
	}
}

// hold leaves packets in the kernel's buffer, with their timestamps, so that capturing
// does not disturb the measurement.
func (tp *tap) hold() {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	tp.held = true
}

// release processes the held packets, and then new ones as they arrive.
func (tp *tap) release() {
	tp.mu.Lock()
	tp.held = false
	tp.mu.Unlock()
	tp.changed.Broadcast()
}

func (tp *tap) whileHeld() {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	for tp.held && !tp.stopped {
		tp.changed.Wait()
	}
}

// stamp returns the kernel's timestamp of a packet.
func stamp(control []byte) time.Time {
	messages, err := unix.ParseSocketControlMessage(control)
	if err == nil {
		for _, m := range messages {
			if m.Header.Level == unix.SOL_SOCKET && len(m.Data) >= int(unsafe.Sizeof(unix.Timespec{})) {
				ts := (*unix.Timespec)(unsafe.Pointer(&m.Data[0]))
				return time.Unix(ts.Unix())
			}
		}
	}
	return time.Now()
}

func (tp *tap) isStopped() bool {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	return tp.stopped
}

// note counts the messages of one write.
func (tp *tap) note(protocol int, packet []byte, at time.Time) {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	for len(packet) >= unix.NLMSG_HDRLEN {
		length := int(binary.NativeEndian.Uint32(packet))
		if length < unix.NLMSG_HDRLEN || length > len(packet) {
			break
		}
		tp.count(protocol, packet[:length], at)
		packet = packet[min(len(packet), (length+3)&^3):]
	}
	tp.changed.Broadcast()
}

func (tp *tap) count(protocol int, message []byte, at time.Time) {
	what, write := tp.classify(protocol, message)
	if what == "" {
		return
	}
	span, known := tp.seen.Spans[what]
	if !known {
		span[0] = at
	}
	span[1] = at
	tp.seen.Spans[what] = span
	if !write {
		tp.seen.Reads[what]++
		return
	}
	tp.seen.Writes[what]++
	if what == newReal && tp.seen.First.IsZero() && ofMany(message) {
		tp.seen.First = at
	}
	if tp.seen.DNS.IsZero() && bytes.Contains(message, dnsEndpoint.AsSlice()) {
		tp.seen.DNS, tp.seen.BeforeDNS = at, tp.seen.Writes[newServer]
	}
	tp.find(message, at)
}

// ofMany reports whether a message concerns one of the benchmark's Services, and not a
// fixed one.
func ofMany(message []byte) bool {
	for ; len(message) >= 4; message = message[4:] {
		if a := netip.AddrFrom4([4]byte(message)); !a.Less(vip(0)) && a.Less(vip(1<<20)) {
			return true
		}
	}
	return false
}

// find searches a message for awaited addresses. Values in netlink messages are aligned
// to four bytes.
func (tp *tap) find(message []byte, at time.Time) {
	if len(tp.awaited) == 0 {
		return
	}
	for ; len(message) >= 4; message = message[4:] {
		a, awaited := tp.awaited[[4]byte(message)]
		if !awaited || !a.at.IsZero() {
			continue
		}
		a.at = at
		if a.must {
			tp.missing--
		}
	}
}

// unseen returns the awaited addresses that must arrive and have not.
func (tp *tap) unseen() []netip.Addr {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	var out []netip.Addr
	for address, a := range tp.awaited {
		if a.must && a.at.IsZero() {
			out = append(out, netip.AddrFrom4(address))
		}
	}
	return out
}

// Names of the counted IPVS requests.
const (
	newServer = "virtual server added"
	newReal   = "real server added"
	setReal   = "real server changed"
	goneReal  = "real server deleted"
)

// Commands of <linux/ip_vs.h>.
var ipvsWrites = map[byte]string{
	1: newServer, 2: "virtual server changed", 3: "virtual server deleted",
	5: newReal, 6: setReal, 7: goneReal, 12: "time-outs", 17: "flush",
}

// Commands of <linux/netfilter/ipset/ip_set.h> that write.
var setWrites = map[byte]string{
	2: "set created", 3: "set destroyed", 4: "set flushed", 5: "set renamed", 6: "sets swapped",
	9: "members added", 10: "members deleted",
}

// classify returns the kind of a request, and whether it writes. It returns "" for
// unknown requests.
func (tp *tap) classify(protocol int, message []byte) (what string, write bool) {
	kind := binary.NativeEndian.Uint16(message[4:])
	if kind < unix.NLMSG_MIN_TYPE {
		return "", false
	}
	switch protocol {
	case unix.NETLINK_ROUTE:
		return "network", kind&3 != 2 // RTM_GET…
	case unix.NETLINK_GENERIC:
		if kind != tp.family || len(message) <= unix.NLMSG_HDRLEN {
			return "", false
		}
		what, write := ipvsWrites[message[unix.NLMSG_HDRLEN]]
		if !write {
			what = "IPVS"
		}
		return what, write
	case unix.NETLINK_NETFILTER:
		return netfilter(byte(kind>>8), byte(kind))
	}
	return "", false
}

// Subsystems of <linux/netfilter/nfnetlink.h>.
const (
	subsystemConntrack = 1
	subsystemIPSet     = 6
	subsystemNFTables  = 10
)

// tablesReads are the commands of <linux/netfilter/nf_tables.h> that only read,
// NFT_MSG_GET….
var tablesReads = []byte{1, 4, 7, 10, 13, 16, 19, 21, 23, 25}

func netfilter(subsystem, command byte) (what string, write bool) {
	switch subsystem {
	case subsystemConntrack:
		return "conntrack", command == 0 || command == 2
	case subsystemIPSet:
		what, write := setWrites[command]
		if !write {
			what = "sets"
		}
		return what, write
	case subsystemNFTables:
		return "rules", !slices.Contains(tablesReads, command)
	}
	return "", false
}

// await waits until the captured requests satisfy a condition. It returns false after the
// limit.
func (tp *tap) await(limit time.Duration, enough func(tally) bool) bool {
	expired := false
	timer := time.AfterFunc(limit, func() {
		tp.mu.Lock()
		expired = true
		tp.mu.Unlock()
		tp.changed.Broadcast()
	})
	defer timer.Stop()
	tp.mu.Lock()
	defer tp.mu.Unlock()
	for !enough(tp.seen) && !expired {
		tp.changed.Wait()
	}
	return enough(tp.seen)
}

// expect registers an address to look for. If must is true, met waits for it.
func (tp *tap) expect(a netip.Addr, must bool) {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	tp.awaited[a.As4()] = &arrival{must: must}
	if must {
		tp.missing++
	}
}

// forget removes all registered addresses.
func (tp *tap) forget() {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	clear(tp.awaited)
	tp.missing = 0
}

// met returns when each expected address was first written to the kernel. It returns
// false if one with must was not written within the limit.
func (tp *tap) met(limit time.Duration) (map[netip.Addr]time.Time, bool) {
	all := tp.await(limit, func(tally) bool { return tp.missing == 0 })
	tp.mu.Lock()
	defer tp.mu.Unlock()
	times := map[netip.Addr]time.Time{}
	for address, a := range tp.awaited {
		if !a.at.IsZero() {
			times[netip.AddrFrom4(address)] = a.at
		}
	}
	return times, all
}

// close stops capturing and returns the counts.
func (tp *tap) close() tally {
	tp.mu.Lock()
	tp.stopped = true
	tp.mu.Unlock()
	tp.changed.Broadcast()
	<-tp.ended
	if s, err := unix.GetsockoptTpacketStats(tp.socket, unix.SOL_PACKET, unix.PACKET_STATISTICS); err == nil {
		tp.seen.Dropped = s.Drops > 0
	}
	unix.Close(tp.socket)
	return tp.seen
}
