package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Schedulers are those of Linux. Which of them a kernel has, Probe finds out.
var Schedulers = []string{"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "fo", "ovf", "twos"}

// schedulerFlags are the flags of the schedulers that have any, as ipvsadm
// names them.
var schedulerFlags = map[string]map[string]Flags{
	"sh": {"sh-fallback": FlagSched1, "sh-port": FlagSched2},
	"mh": {"mh-fallback": FlagSched1, "mh-port": FlagSched2},
}

// DefaultFlags are a scheduler's flags where none are asked for. Without its
// fallback a scheduler that hashes refuses the clients of a real server with
// weight 0, which is one that drains (kubernetes PR 138688). By the address
// alone maglev hashing would send everybody behind one NAT to one endpoint;
// kube-proxy sets that flag too.
func DefaultFlags(scheduler string) Flags {
	switch scheduler {
	case "sh":
		return FlagSched1
	case "mh":
		return FlagSched1 | FlagSched2
	}
	return 0
}

// ParseFlags reads a list of a scheduler's flags by their names, such as
// "mh-port,mh-fallback". An empty list is none.
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

// Hashes tells whether a scheduler assigns clients by the place that a real
// server has in the kernel's list. Nodes on which that is the same send a
// client to the same one.
func Hashes(scheduler string) bool {
	return scheduler == "sh" || scheduler == "dh" || scheduler == "mh"
}
