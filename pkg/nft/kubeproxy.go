package nft

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
)

// KubeProxy is the set of families that have a table of kube-proxy's nftables mode. After
// kube-proxy has stopped, such a table still sends Service traffic to the endpoints of
// that time. kube-proxy's other modes use the same names as kube-ipvs, so their state is
// observed together with ours.
type KubeProxy map[ip.Family]bool

// KubeProxyChange deletes the table of a family.
type KubeProxyChange struct{ Family ip.Family }

func (c KubeProxyChange) String() string {
	return fmt.Sprintf("delete kube-proxy's %s table of nftables", c.Family)
}

// KubeProxyFailure is a change that the kernel or nft refused.
type KubeProxyFailure = kernel.Failure[KubeProxyChange]

// Removals returns the changes that remove all tables.
func (s KubeProxy) Removals() []KubeProxyChange {
	var changes []KubeProxyChange
	for _, f := range ip.Families {
		if s[f] {
			changes = append(changes, KubeProxyChange{f})
		}
	}
	return changes
}

// KubeProxyTables accesses the tables in the kernel. It may be used concurrently, and
// acts on the network namespace of the calling thread.
type KubeProxyTables struct{ *client }

// NewKubeProxyTables returns an error if nft is not installed or the kernel has no nf_tables;
// then kube-proxy cannot have run in nftables mode either.
func NewKubeProxyTables() (*KubeProxyTables, error) {
	if err := generation.Supported(); err != nil {
		return nil, err
	}
	c, err := newClient(KubeProxyTable)
	if err != nil {
		return nil, err
	}
	return &KubeProxyTables{c}, nil
}

// Observe returns the existing tables.
func (k *KubeProxyTables) Observe() (KubeProxy, error) {
	families, err := k.families()
	if err != nil {
		return nil, err
	}
	have := KubeProxy{}
	for _, f := range families {
		have[f] = true
	}
	return have, nil
}

// Apply deletes tables, each in one transaction, and returns those that could not be
// deleted. Deleting a missing table succeeds.
func (k *KubeProxyTables) Apply(changes []KubeProxyChange) []KubeProxyFailure {
	var failures []KubeProxyFailure
	for _, c := range changes {
		if err := k.replace(c.Family, nil); err != nil {
			failures = append(failures, KubeProxyFailure{Change: c, Err: err})
		}
	}
	return failures
}
