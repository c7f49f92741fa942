package reconcile

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// ofIptablesMode is what kube-proxy writes for a Service in iptables mode, beside the
// kubelet's chain and another program's rule.
const ofIptablesMode = `*mangle
:KUBE-PROXY-CANARY - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-SVC-NPX46M4PTMTKRN6Y - [0:0]
:KUBE-SEP-IO5XOSKPAXIFQXAJ - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -j RETURN
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-NPX46M4PTMTKRN6Y
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-NPX46M4PTMTKRN6Y -j KUBE-SEP-IO5XOSKPAXIFQXAJ
-A KUBE-SEP-IO5XOSKPAXIFQXAJ -p tcp -m tcp -j DNAT --to-destination 10.244.0.2:8000
COMMIT
*filter
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES
COMMIT
`

// Until a Service's virtual servers exist, only kube-proxy's rules lead to
// its endpoints.
func TestTakeOverFromIptablesMode(t *testing.T) {
	w := newWorld(t)
	if err := w.NAT[ip.IPv4].Restore(ofIptablesMode); err != nil {
		t.Fatal(err)
	}
	if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000")).Err(); err != nil {
		t.Fatal(err)
	}
	vip, replaced := w.position("add address 10.96.0.1"), w.position("write chain IPv4 nat/KUBE-SERVICES")
	if vip < 0 || replaced < vip {
		t.Errorf("the VIP came as change %d, the rules were replaced by change %d of\n%s", vip, replaced, strings.Join(w.order, "\n"))
	}
	rules := w.NAT[ip.IPv4].Save()
	for _, gone := range []string{"KUBE-SVC-", "KUBE-SEP-", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-CANARY", "-A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES"} {
		if strings.Contains(rules, gone) {
			t.Errorf("there is still %s in\n%s", gone, rules)
		}
	}
	for _, kept := range []string{"KUBE-KUBELET-CANARY", "-A PREROUTING -j RETURN"} {
		if !strings.Contains(rules, kept) {
			t.Errorf("there is no %s any more in\n%s", kept, rules)
		}
	}
}

// In IPVS mode kube-proxy's sets of node ports differ from ours: until ours are filled, only
// kube-proxy's rules masquerade.
func TestTakeOverFromIPVSMode(t *testing.T) {
	w := newWorld(t)
	const rules = "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODE-PORT - [0:0]\n-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT\nCOMMIT\n"
	if err := w.NAT[ip.IPv6].Restore(rules); err != nil {
		t.Fatal(err)
	}
	if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000")).Err(); err != nil {
		t.Fatal(err)
	}
	member, replaced := w.position("to set KUBE-CLUSTER-IP"), w.position("write chain IPv6 nat/KUBE-SERVICES")
	if member < 0 || replaced < member {
		t.Errorf("the member came as change %d, the rules were replaced by change %d", member, replaced)
	}
	// The rules that direct external clients to node-local endpoints are needed as soon as
	// an address has all endpoints.
	if mangle := w.position("mangle/KUBE-IPVS-"); mangle < 0 || mangle > member {
		t.Errorf("the member came as change %d, table mangle was written by change %d of\n%s", member, mangle, strings.Join(w.order, "\n"))
	}
}

// TestUnreadableNFTablesMode: an nft that fails keeps no Service from being served, and tables of
// kube-proxy are deleted once it works.
func TestUnreadableNFTablesMode(t *testing.T) {
	w := newWorld(t)
	tables := nft.NewFakeKubeProxy(ip.Families...)
	tables.FailObserve = func() error { return errors.New("nft: a library is missing") }
	w.reconciler.kernel.KubeProxy = tables
	if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000")).Err(); err != nil {
		t.Error(err)
	}
	if len(w.realServers(key(ip.TCP, "10.96.0.1:80"))) != 1 {
		t.Error("the Service is not served")
	}
	if unseen := strings.Join(w.reconciler.unseen(), "\n"); !strings.Contains(unseen, "a library is missing") {
		t.Errorf("not reported: %q", unseen)
	}
	tables.FailObserve = nil
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	if left, err := tables.Observe(); err != nil || len(left) > 0 {
		t.Errorf("tables %v are left (%v)", left, err)
	}
}

