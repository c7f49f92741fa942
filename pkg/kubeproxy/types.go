// Package kubeproxy finds and removes the tables that kube-proxy creates in nftables
// mode. After kube-proxy has stopped they still send Service traffic to the endpoints
// of that time. State of its other modes has the same names as ours, and is found with
// that.
package kubeproxy

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// State is the set of families that have a table.
type State map[ip.Family]bool

// Change deletes the table of a family.
type Change struct{ Family ip.Family }

func (c Change) String() string {
	return fmt.Sprintf("delete kube-proxy's %s table of nftables", c.Family)
}

// Failure is a change that the kernel or nft refused.
type Failure = kernel.Failure[Change]

// Removals returns the changes that remove all tables.
func (s State) Removals() []Change {
	var changes []Change
	for _, f := range ip.Families {
		if s[f] {
			changes = append(changes, Change{f})
		}
	}
	return changes
}
