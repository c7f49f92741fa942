package reconcile

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// ofIPVSMode is some of what kube-proxy writes over our rules.
const ofIPVSMode = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-I INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-I OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
COMMIT
`

// cleanup runs Cleanup as a separate process would.
func (w *world) cleanup() (*Reconciler, error) {
	w.restart()
	_, err := w.cleaner().cleanup()
	return w.reconciler, err
}

func (w *world) restore(family ip.Family, text string) {
	w.t.Helper()
	if err := w.NAT[family].Restore(text); err != nil {
		w.t.Fatal(err)
	}
}

// check requires some texts in the kernel, and forbids others.
func (w *world) check(kept, gone []string) {
	w.t.Helper()
	state := w.kernel()
	for _, text := range kept {
		if !strings.Contains(state, text) {
			w.t.Errorf("there is no %q any more in\n%s", text, state)
		}
	}
	for _, text := range gone {
		if strings.Contains(state, text) {
			w.t.Errorf("there is still %q in\n%s", text, state)
		}
	}
}

// TestCleanupBesideIPVSMode keeps what kube-proxy has taken over in IPv4, and deletes
// everything of IPv6.
func TestCleanupBesideIPVSMode(t *testing.T) {
	w := newWorld(t)
	if err := w.start(externalLocal("a", ip.TCP, vip, here), clusterIP("b", "fd00::b", "[fd00::2]:8000")).Err(); err != nil {
		t.Fatal(err)
	}
	w.restore(ip.IPv4, ofIPVSMode)
	w.IPVS.SetConnections(fwm(first), netip.MustParseAddrPort(here), ipvs.Connections{Inactive: 1})
	a, err := w.cleanup()
	if err == nil || !strings.Contains(err.Error(), "FWM 0xb IPv4") || !strings.Contains(err.Error(), "TCP 203.0.113.5:80") || !(&cleaner{a}).kubeProxyActive() {
		t.Errorf("given back %v, and: %v", (&cleaner{a}).kubeProxyActive(), err)
	}
	kept := []string{
		"-t 10.96.0.1:80", "-t 203.0.113.5:80", "link true", "10.96.0.1", "KUBE-CLUSTER-IP ", "KUBE-IPVS-IPS ",
		":KUBE-SERVICES", `-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
		":KUBE-IPVS-OUT-FILTER", "kubernetes health check rules",
	}
	gone := []string{
		"fd00::b", "KUBE-6-CLUSTER-IP ", "KUBE-IPVS-CLAIM", "KUBE-IPVS-OUTSIDE", "KUBE-IPVS-ACCEPT", "KUBE-IPVS-INSIDE",
		"kubernetes health check service ports", "KUBE-IPVS-PORT-IPS ", "rule 99",
	}
	w.check(append(kept, "-f 11", "KUBE-IPVS-LOCAL "), gone)

	w.IPVS.SetConnections(fwm(first), netip.MustParseAddrPort(here), ipvs.Connections{})
	if _, err := w.cleanup(); err != nil {
		t.Errorf("when the connection has ended: %v", err)
	}
	w.check(kept, append(gone, "-f 11", "KUBE-IPVS-LOCAL "))
}

// emptiedByIptablesMode are chains of ours whose rules kube-proxy replaces.
const emptiedByIptablesMode = "*nat\n:KUBE-POSTROUTING - [0:0]\n:KUBE-MARK-MASQ - [0:0]\nCOMMIT\n*filter\n:KUBE-FORWARD - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\nCOMMIT\n"

// TestCleanupBesideIptablesMode keeps kube-proxy's rules, and nothing of IPVS.
func TestCleanupBesideIptablesMode(t *testing.T) {
	w := newWorld(t)
	if err := w.start(externalLocal("a", ip.TCP, vip, here)).Err(); err != nil {
		t.Fatal(err)
	}
	w.restore(ip.IPv4, ofIptablesMode+emptiedByIptablesMode)
	if a, err := w.cleanup(); err != nil || !(&cleaner{a}).kubeProxyActive() {
		t.Errorf("given back %v, and: %v", (&cleaner{a}).kubeProxyActive(), err)
	}
	w.check(
		[]string{":KUBE-SEP-", ":KUBE-NODEPORTS", ":KUBE-PROXY-CANARY", "-A PREROUTING -m comment", "-A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES", ":KUBE-MARK-MASQ", ":KUBE-FORWARD"},
		[]string{"-t 10.96.0.1:80", "-f 11", "link true", "KUBE-IPVS-", "KUBE-CLUSTER-IP ", ":KUBE-LOAD-BALANCER", ":KUBE-NODE-PORT "})
}

