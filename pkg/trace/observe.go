package trace

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Kernel is the state that both families share, read once.
type Kernel struct {
	links  []routing.Link
	rules  []routing.Rule
	routes []routing.Route
	ports  map[string]bool // of bridges, with hairpin mode
	native *nft.Ruleset
	unread []string // see Node.Unread
	sets   ipset.State
	ipvs   ipvs.State
	counts Connections
}

// Read reads the kernel, in the network namespace of the calling thread.
func Read() (*Kernel, error) {
	k := &Kernel{}
	if err := errors.Join(k.readRoutes(), k.readSets(), k.readServers()); err != nil {
		return nil, err
	}
	if generation.Supported() == nil {
		var err error
		if k.native, err = nft.ReadRuleset(); err != nil {
			k.unread = append(k.unread, fmt.Sprintf("rules that programs wrote with nftables: %s", err))
		}
	}
	return k, nil
}

// Node reads the rules and parameters of one family, in the same network namespace.
func (k *Kernel) Node(family ip.Family) (*Node, error) {
	n := &Node{Family: family, Links: k.links, Hairpin: k.ports, Sets: k.sets, IPVS: k.ipvs, Connections: k.counts, Native: k.native, Unread: slices.Clone(k.unread)}
	for _, r := range k.rules {
		if r.Family == family {
			n.Rules = append(n.Rules, r)
		}
	}
	for _, r := range k.routes {
		if r.Family == family {
			n.Routes = append(n.Routes, r)
		}
	}
	if err := errors.Join(n.readRules(), n.readSysctls()); err != nil {
		return nil, err
	}
	return n, nil
}

func (k *Kernel) readRoutes() error {
	kernel, err := routing.New()
	if err != nil {
		return err
	}
	defer kernel.Close()
	inventory, err := kernel.Inventory()
	if err != nil {
		return err
	}
	k.links, k.rules = inventory.Links, inventory.Rules
	if k.ports, err = routing.Hairpin(k.links); err != nil {
		return err
	}
	k.routes, err = kernel.Routes()
	return err
}

// readRules reads the rules of both back ends of iptables: the kernel evaluates both.
func (n *Node) readRules() error {
	choice, err := nat.Choose()
	if err != nil {
		return err
	}
	if n.Ruleset, err = readRules(n.Family, choice.Use); err != nil {
		return err
	}
	switch {
	case choice.HasOther:
		if n.Other, err = readRules(n.Family, choice.Other); err != nil {
			n.Unread = append(n.Unread, err.Error())
		}
	case choice.Unseen:
		n.Unread = append(n.Unread, "rules of the other back end of iptables, whose programs are not installed")
	}
	return nil
}

// readRules reads the rules of one back end. Table security of iptables-nft is among the chains
// of nftables: its priority differs from that of iptables-legacy.
func readRules(family ip.Family, v nat.Variant) (nat.Ruleset, error) {
	tables, err := nat.Open(family, v)
	if err != nil {
		return nil, err
	}
	rules, err := tables.Ruleset()
	if v == nat.NFT {
		delete(rules, security)
	}
	return rules, err
}

// readSets reads all sets, because rules of other programs match those of theirs.
func (k *Kernel) readSets() (err error) {
	k.sets, err = observeSets(nil)
	return err
}

// Sets reads the sets of service proxies.
func Sets() (ipset.State, error) {
	return observeSets(func(name string) bool { return strings.HasPrefix(name, "KUBE-") })
}

func observeSets(names func(string) bool) (ipset.State, error) {
	kernel, err := ipset.New()
	if err != nil {
		return nil, err
	}
	defer kernel.Close()
	return kernel.Observe(names)
}

func (k *Kernel) readServers() error {
	kernel, err := ipvs.New()
	if err != nil {
		return err
	}
	defer kernel.Close()
	if k.ipvs, err = kernel.Observe(); err != nil {
		return err
	}
	k.counts = Connections{}
	for key, server := range k.ipvs {
		for _, rs := range server.RealServers {
			if rs.MaxConnections == 0 {
				continue
			}
			if k.counts[key], err = kernel.Connections(key); err != nil {
				return err
			}
			break
		}
	}
	return nil
}

func (n *Node) readSysctls() error {
	kernel := sysctl.New()
	var have []string
	for _, key := range keys(n.Family, n.Links) {
		exists, err := kernel.Exists(key)
		if err != nil {
			return fmt.Errorf("read %s: %w", key, err)
		}
		if exists {
			have = append(have, key)
		}
	}
	var err error
	n.Sysctls, err = kernel.Observe(have)
	return err
}
