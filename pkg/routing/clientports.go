package routing

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// PortRange is a range of ports, including both ends.
type PortRange struct{ First, Last uint16 }

// Has reports whether a port is in the range.
func (r PortRange) Has(port uint16) bool { return r.First <= port && port <= r.Last }

func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// ClientPorts returns the ports that the kernel gives to sockets which did not choose one:
// ip_local_port_range without ip_local_reserved_ports, sorted. They apply to both families. It
// reads the network namespace of the calling thread.
func (n *Netlink) ClientPorts() ([]PortRange, error) {
	var values [2]string
	for i, name := range []string{"ip_local_port_range", "ip_local_reserved_ports"} {
		text, err := os.ReadFile("/proc/sys/net/ipv4/" + name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read the ports of clients: %w", err)
		}
		values[i] = string(text)
	}
	return clientPorts(values[0], values[1])
}

// clientPorts parses a range such as "32768\t60999", and reserved ports such as "8080,9000-9100".
func clientPorts(all, reserved string) ([]PortRange, error) {
	if all == "" {
		return nil, nil
	}
	without, err := parsePorts(reserved)
	if err != nil {
		return nil, fmt.Errorf("ip_local_reserved_ports: %w", err)
	}
	parsed, err := parsePorts(strings.Join(strings.Fields(all), "-"))
	if err != nil || len(parsed) != 1 {
		return nil, fmt.Errorf("ip_local_port_range is %q, want two ports", all)
	}
	next, last := int(parsed[0].First), int(parsed[0].Last)
	var out []PortRange
	for _, r := range without {
		if end := min(int(r.First)-1, last); next <= end {
			out = append(out, PortRange{uint16(next), uint16(end)})
		}
		next = max(next, int(r.Last)+1)
	}
	if next <= last {
		out = append(out, PortRange{uint16(next), uint16(last)})
	}
	return out, nil
}

// parsePorts parses a list of ports and ranges, and sorts it.
func parsePorts(list string) ([]PortRange, error) {
	var out []PortRange
	for item := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		if item == "" {
			continue
		}
		first, last, isRange := strings.Cut(item, "-")
		if !isRange {
			last = first
		}
		a, err := strconv.ParseUint(first, 10, 16)
		b, errLast := strconv.ParseUint(last, 10, 16)
		if err = cmp.Or(err, errLast); err != nil {
			return nil, err
		}
		out = append(out, PortRange{uint16(a), uint16(b)})
	}
	slices.SortFunc(out, func(a, b PortRange) int { return cmp.Compare(a.First, b.First) })
	return out, nil
}
