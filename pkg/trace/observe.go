package trace

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Observe reads the kernel, in the network namespace of the calling thread.
func Observe(family ip.Family) (*Node, error) {
	n := &Node{Family: family}
	errs := []error{n.readRoutes(), n.readRules(), n.readSets(), n.readServers()}
	errs = append(errs, n.readSysctls())
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return n, nil
}

func (n *Node) readRoutes() error {
	kernel, err := routing.New()
	if err != nil {
		return err
	}
	defer kernel.Close()
	inventory, err := kernel.Inventory()
	if err != nil {
		return err
	}
	routes, err := kernel.Routes()
	if err != nil {
		return err
	}
	n.Links = inventory.Links
	for _, r := range inventory.Rules {
		if r.Family == n.Family {
			n.Rules = append(n.Rules, r)
		}
	}
	for _, r := range routes {
		if r.Family == n.Family {
			n.Routes = append(n.Routes, r)
		}
	}
	return nil
}

func (n *Node) readRules() error {
	tables, err := nat.New(n.Family)
	if err != nil {
		return err
	}
	n.Ruleset, err = tables.Ruleset()
	return err
}

func (n *Node) readSets() (err error) {
	n.Sets, err = Sets()
	return err
}

// Sets reads those of service proxies; rules with other sets are in doubt.
func Sets() (ipset.State, error) {
	kernel, err := ipset.New()
	if err != nil {
		return nil, err
	}
	defer kernel.Close()
	return kernel.Observe(func(name string) bool { return strings.HasPrefix(name, "KUBE-") })
}

func (n *Node) readServers() error {
	kernel, err := ipvs.New()
	if err != nil {
		return err
	}
	defer kernel.Close()
	n.IPVS, err = kernel.Observe()
	return err
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
