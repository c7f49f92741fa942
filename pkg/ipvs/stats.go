package ipvs

import (
	"fmt"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

// Stats are the kernel's counters of a virtual server since it was added. Connections and
// packets are 32-bit numbers in the netlink message and wrap to 0.
type Stats struct {
	Connections           uint64
	PacketsIn, PacketsOut uint64 // from and to clients
	BytesIn, BytesOut     uint64
}

// ReadStats reads the counters of all virtual servers, in the network namespace of the
// calling thread. It uses a socket of its own, so it may be called concurrently with
// everything else.
func ReadStats() (map[Key]Stats, error) {
	handle, err := ipvs.New("")
	if err != nil {
		return nil, fmt.Errorf("connect to IPVS: %w", err)
	}
	watchdog := time.AfterFunc(answerTimeout, handle.Close) // see socket.call
	list, err := handle.GetServices()
	if !watchdog.Stop() {
		return nil, fmt.Errorf("no reply from IPVS within %s: %w", answerTimeout, unix.ETIMEDOUT)
	}
	defer handle.Close()
	if err != nil {
		return nil, fmt.Errorf("read IPVS's counters: %w", err)
	}
	stats := make(map[Key]Stats, len(list))
	for _, service := range list {
		key, err := keyOf(service)
		if err != nil {
			return nil, err
		}
		s := service.Stats
		stats[key] = Stats{uint64(s.Connections), uint64(s.PacketsIn), uint64(s.PacketsOut), s.BytesIn, s.BytesOut}
	}
	return stats, nil
}
