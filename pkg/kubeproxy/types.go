// Package kubeproxy finds and removes the tables that kube-proxy keeps in nftables
// mode. They go on leading Services' traffic to the endpoints of yesterday after
// kube-proxy has ended. What it leaves in the other modes has the names of ours,
// and is found with that.
package kubeproxy

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// State is the families in which there is a table.
type State map[ip.Family]bool

// Change deletes the table of a family.
type Change struct{ Family ip.Family }

func (c Change) String() string {
	return fmt.Sprintf("delete kube-proxy's table of %s in nftables", c.Family)
}

// Failure is a change that the kernel, or nft, refused.
type Failure = kernel.Failure[Change]

// Removals are the changes after which there is no table.
func (s State) Removals() []Change {
	var changes []Change
	for _, f := range ip.Families {
		if s[f] {
			changes = append(changes, Change{f})
		}
	}
	return changes
}
