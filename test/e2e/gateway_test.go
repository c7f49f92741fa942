//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// twoNICs is a node with a second interface, eth1, in another network, and without policy routes.
// The network's router and the hosts behind it reach the cluster only through eth1.
type twoNICs struct {
	*cluster
	node   *lab.BridgeNode
	router *lab.Fabric
	lan    *lab.Segment   // the network of eth1
	near   *lab.Namespace // in it
	far    *lab.Namespace // behind its router
	cells  []gatewayCell
}

// gatewayCell is a destination, and the endpoints that answer there.
type gatewayCell struct {
	name, ip string
	port     uint16
	servers  []string
}

func newTwoNICs(t *testing.T) *twoNICs {
	t.Helper()
	c := &twoNICs{cluster: newOfflineCluster(t)}
	c.node = c.Nodes[0]
	c.router = c.Lab.Fabric("router")
	c.lan = c.router.Segment("10.13.0.1/24", "fd00:13::1/64")
	c.lan.Attach(c.node.Namespace, "eth1", "10.13.0.5/24", "fd00:13::5/64")
	c.near = c.lan.Client("near", "10.13.0.9/24", "fd00:13::9/64")
	c.far = c.router.Segment("198.18.0.1/24", "fd00:198::1/64").Client("far", "198.18.0.9/24", "fd00:198::9/64")
	for _, host := range []*lab.Namespace{c.router.Namespace, c.near} {
		host.Route("203.0.113.0/24 via 10.13.0.5", "fd00:203:1::/64 via fd00:13::5", "fd00:203:3::/64 via fd00:13::5")
	}
	c.node.ReversePath("1")
	for _, svc := range []struct {
		name    string
		n       int
		servers []string
	}{{"web", 1, []string{"web1", "web2"}}, {"kept", 2, []string{"web1"}}} {
		add := func(name, ip string, port uint16) {
			c.cells = append(c.cells, gatewayCell{svc.name + ", " + name, ip, port, svc.servers})
		}
		for _, ip := range balancerIPs(svc.n) {
			add("load balancer IP", ip, 80)
		}
		for _, ip := range externalIPs(svc.n) {
			add("external IP", ip, 80)
		}
		for _, ip := range []string{"10.13.0.5", "fd00:13::5"} {
			add("node port", ip, uint16(30000+svc.n))
		}
	}
	return c
}

// start starts the proxy with the Services web and, under externalTrafficPolicy Local, kept.
func (c *twoNICs) start(t *testing.T, args ...string) *lab.Process {
	t.Helper()
	return c.startWith(t, nil, args...)
}

// startWith starts the proxy with more objects.
func (c *twoNICs) startWith(t *testing.T, more []runtime.Object, args ...string) *lab.Process {
	t.Helper()
	web, kept := newExposed("web", 1), newExposed("kept", 2)
	kept.Spec.ExternalTrafficPolicy, kept.Spec.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyLocal, 32002
	pods := []podEndpoint{ready(c.web1), ready(c.web2)}
	objects := slices.Concat(withSlices(web, pods...), withSlices(kept, pods...), more)
	return c.node.StartProxy(func(*lab.Process) error { return hasPassed(c.node.Node) }, append([]string{
		"--manifests", writeManifests(t, objects...), "--hostname-override", c.node.Name, "--cluster-cidr", podCIDRs, "--ipvs-min-sync-period", "0s",
	}, args...)...)
}

// TestBehaviourGateway checks that clients that enter by a second interface get their answers
// through it, once its gateway is configured: every kind of address, policy, protocol and family,
// under a strict reverse-path check.
func TestBehaviourGateway(t *testing.T) {
	c := newTwoNICs(t)
	proxy := c.start(t)
	for _, ip := range []string{"203.0.113.1", "10.13.0.5"} {
		port := map[bool]uint16{true: 80, false: 30001}[ip != "10.13.0.5"]
		if answer := c.far.DialWithin(briefly, lab.TCP, at(ip, port)); answer.Err == nil {
			t.Fatalf("without a gateway, %s answers a distant client: the test shows nothing", ip)
		}
	}
	proxy.Terminate()

	gateways := []string{"--reply-gateway", "eth1=10.13.0.1", "--reply-gateway", "eth1=fd00:13::1"}
	proxy = c.start(t, gateways...)
	c.checkCells(t, "with a gateway")
	c.checkOthers(t)
	open := c.openFar(t)

	c.node.Down("eth1")
	c.Eventually(syncLimit, "the policy rule goes with the interface", func() error { return c.hasRule(false) })
	c.node.Up("eth1")
	c.node.Exec("ip", "address", "replace", "fd00:13::5/64", "dev", "eth1", "nodad") // IPv6 addresses go with a link that is set down
	c.Eventually(syncLimit, "an answer after eth1 was down", func() error {
		if answer := c.far.DialWithin(briefly, lab.TCP, "203.0.113.1:80"); answer.Err != nil {
			return answer.Err
		}
		answer := c.far.DialWithin(briefly, lab.TCP, "[fd00:203:1::1]:80")
		return answer.Err
	})
	c.checkOpen(t, "after eth1 was down", open)

	c.node.Exec("ip", "route", "flush", "table", c.table(t))
	c.Eventually(syncLimit, "an answer after another program deleted the routes", func() error {
		answer := c.far.DialWithin(briefly, lab.TCP, "203.0.113.1:80")
		return answer.Err
	})

	proxy.Terminate()
	proxy = c.start(t, gateways...)
	c.checkOpen(t, "after a restart", open)
	if !testing.Short() {
		c.checkCells(t, "after a restart")
	}

	proxy.Terminate()
	proxy = c.start(t)
	if err := c.hasRule(false); err != nil {
		t.Errorf("after a restart without a gateway: %v", err)
	}
	if routes := c.node.Exec("ip", "route", "show", "table", "all", "proto", "81", "type", "unicast"); strings.TrimSpace(routes) != "" {
		t.Errorf("routes remain after a restart without a gateway:\n%s", routes)
	}
	proxy.Terminate()
	proxy = c.start(t, gateways...)
	proxy.Terminate()
	if code, out := c.node.RunProxy("--cleanup"); code != 0 {
		t.Fatalf("--cleanup: exit code %d:\n%s", code, out)
	}
	for _, family := range []string{"-4", "-6"} {
		if routes := c.node.Exec("ip", family, "route", "show", "table", "all", "proto", "81"); strings.TrimSpace(routes) != "" {
			t.Errorf("routes remain after --cleanup:\n%s", routes)
		}
	}
}

