// Command aws sets up a node's and its pods' network with AWS VPC CNI's own code,
// as its daemon and its CNI plugin do: it reads a list of steps, as JSON, from
// standard input and carries them out in the caller's network namespace.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"

	"github.com/aws/amazon-vpc-cni-k8s/cmd/routed-eni-cni-plugin/driver"
	"github.com/aws/amazon-vpc-cni-k8s/pkg/networkutils"
	"github.com/aws/amazon-vpc-cni-k8s/pkg/sgpp"
	"github.com/aws/amazon-vpc-cni-k8s/pkg/utils/logger"
)

// step is one call. Which of the fields it needs depends on Do.
type step struct {
	// Do is host (SetupHostNetwork), eni (SetupENINetwork), pod (SetupPodNetwork),
	// branch (SetupBranchENIPodNetwork) or rules (UpdateRuleListBySrc, as the daemon
	// does for each pod when it starts).
	Do string
	// MAC is that of the primary interface, of the ENI or of the branch ENI; IP is
	// its address, or the pod's.
	MAC, IP string
	IPv6    bool
	// VPC are the VPC's address ranges; SecurityGroups reports whether security
	// groups for pods are on.
	VPC            []string
	SecurityGroups bool
	// Subnet and Table are an ENI's subnet and routing table. A trunk ENI carries
	// branch ENIs.
	Subnet string
	Table  int
	Trunk  bool
	// Namespace is the path of the pod's network namespace, HostLink the node's end
	// of its link.
	Namespace, HostLink string
	MTU                 int
	// VLAN, Gateway and Parent are a branch ENI's: its number, its subnet's gateway
	// and the index of the trunk's link.
	VLAN    int
	Gateway string
	Parent  int
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "aws:", err)
		os.Exit(1)
	}
}

func run() error {
	var steps []step
	if err := json.NewDecoder(os.Stdin).Decode(&steps); err != nil {
		return err
	}
	node, err := networkutils.New()
	if err != nil {
		return err
	}
	log := logger.New(&logger.Configuration{LogLevel: "Error", LogLocation: "stderr"})
	for _, s := range steps {
		if err := s.carryOut(node, driver.New(), log); err != nil {
			return fmt.Errorf("%+v: %w", s, err)
		}
	}
	return nil
}

func (s step) carryOut(node networkutils.NetworkAPIs, pods driver.NetworkAPIs, log logger.Logger) error {
	switch s.Do {
	case "host":
		address := net.ParseIP(s.IP)
		return node.SetupHostNetwork(s.VPC, s.MAC, &address, s.SecurityGroups, s.IPv6)
	case "eni":
		return node.SetupENINetwork(s.IP, s.MAC, 0, s.Subnet, 4, s.Trunk, s.Table, false)
	case "rules":
		rules, err := node.GetRuleList(s.IPv6)
		if err != nil {
			return err
		}
		return node.UpdateRuleListBySrc(rules, *s.address())
	case "pod":
		return pods.SetupPodNetwork([]driver.VirtualInterfaceMetadata{s.interfaceOf()}, s.Namespace, s.MTU, log)
	case "branch":
		return pods.SetupBranchENIPodNetwork(s.interfaceOf(), s.Namespace, s.VLAN, s.MAC, s.Gateway, s.Parent, s.MTU,
			sgpp.LoadEnforcingModeFromEnv(), log)
	}
	return fmt.Errorf("unknown step %q", s.Do)
}

func (s step) interfaceOf() driver.VirtualInterfaceMetadata {
	return driver.VirtualInterfaceMetadata{
		IPAddress: s.address(), RouteTable: s.Table, HostVethName: s.HostLink, ContainerVethName: "eth0",
	}
}

// address is the pod's, as the address of one host.
func (s step) address() *net.IPNet {
	ip := net.ParseIP(s.IP)
	bits := 8 * net.IPv6len
	if v4 := ip.To4(); v4 != nil {
		ip, bits = v4, 8*net.IPv4len
	}
	return &net.IPNet{IP: ip, Mask: net.CIDRMask(bits, bits)}
}
