package routing

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// Reroute is whether the source of a packet may change its route. IPVS replaces the source
// of a reply by the VIP after the reply was routed, and then routes it again unless
// net.ipv4.vs.snat_reroute is 0 (ip_vs_route_me_harder in net/netfilter/ipvs/ip_vs_core.c).
// The second lookup costs every reply about 2,700 instructions.
type Reroute uint8

// Inventory sets RerouteNeeded or RerouteUnneeded.
const (
	RerouteUnknown  Reroute = iota
	RerouteNeeded           // by policy rules, IPv6 routes by source or IPsec; or these cannot be read
	RerouteUnneeded         // the destination alone decides
)

func (n *Netlink) reroute(rules []rawRule) Reroute {
	if n.onlyKernelRules(rules) && n.withoutIPsec() && n.withoutSourceRoutes() {
		return RerouteUnneeded
	}
	return RerouteNeeded
}

// kernelRules are the rules that each network namespace begins with.
var kernelRules = map[ip.Family][]Rule{
	ip.IPv4: {
		{Family: ip.IPv4, Table: TableLocal},
		{Family: ip.IPv4, Priority: PriorityMain, Table: TableMain},
		{Family: ip.IPv4, Priority: 32767, Table: TableDefault},
	},
	ip.IPv6: {
		{Family: ip.IPv6, Table: TableLocal},
		{Family: ip.IPv6, Priority: PriorityMain, Table: TableMain},
	},
}

// onlyKernelRules reports whether both families have only the kernel's own rules and ours
// for VIPs: the parts of SkipLocal rules, and rules that look up the table of claimed VIPs.
// Those decide only whether a destination is local, and IPVS does not route replies to
// a local destination a second time. A family without rules was not read.
func (n *Netlink) onlyKernelRules(rules []rawRule) bool {
	for _, f := range ip.Families {
		var found []Rule
		for _, r := range rules {
			claims := n.VIPTable > 0 && r.Table == n.VIPTable
			if r.Family == f && !r.part() && !claims {
				found = append(found, r.Rule)
			}
		}
		slices.SortStableFunc(found, compareOrder)
		if !slices.Equal(found, kernelRules[f]) {
			return false
		}
	}
	return true
}

// withoutIPsec reports whether no IPsec policy exists. A kernel without the netlink
// interface may still have policies made through af_key.
func (n *Netlink) withoutIPsec() bool {
	policies, err := n.handle.XfrmPolicyList(netlink.FAMILY_ALL)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		_, err = os.Stat("/proc/thread-self/net/pfkey")
		return errors.Is(err, os.ErrNotExist)
	}
	return err == nil && len(policies) == 0
}

// withoutSourceRoutes reports whether no IPv6 route of the main table has a source prefix
// (CONFIG_IPV6_SUBTREES). The netlink library does not return such prefixes.
func (n *Netlink) withoutSourceRoutes() bool {
	socket, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return false
	}
	defer socket.Close()
	// Since Linux 4.20 the kernel then returns the main table only.
	_ = unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Seq: req.Seq, Socket: socket}}
	req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET6, Table: TableMain}})
	without := true
	err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(m []byte) bool {
		without = without && len(m) >= unix.SizeofRtMsg && nl.DeserializeRtMsg(m).Src_len == 0
		return true
	})
	return err == nil && without
}

// watchIPsec calls changed when IPsec policies may have changed, until the context ends. If the
// first subscription fails, the kernel has no IPsec. After any other failure it subscribes again.
func watchIPsec(ctx context.Context, changed func()) {
	subscribe := func() (*nl.NetlinkSocket, error) { return nl.Subscribe(unix.NETLINK_XFRM, policyGroup) }
	socket, err := subscribe()
	if err != nil {
		return
	}
	go func() {
		for socket != nil {
			_ = nlmsg.Follow(ctx, socket, func(syscall.NetlinkMessage) { changed() }, changed)
			socket = resubscribe(ctx, subscribe)
		}
	}()
}

// policyGroup is XFRMNLGRP_POLICY of <linux/xfrm.h>.
const policyGroup = 4
