package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Schedulers are the schedulers of Linux. Probe checks whether a kernel has one.
var Schedulers = []string{"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "fo", "ovf", "twos"}

// schedulerFlags are the flags of the schedulers that have any, by ipvsadm's names.
var schedulerFlags = map[string]map[string]Flags{
	"sh": {"sh-fallback": FlagSched1, "sh-port": FlagSched2},
	"mh": {"mh-fallback": FlagSched1, "mh-port": FlagSched2},
}

// DefaultFlags returns the flags of a scheduler if none are configured. Without its fallback
// flag a hashing scheduler rejects the clients of a real server with weight 0, one that
// drains (kubernetes PR 138688). Without its port flag maglev hashing would send all clients
// behind one NAT to one endpoint; kube-proxy sets that flag too.
func DefaultFlags(scheduler string) Flags {
	switch scheduler {
	case "sh":
		return FlagSched1
	case "mh":
		return FlagSched1 | FlagSched2
	}
	return 0
}

// ParseFlags parses a comma-separated list of a scheduler's flags, such as
// "mh-port,mh-fallback". An empty list means no flags.
func ParseFlags(scheduler, list string) (Flags, error) {
	if list == "" {
		return 0, nil
	}
	known := schedulerFlags[scheduler]
	if known == nil {
		return 0, errors.New("the scheduler " + scheduler + " has no flags")
	}
	var flags Flags
	for _, name := range strings.Split(list, ",") {
		flag, ok := known[strings.TrimSpace(name)]
		if !ok {
			return 0, fmt.Errorf("%q is none of %s", name, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
		flags |= flag
	}
	return flags, nil
}

// Hashes reports whether a scheduler selects real servers by their position in the kernel's
// list. Nodes with the same order send a client to the same real server.
func Hashes(scheduler string) bool {
	return scheduler == "sh" || scheduler == "dh" || scheduler == "mh"
}