// checkCells asks each destination as often as it takes to meet every endpoint.
func (c *twoNICs) checkCells(t *testing.T, when string) {
	t.Helper()
	for name, client := range map[string]*lab.Namespace{"far": c.far, "near": c.near} {
		for _, cell := range c.cells {
			protocols := lab.Protocols
			if testing.Short() {
				protocols = []lab.Protocol{lab.TCP, lab.UDP}
			}
			for _, protocol := range protocols {
				met := map[string]bool{}
				for range 8 {
					answer := client.DialWithin(lab.DialTimeout, protocol, at(cell.ip, cell.port))
					if answer.Err != nil {
						t.Errorf("%s: %s > %s (%s), %s: %s", when, name, cell.name, cell.ip, protocol, answer)
						break
					}
					if local := len(cell.servers) == 1; local && answer.SeenSource != answer.Local {
						t.Errorf("%s: %s > %s (%s), %s: seen as %s", when, name, cell.name, cell.ip, protocol, answer.SeenSource)
					}
					if met[answer.Server] = true; len(met) == len(cell.servers) {
						break
					}
				}
				for _, server := range cell.servers {
					if !met[server] {
						t.Errorf("%s: %s > %s (%s), %s: %s never answered", when, name, cell.name, cell.ip, protocol, server)
					}
				}
			}
		}
	}
}

// checkOthers checks what the gateway does not concern: clients behind eth0, pods, and the node.
func (c *twoNICs) checkOthers(t *testing.T) {
	t.Helper()
	for name, client := range map[string]*lab.Namespace{"client": c.Client, "pod": c.caller1.Namespace, "node": c.node.Namespace} {
		for _, target := range []string{at(balancerIPs(1)[0], 80), at(balancerIPs(1)[1], 80), at(c.node.IPv4.String(), 30001)} {
			for range 2 {
				if answer := client.Dial(lab.TCP, target); answer.Err != nil {
					t.Errorf("%s > %s: %s", name, target, answer)
				}
			}
		}
	}
}

// openFar opens connections of the distant client to both endpoints.
func (c *twoNICs) openFar(t *testing.T) []*lab.Connection {
	t.Helper()
	var open []*lab.Connection
	for range 4 {
		connection, err := c.far.Connect(lab.DialTimeout, lab.TCP, "203.0.113.1:80")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(connection.Close)
		if answer := connection.Ask(lab.DialTimeout); answer.Err != nil {
			t.Fatalf("a new connection: %s", answer)
		}
		open = append(open, connection)
	}
	return open
}

func (c *twoNICs) checkOpen(t *testing.T, when string, open []*lab.Connection) {
	t.Helper()
	for _, connection := range open {
		if answer := connection.Ask(lab.DialTimeout); answer.Err != nil {
			t.Errorf("an open connection of the distant client, %s: %s", when, answer)
		}
	}
}

// hasRule returns an error if there is no policy rule for eth1, or if there should be none.
func (c *twoNICs) hasRule(want bool) error {
	rules := c.node.Exec("ip", "rule", "show", "proto", "81", "pref", "480")
	if has := strings.Contains(rules, "lookup 80"); has != want {
		return fmt.Errorf("policy rules:\n%s", rules)
	}
	return nil
}

// table returns the number of the routing table of eth1.
func (c *twoNICs) table(t *testing.T) string {
	t.Helper()
	route := c.node.Exec("ip", "route", "show", "table", "all", "proto", "81", "exact", netip.PrefixFrom(netip.IPv4Unspecified(), 0).String())
	_, rest, ok := strings.Cut(route, "table ")
	if !ok {
		t.Fatal(errors.New("no default route of ours: " + route))
	}
	return strings.Fields(rest)[0]
}
