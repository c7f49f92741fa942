//go:build e2e

package neighbours

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestNeighbourLeftovers tests a node with the state that a stopped kube-proxy left,
// after a switch to another program or to another variant of iptables.
func TestNeighbourLeftovers(t *testing.T) {
	onlyLong(t)
	for i, c := range []struct{ mode, variant string }{{"iptables", "legacy"}, {"ipvs", "legacy"}, {"iptables", "nft"}, {"ipvs", "nft"}} {
		t.Run(c.mode+"-"+c.variant, func(t *testing.T) {
			setup{
				key: "leftovers-" + c.mode + "-" + c.variant, plan: ordinaryPlan,
				Result: Result{Order: 60 + i, Title: fmt.Sprintf("kube-proxy's leftovers, %s mode, iptables-%s", c.mode, c.variant),
					What: fmt.Sprintf("kube-proxy ran in %s mode with iptables-%s and was ended, which leaves all that it wrote. Then the endpoints changed, and the programs started; kube-proxy in IPVS mode, with iptables-nft, kube-ipvs with what it chose.", c.mode, c.variant)},
				build:  func(s *side) { s.addBridgePods(s.plan) },
				before: func(s *side) { s.leaveBehind(c.mode, c.variant) },
			}.run(t)
		})
	}
}

// leaveBehind runs kube-proxy with a variant of iptables and stops it.
func (s *side) leaveBehind(mode, variant string) {
	s.t.Helper()
	dir := "/tmp/iptables-" + variant
	s.commands(
		"mkdir -p "+dir,
		fmt.Sprintf(`for name in iptables ip6tables; do for what in "" -save -restore; do ln -sf "$(command -v $name-%s$what)" %s/$name$what; done; done`, variant, dir),
	)
	ready := func(*lab.Process) error {
		if mode == "ipvs" {
			return s.programmed()
		}
		for family, name := range []string{"iptables", "ip6tables"} {
			out, err := s.Node.TryExec(dir+"/"+name+"-save", "-t", "nat")
			if err != nil {
				return err
			}
			if vip := clusterIPs(services)[family]; !strings.Contains(out, "-A KUBE-SERVICES -d "+vip+"/") {
				return fmt.Errorf("no rule for %s yet", vip)
			}
		}
		return nil
	}
	args := append([]string{"-c", `export PATH="` + dir + `:$PATH"; exec "$@"`, "sh", lab.Peer("kube-proxy")}, s.arguments()...)
	s.Node.StartProgram(ready, "sh", append(args, s.peerArguments(mode)...)...).Terminate()
}
