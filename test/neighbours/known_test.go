//go:build e2e

package neighbours

import "regexp"

// known is a failure of today's that has a row in issue 22. The list must become
// empty: a test fails when a known failure passes.
type known struct {
	row int
	// cells matches the names of questions and checks.
	cells string
}

func (k known) matches(name string) bool { return regexp.MustCompile(k.cells).MatchString(name) }

// knownFailures are by the keys of set-ups.
var knownFailures = map[string][]known{
	"aws": {
		{1, `^(lan|outside|pod|pod on an ENI) -> (load balancer|external) IP, .* IPv4$`},
		{3, `^lan -> (load balancer|external) IP, Local, .* IPv6$`},
	},
	"aws-security-groups-standard": {
		{1, `^(lan|outside|pod|pod with security groups) -> (load balancer|external) IP, .* IPv4$`},
		{3, `^lan -> (load balancer|external) IP, Local, .* IPv6$`},
	},
	"aws-security-groups-strict": {
		{11, `^pod with security groups -> `},
		{1, `^(lan|outside|pod) -> (load balancer|external) IP, .* IPv4$`},
		{3, `^lan -> (load balancer|external) IP, Local, .* IPv6$`},
	},
	"none": {
		{8, `^a pod sends 300 KiB to a (load balancer|external) IP, IPv4`},
		{12, `^an endpoint calls its own Service`},
	},
	"flannel-pods": {
		{10, `^(pod|node) -> (load balancer|external) IP, |^(lan|outside) -> external IP, Cluster, |^(new connections|connections held) `},
	},
	// In insert mode Felix accepts established packets in mangle PREROUTING before
	// they are marked.
	"calico-insert": {{2, `^(lan|outside) -> (.*, Local, |(load balancer|external) IP, Cluster, TCP)`}},
	"calico-append": {{2, `^(lan|outside) -> .*, Local, `}},
}
