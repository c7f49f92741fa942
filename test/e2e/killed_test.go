//go:build e2e

package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// killedModes are the modes of kube-proxy, with the requests that may reach an old endpoint on
// a node whose kube-ipvs was killed, until kube-ipvs --cleanup has run there
// (docs/guides/migrate.md): a fwmark virtual server that kube-proxy does not know takes them.
var killedModes = []struct{ mode, mayFail string }{
	{"ipvs", `^(a pod|the node), .*Local`},
	{"iptables", `^the node, .*Local`},
	{"nftables", `^$`},
}

// TestBehaviourKubeProxyAfterKill kills kube-ipvs, so that all of its state remains, and
// starts kube-proxy. Then Services and endpoints change. kube-proxy serves them beside that
// state, except where the documentation says so, and everything once --cleanup has run.
func TestBehaviourKubeProxyAfterKill(t *testing.T) {
	for _, m := range killedModes {
		t.Run(m.mode, func(t *testing.T) {
			c := newServed(t, m.mode)
			node := c.takenOver()[0]
			c.startKubeIPVS(node)
			lab.Eventually(t, syncLimit, "everybody is answered", func() error { return c.serves(node) })
			c.young[node].Stop()
			c.succeed(t, node)
			c.changeAll(t, node)
			may := regexp.MustCompile(m.mayFail)
			lab.Eventually(t, 2*syncLimit, "what must not fail beside the state of kube-ipvs is answered", func() error {
				for _, bad := range c.stale(node) {
					if !may.MatchString(bad) {
						return fmt.Errorf("%s", bad)
					}
				}
				return nil
			})
			for _, bad := range c.stale(node) {
				t.Logf("before the cleanup: %s", bad)
			}
			if code, output := node.RunProxy("--cleanup"); code != 0 && !strings.Contains(output, "and stays: clean up again") {
				t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
			}
			lab.Eventually(t, syncLimit, "everybody is answered after the cleanup", func() error {
				if bad := c.stale(node); len(bad) > 0 {
					return fmt.Errorf("%s", strings.Join(bad, "\n"))
				}
				return nil
			})
		})
	}
}

// changeAll replaces all endpoints, and adds a Service.
func (c *takeOver) changeAll(t *testing.T, node *lab.BridgeNode) {
	t.Helper()
	here, there := node.AddPod("new1"), c.Nodes[1].AddPod("new2")
	for _, pod := range []*lab.Pod{here, there} {
		for _, protocol := range lab.Protocols {
			pod.Serve(pod.Name, protocol, webPort)
		}
	}
	for name, n := range map[string]int{"web": 1, "local": 2} {
		for _, slice := range dualStackSlices(newExposed(name, n), webPort, ready(here), ready(there)) {
			c.api.setSlice(slice)
		}
	}
	late := newExposed("late", 3)
	c.api.addService(late)
	for _, slice := range dualStackSlices(late, webPort, ready(here), ready(there)) {
		c.api.addSlice(slice)
	}
}

// stale lists requests that are not answered, or by an endpoint that is gone.
func (c *takeOver) stale(node *lab.BridgeNode) []string {
	var asks []ask
	for i, name := range []string{"Cluster", "Local", "a later Service"} {
		n := i + 1
		for i, family := range []string{"IPv4", "IPv6"} {
			for from, host := range map[string]*lab.Namespace{"outside": c.Client, "a pod": c.callerOn(node).Namespace, "the node": node.Namespace} {
				if from != "outside" {
					asks = append(asks, ask{from + ", a cluster IP, " + name + ", " + family, host, at(clusterIPs(n)[i], 80)})
				}
				asks = append(asks,
					ask{from + ", a VIP, " + name + ", " + family, host, at(balancerIPs(n)[i], 80)},
					ask{from + ", a node port, " + name + ", " + family, host, at([]string{node.IPv4.String(), node.IPv6.String()}[i], uint16(30000+n))})
			}
		}
	}
	return filterEmpty(inParallel(16, asks, func(a ask) string {
		for range 3 {
			answer := a.from.DialWithin(2*time.Second, lab.TCP, a.address)
			if answer.Err != nil || !strings.HasPrefix(answer.Server, "new") {
				return fmt.Sprintf("%s: %s", a.name, answer)
			}
		}
		return ""
	}))
}

func filterEmpty(list []string) []string {
	return slices.DeleteFunc(list, func(s string) bool { return s == "" })
}

// TestReliabilityReconfigured restarts kube-ipvs with another configuration again and again.
// Every client keeps opening connections; all are answered, whatever the process claims VIPs
// by before and after, and established ones continue. The exception is a connection of the node
// that has the VIP as its source while the VIP ceases to be local on all ports: its replies leave
// the node (docs/concepts/vips.md).
func TestReliabilityReconfigured(t *testing.T) {
	c := newServed(t, "")
	node := c.takenOver()[0]
	claims := func(how string, more ...string) []string {
		return append([]string{"--claim-load-balancers", how, "--claim-external-ips", how}, more...)
	}
	steps := [][]string{
		claims("port"), claims("auto"), claims("port"), claims("address"), claims("port"), claims("route"), claims("address"), claims("auto"),
		claims("auto", "--claim-cluster-ips", "route"), claims("auto", "--masquerade-all"), claims("auto", "--local-mark", "off"), claims("auto"),
	}
	const toPort = 2 // steps at which a VIP ceases to be local on all ports
	asks := c.asks(node)
	for i, family := range []string{"IPv4", "IPv6"} {
		asks = append(asks,
			ask{"a pod, an external IP, " + family, c.callerOn(node).Namespace, at(externalIPs(1)[i], 80)},
			ask{"the node, an external IP, " + family, node.Namespace, at(externalIPs(1)[i], 80)},
			ask{"a pod, a VIP, Local, " + family, c.callerOn(node).Namespace, at(balancerIPs(2)[i], 80)})
	}
	for i, flags := range steps {
		name := strings.Join(flags, " ")
		if i > 0 {
			c.young[node].Stop()
		}
		t.Logf("%s: %s", time.Now().Format(clockTime), name)
		c.startBuild(node, lab.Program(), flags...)
		if i == 0 {
			for n, a := range asks {
				first := newPorts + reconfiguredPorts*uint16(n)
				c.clocks = append(c.clocks, clock{a.from.PortLoad(first, 100*time.Millisecond, stallLimit, lab.TCP, a.address), a.name})
			}
			c.hold(t, node)
		}
		c.intact(t, name)
	}
	ended := map[string]int{} // connections that ended as above, by the client's name
	c.answeredBut(t, func(of clock, a lab.Answer) bool {
		if a.Outcome() != lab.TimedOut || !slices.Contains(externalIPs(1), a.Local.Addr().String()) || ended[of.name] == toPort {
			return false
		}
		ended[of.name]++
		t.Logf("%s: its source ceased to be local: %s", of.name, a)
		return true
	})
}

// reconfiguredPorts is the number of source ports of each load.
const reconfiguredPorts = 1200
