package kubeproxy

import (
	"fmt"
	"os/exec"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

// names are the tables as listed by nft.
var names = map[ip.Family]string{
	ip.IPv4: "table ip kube-proxy",
	ip.IPv6: "table ip6 kube-proxy",
}

// NFT accesses the kernel's tables by the program nft. It may be used concurrently, and
// acts on the network namespace of the calling thread.
type NFT struct{ program string }

// New finds nft in the PATH. It returns an error if nft is not installed; then
// kube-proxy cannot have run in nftables mode either.
func New() (*NFT, error) {
	path, err := exec.LookPath("nft")
	if err != nil {
		return nil, fmt.Errorf("%w: install the package nftables", err)
	}
	return &NFT{program: path}, nil
}

// Observe returns the existing tables.
func (n *NFT) Observe() (State, error) {
	text, stderr, err := program.Run(n.program, "", "list", "tables")
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

// Apply deletes tables, each by itself, and returns those that could not be deleted.
// Deleting a missing table succeeds.
func (n *NFT) Apply(changes []Change) []Failure {
	var failures []Failure
	for _, c := range changes {
		// Created first, so that it exists.
		input := names[c.Family] + "\ndelete " + names[c.Family] + "\n"
		err := generation.Change(1, func() error {
			_, stderr, err := program.Run(n.program, input, "-f", "-")
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
