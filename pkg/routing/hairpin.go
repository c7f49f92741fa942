package routing

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// Hairpin returns the names of the bridge ports among links that are in hairpin mode: a
// frame may leave by the port where it entered. It reads the network namespace of the
// calling thread.
func Hairpin(links []Link) (map[string]bool, error) {
	messages, err := dump(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		request.AddData(nl.NewIfInfomsg(unix.AF_BRIDGE))
		return request.Execute(unix.NETLINK_ROUTE, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("read the ports of bridges: %w", err)
	}
	modes := map[int]bool{}
	for _, m := range messages {
		if len(m) >= unix.SizeofIfInfomsg {
			modes[int(nl.DeserializeIfInfomsg(m).Index)] = hairpinMode(m[unix.SizeofIfInfomsg:])
		}
	}
	out := map[string]bool{}
	for _, l := range links {
		if modes[l.Index] {
			out[l.Name] = true
		}
	}
	return out, nil
}

// hairpinMode returns IFLA_BRPORT_MODE, in IFLA_PROTINFO, from the attributes of a port.
func hairpinMode(attributes []byte) bool {
	list, _ := nlmsg.Attributes(attributes)
	for _, a := range list {
		if a.Attr.Type&^unix.NLA_F_NESTED != unix.IFLA_PROTINFO {
			continue
		}
		nested, _ := nlmsg.Attributes(a.Value)
		for _, b := range nested {
			if b.Attr.Type == nl.IFLA_BRPORT_MODE && len(b.Value) > 0 {
				return b.Value[0] != 0
			}
		}
	}
	return false
}
