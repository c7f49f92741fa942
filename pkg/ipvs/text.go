package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// String formats the state as "ipvsadm -Sn" does, sorted by key and by real server:
//
//	-A -t 10.96.0.1:443 -s rr
//	-a -t 10.96.0.1:443 -r 192.0.2.10:6443 -m -w 1
func (s State) String() string {
	var b strings.Builder
	for _, key := range slices.SortedFunc(maps.Keys(s), Key.Compare) {
		service := s[key]
		name := key.argument()
		fmt.Fprintf(&b, "-A %s %s\n", name, service.arguments())
		for _, dest := range sortedDests(service.RealServers) {
			rs := service.RealServers[dest]
			fmt.Fprintf(&b, "-a %s -r %s -m -w %d", name, dest, rs.Weight)
			if rs.MaxConnections != 0 {
				fmt.Fprintf(&b, " -x %d", rs.MaxConnections)
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}

func (k Key) argument() string {
	if k.FWMark != 0 {
		if k.Family() == ip.IPv6 {
			return fmt.Sprintf("-f %d -6", k.FWMark)
		}
		return fmt.Sprintf("-f %d", k.FWMark)
	}
	option := map[ip.Protocol]string{ip.TCP: "-t", ip.UDP: "-u", ip.SCTP: "--sctp-service"}[k.Protocol]
	return option + " " + netip.AddrPortFrom(k.Addr, k.Port).String()
}

func (vs VirtualServer) arguments() string {
	s := "-s " + vs.Scheduler
	if vs.Flags&FlagPersistent != 0 {
		s += fmt.Sprintf(" -p %d", vs.Timeout)
	}
	if vs.Flags&FlagOnePacket != 0 {
		s += " -o"
	}
	if flags := vs.schedulerFlags(); flags != "" {
		s += " -b " + flags
	}
	return s
}

// schedulerFlags returns the flags by the scheduler's names, as in "mh-port".
func (vs VirtualServer) schedulerFlags() string {
	names := []string{"flag-1", "flag-2", "flag-3"}
	if vs.Scheduler == "sh" || vs.Scheduler == "mh" {
		names[0], names[1] = vs.Scheduler+"-fallback", vs.Scheduler+"-port"
	}
	var set []string
	for i, flag := range []Flags{FlagSched1, FlagSched2, FlagSched3} {
		if vs.Flags&flag != 0 {
			set = append(set, names[i])
		}
	}
	return strings.Join(set, ",")
}

func sortedDests(m map[netip.AddrPort]RealServer) []netip.AddrPort {
	return slices.SortedFunc(maps.Keys(m), netip.AddrPort.Compare)
}