// TestCleanupKeepsSources keeps a VIP local that connections of the node's processes have as their
// source, for as long as they last, if a kube-proxy serves that does not keep VIPs local.
func TestCleanupKeepsSources(t *testing.T) {
	for _, claim := range []plan.ClaimMode{plan.ClaimAddress, plan.ClaimRoute} {
		w := newWorld(t)
		w.cfg.VIPs.ClusterIPs = claim
		node := netip.MustParseAddr("192.168.0.11")
		inventory, err := w.Routing.Inventory()
		if err != nil {
			t.Fatal(err)
		}
		inventory.Links = append(inventory.Links, routing.Link{Index: 2, Name: "eth0", Up: true, Addresses: []routing.Address{{Prefix: netip.PrefixFrom(node, 24), Global: true}}})
		inventory.Defaults = []routing.Route{{Family: ip.IPv4, Table: routing.TableMain, Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: "eth0"}}
		w.Routing.SetInventory(inventory)
		if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"), clusterIP("b", "10.96.0.2", "10.244.0.2:8000")).Err(); err != nil {
			t.Fatal(err)
		}
		w.Routing.SetSources(map[netip.Addr]int{netip.MustParseAddr("10.96.0.1"): 2, node: 3})
		w.restore(ip.IPv4, ofIptablesMode+emptiedByIptablesMode)
		reads := 0
		w.Routing.FailObserve = func() error {
			if reads++; reads > 1 {
				return unix.EIO // of Sources, after Observe
			}
			return nil
		}
		if _, err := w.cleanup(); !errors.Is(err, unix.EIO) {
			t.Errorf("%s, the sources cannot be read: %v", claim, err)
		}
		w.Routing.FailObserve = nil
		w.check([]string{"10.96.0.1", "10.96.0.2"}, nil)
		if _, err := w.cleanup(); err == nil || err.Error() != "2 connections of this node have the source 10.96.0.1, which stays local: clean up again once they have ended" {
			t.Errorf("%s: %v", claim, err)
		}
		w.check([]string{"local route 10.96.0.1/32 dev lo"}, []string{"link true", "10.96.0.2", "-t 10.96.0.1:80"})
		w.Routing.SetSources(nil)
		if _, err := w.cleanup(); err != nil {
			t.Errorf("%s, when they have ended: %v", claim, err)
		}
		w.check(nil, []string{"local route"})
	}
}

// TestCleanupKeepsAddressOfSource keeps the address of such a VIP if the kernel refuses the route.
func TestCleanupKeepsAddressOfSource(t *testing.T) {
	for claim, kept := range map[plan.ClaimMode]string{plan.ClaimAddress: "addresses [10.96.0.1]", plan.ClaimRoute: "local route 10.96.0.1/32 dev lo"} {
		w := newWorld(t)
		w.cfg.VIPs.ClusterIPs = claim
		if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"), clusterIP("b", "10.96.0.2", "10.244.0.2:8000")).Err(); err != nil {
			t.Fatal(err)
		}
		w.Routing.SetSources(map[netip.Addr]int{netip.MustParseAddr("10.96.0.1"): 2})
		w.restore(ip.IPv4, ofIptablesMode+emptiedByIptablesMode)
		w.refuse = func(change string) error {
			if strings.HasPrefix(change, "add ") && strings.Contains(change, "route 10.96.0.1") {
				return unix.ENOMEM
			}
			return nil
		}
		if _, err := w.cleanup(); !errors.Is(err, unix.ENOMEM) {
			t.Errorf("%s, the route is refused: %v", claim, err)
		}
		w.check([]string{kept}, []string{"10.96.0.2", "-t 10.96.0.1:80"})
		w.refuse = nil
		w.Routing.SetSources(nil)
		if _, err := w.cleanup(); err != nil {
			t.Errorf("%s, when they have ended: %v", claim, err)
		}
		w.check(nil, []string{"link true", "local route"})
	}
}

// TestNotTakenOver: kube-proxy writes the rules of one family after the other. Only rules are
// read: this is repeated each second.
func TestNotTakenOver(t *testing.T) {
	w := newWorld(t)
	check := func(when string, want ...ip.Family) {
		t.Helper()
		w.restart()
		w.IPVS.FailObserve = func() error { return errors.New("virtual servers were read") }
		defer func() { w.IPVS.FailObserve = nil }()
		if got, err := w.cleaner().notTakenOver(); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v and %v, want %v", when, got, err, want)
		}
	}
	check("without rules")
	if err := w.start(externalLocal("a", ip.TCP, vip, here), clusterIP("b", "fd00::b", "[fd00::2]:8000")).Err(); err != nil {
		t.Fatal(err)
	}
	check("without kube-proxy", ip.IPv4, ip.IPv6)
	w.restore(ip.IPv4, ofIptablesMode)
	check("kube-proxy has written IPv4", ip.IPv6)
	w.restore(ip.IPv6, ofIptablesMode)
	check("kube-proxy has written both")
}

// TestCleanupBesideNFTablesMode keeps kube-proxy's tables once no rules of ours serve beside
// them.
func TestCleanupBesideNFTablesMode(t *testing.T) {
	for _, c := range []struct {
		name string
		then func(*world)
		left int
	}{
		{"kube-proxy has emptied IPVS, and taken away the rules", func(w *world) {
			if _, err := w.cleanup(); err != nil {
				w.t.Fatal(err)
			}
		}, 2},
		{"kube-proxy was to be taken over from", func(*world) {}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.start(clusterIP("a", "10.96.0.1", here))
			c.then(w)
			tables := nft.NewFakeKubeProxy(ip.Families...)
			w.restart()
			w.reconciler.kernel.KubeProxy = tables
			if _, err := w.cleaner().cleanup(); err != nil || w.cleaner().kubeProxyActive() != (c.left > 0) {
				t.Errorf("given back %v, and: %v", w.cleaner().kubeProxyActive(), err)
			}
			if left, _ := tables.Observe(); len(left) != c.left {
				t.Errorf("left: %v", left)
			}
		})
	}
}