func TestTakeOverFromNFTablesMode(t *testing.T) {
	w := newWorld(t)
	tables := nft.NewFakeKubeProxy(ip.Families...)
	tables.Refuse = func(c nft.KubeProxyChange) error {
		if w.position("add address 10.96.0.1") < 0 {
			t.Errorf("%s, before the Service is served", c)
		}
		if c.Family == ip.IPv6 {
			return errors.New("no")
		}
		return nil
	}
	w.reconciler.kernel.KubeProxy = tables
	problems := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	if len(problems) != 1 || !strings.Contains(problems[0].Err.Error(), "IPv6") {
		t.Errorf("%v", problems)
	}
	tables.Refuse = nil
	if problems := w.reconciler.Flush(); len(problems) > 0 {
		t.Errorf("tried again: %v", problems)
	}
	if left, _ := tables.Observe(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// The kernel translates packets of established connections only while some table of the family
// has nat chains. If ours were refused, kube-proxy's stay.
func TestTakeOverFromNFTablesModeWaitsForRules(t *testing.T) {
	w := newWorld(t)
	tables := nft.NewFakeKubeProxy(ip.Families...)
	w.reconciler.kernel.KubeProxy = tables
	w.refuse = func(change string) error {
		if strings.HasPrefix(change, "write chain IPv4 nat/") {
			return errors.New("no")
		}
		return nil
	}
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	if left, _ := tables.Observe(); !left[ip.IPv4] || left[ip.IPv6] {
		t.Errorf("without our rules for IPv4, left: %v", left)
	}
	w.refuse = nil
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Errorf("tried again: %v", err)
	}
	if left, _ := tables.Observe(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Under externalTrafficPolicy Local an address gets all endpoints only once external clients
// are directed elsewhere.
func TestMarkedServersComeFirst(t *testing.T) {
	for range 10 { // the work is in a map, in random order
		w := newWorld(t)
		s := loadBalancer("a", "10.96.0.1", "203.0.113.5", "10.244.0.2:8000", "10.244.1.2:8000")
		s.ExternalLocal = true
		s.Ports[0].Endpoints[0].Node = w.reconciler.cfg.NodeName
		if err := w.start(s).Err(); err != nil {
			t.Fatal(err)
		}
		marked, address := w.position("FWM "), w.position("TCP 203.0.113.5:80")
		if marked < 0 || address < marked {
			t.Fatalf("the marked one came as change %d, the address's as %d of\n%s", marked, address, strings.Join(w.order, "\n"))
		}
	}
}

// The process is killed at any write of a change of externalTrafficPolicy from Local to Cluster,
// between the rules of two tables too, and started again: an external IP gets no endpoint of
// another node before its clients are masqueraded.
func TestCrashWhileSetsComeIntoUse(t *testing.T) {
	for writes, more := 0, true; more; writes++ {
		w := newWorld(t)
		w.cfg.VIPs.ExternalIPs, w.cfg.LocalMark = plan.ClaimAddress, plan.LocalMark{}
		s := externalLocal("a", ip.TCP, vip, here)
		s.LoadBalancers, s.ExternalIPs = nil, s.LoadBalancers
		w.startAs(s)
		w.order, more = nil, false
		w.refuse = func(string) error {
			if len(w.order) < writes {
				return nil
			}
			more = true
			return unix.EIO
		}
		w.set(cluster(s))
		w.reconciler.SetNode(plan.Node{}, 0)
		w.reconciler.Flush()
		w.refuse = func(change string) error {
			if strings.HasSuffix(change, "of TCP "+vip+":80") && strings.Contains(change, "weight 1 of real server 10.244.9.9") || strings.HasPrefix(change, "add real server 10.244.9.9:8000 to TCP "+vip) {
				if !strings.Contains(w.NAT[ip.IPv4].Save(), `--match-set KUBE-EXTERNAL-IP dst,dst -m comment --comment "external IPs" -j KUBE-MARK-MASQ`) {
					t.Errorf("killed after %d writes: no rule masquerades at %q", writes, change)
				}
			}
			return nil
		}
		w.startAs(cluster(s))
	}
}

// Rules of another version or of kube-proxy do not match the sets of the first Service of a kind.
// Before our rules are written, its virtual servers must not exist, and an address under
// externalTrafficPolicy Local must not get endpoints of other nodes.
func TestTakeOverWaitsForRules(t *testing.T) {
	before := loadBalancer("a", "10.96.0.1", vip, here)
	before.ExternalLocal, before.Ports[0].Endpoints[0].Node = true, "node1"
	after := loadBalancer("a", "10.96.0.1", vip, here, "10.244.9.9:8000")
	first := clusterIP("b", "10.96.0.2", "10.244.9.9:8000")
	first.ExternalIPs = []netip.Addr{netip.MustParseAddr("198.51.100.7")}

	w := newWorld(t)
	if err := w.start(before).Err(); err != nil {
		t.Fatal(err)
	}
	rules := strings.ReplaceAll(w.NAT[ip.IPv4].Save(), "-j KUBE-MARK-MASQ", `-m comment --comment "of another version" -j KUBE-MARK-MASQ`)
	w.NAT[ip.IPv4] = nat.NewFake(ip.IPv4)
	if err := w.NAT[ip.IPv4].Restore(rules); err != nil {
		t.Fatal(err)
	}
	w.order = nil
	w.NAT[ip.IPv4].Refuse = func(c nat.Change) error { return w.asked(c.String()) }
	w.startAs(after, first)
	replaced := w.position("write chain IPv4 nat/KUBE-SERVICES")
	for _, change := range []string{"add virtual server TCP 198.51.100.7:80", "add real server 10.244.9.9:8000 to TCP " + vip + ":80"} {
		if at := w.position(change); replaced < 0 || at < replaced {
			t.Errorf("change %d is %q, change %d replaces the rules, in\n%s", at, change, replaced, strings.Join(w.order, "\n"))
		}
	}
}
