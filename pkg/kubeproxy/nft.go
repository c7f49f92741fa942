package kubeproxy

import (
	"fmt"
	"os/exec"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// names are the tables as nft lists them.
var names = map[ip.Family]string{
	ip.IPv4: "table ip kube-proxy",
	ip.IPv6: "table ip6 kube-proxy",
}

// NFT is the kernel's tables, reached with the program nft. It is safe for
// concurrent use; its calls act on the calling thread's network namespace.
type NFT struct{ program string }

// New finds nft in the PATH. It fails if there is none: then kube-proxy cannot
// have run in nftables mode either.
func New() (*NFT, error) {
	path, err := exec.LookPath("nft")
	if err != nil {
		return nil, fmt.Errorf("%w: install the package nftables", err)
	}
	return &NFT{program: path}, nil
}

// Observe tells which tables there are.
func (n *NFT) Observe() (State, error) {
	text, stderr, err := kernel.Run(n.program, "", "list", "tables")
	if err != nil {
		return nil, fmt.Errorf("nft list tables: %w: %s", err, strings.TrimSpace(stderr))
	}
	have := State{}
	for line := range strings.Lines(text) {
		for family, name := range names {
			if strings.TrimSpace(line) == name {
				have[family] = true
			}
		}
	}
	return have, nil
}

// Apply deletes tables, each by itself, and gives back what was not deleted. A
// table that is gone already is deleted.
func (n *NFT) Apply(changes []Change) []Failure {
	var failures []Failure
	for _, c := range changes {
		// Made first, so that there is one to delete.
		input := names[c.Family] + "\ndelete " + names[c.Family] + "\n"
		err := kernel.Change(1, func() error {
			_, stderr, err := kernel.Run(n.program, input, "-f", "-")
			if err != nil {
				return fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr))
			}
			return nil
		})
		if err != nil {
			failures = append(failures, Failure{Change: c, Err: err})
		}
	}
	return failures
}
