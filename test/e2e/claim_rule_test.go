//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourClaimRuleDeleted deletes the policy rules of VIPs that are claimed by port, as
// systemd-networkd does when it starts, while connections are in use: of a pod, the node and an
// external client. They continue.
func TestBehaviourClaimRuleDeleted(t *testing.T) {
	c := newOfflineCluster(t)
	node := c.Nodes[0]
	objects := withSlices(newExposed("web", 1), ready(c.web1), ready(c.web2))
	node.StartProxy(func(*lab.Process) error { return hasPassed(node.Node) },
		"--manifests", writeManifests(t, objects...), "--hostname-override", node.Name, "--cluster-cidr", podCIDRs,
		"--claim-load-balancers", "port", "--ipvs-sync-period", "1h")
	open := map[string]*lab.Connection{}
	for name, host := range map[string]*lab.Namespace{"a pod": c.caller1.Namespace, "the node": node.Namespace, "an external client": c.Client} {
		for _, vip := range balancerIPs(1) {
			for i := range 2 { // to both endpoints
				connection, err := host.Connect(lab.DialTimeout, lab.TCP, at(vip, 80))
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				t.Cleanup(connection.Close)
				open[fmt.Sprintf("%s to %s, %d", name, vip, i)] = connection
			}
		}
	}
	for range 10 {
		done := make(chan struct{})
		failures := make(chan string, len(open))
		for name, connection := range open {
			go func() {
				answer := connection.Ask(lab.DialTimeout)
				for ended := false; answer.Err == nil && !ended; answer = connection.Ask(lab.DialTimeout) {
					select {
					case <-done:
						ended = true
					default:
					}
				}
				if answer.Err != nil {
					failures <- fmt.Sprintf("%s: %s", name, answer)
					return
				}
				failures <- ""
			}()
		}
		for _, family := range []string{"-4", "-6"} {
			node.Exec("ip", family, "rule", "delete", "pref", "98")
		}
		c.Eventually(5*time.Second, "the rules are back", func() error {
			rules := node.Exec("ip", "-4", "rule", "show", "pref", "98") + node.Exec("ip", "-6", "rule", "show", "pref", "98")
			if strings.Count(rules, "lookup") != 2 {
				return errors.New(rules)
			}
			return nil
		})
		close(done)
		failed := false
		for range open {
			if failure := <-failures; failure != "" {
				t.Error(failure)
				failed = true
			}
		}
		if failed {
			return
		}
	}
}
