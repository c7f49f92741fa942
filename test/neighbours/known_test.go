//go:build e2e

package neighbours

import "regexp"

// known is a failure of today's that has a row in issue 22. The list must become
// empty: a test fails when a known failure passes.
type known struct {
	row int
	// cells matches the names of questions and checks.
	cells string
	// fixing says that the fix is about to go in: then it may pass or fail.
	fixing bool
}

func (k known) matches(name string) bool { return regexp.MustCompile(k.cells).MatchString(name) }

// knownFailures are by the keys of set-ups.
var knownFailures = map[string][]known{
	"none": {
		{row: 8, cells: `^a pod sends 300 KiB to a (load balancer|external) IP, IPv4`, fixing: true},
		{row: 12, cells: `^an endpoint calls its own Service`, fixing: true},
	},
	"flannel-pods": {
		{row: 10, cells: `^(pod|node) -> (load balancer|external) IP, |^(lan|outside) -> external IP, Cluster, |^(new connections|connections held) `, fixing: true},
	},
	// In insert mode Felix accepts established packets in mangle PREROUTING before
	// they are marked.
	"calico-insert": {{row: 2, cells: `^(lan|outside) -> (.*, Local, |(load balancer|external) IP, Cluster, TCP)`, fixing: true}},
	"calico-append": {{row: 2, cells: `^(lan|outside) -> .*, Local, `, fixing: true}},
}
