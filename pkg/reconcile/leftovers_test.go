package reconcile

import (
	"errors"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// addLeftovers adds the other iptables back end to the world, with rules in IPv4.
func (w *world) addLeftovers(rules string) *nat.Fake {
	w.t.Helper()
	other := nat.NewFake(ip.IPv4)
	if err := other.Restore(rules); err != nil {
		w.t.Fatal(err)
	}
	w.reconciler.kernel.Leftovers = Leftovers{NAT: map[ip.Family]NAT{ip.IPv4: other}, Programs: "iptables-legacy"}
	return other
}

// Rules that kube-proxy left in the other back end serve until every Service is programmed,
// and are deleted then. Foreign rules stay.
func TestLeftoversInOtherBackEnd(t *testing.T) {
	for name, rules := range map[string]string{"iptables mode": ofIptablesMode, "IPVS mode": ofIPVSMode} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			other := w.addLeftovers("*nat\n:CNI - [0:0]\n-A PREROUTING -j CNI\nCOMMIT\n" + rules)
			other.Refuse = func(c nat.Change) error { w.order = append(w.order, "leftover "+c.String()); return nil }
			if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000")).Err(); err != nil {
				t.Fatal(err)
			}
			if left := other.Save(); strings.Contains(strings.ReplaceAll(left, "KUBE-KUBELET-CANARY", ""), "KUBE-") || !strings.Contains(left, "-A PREROUTING -j CNI") {
				t.Errorf("left:\n%s", left)
			}
			if vip, gone := w.position("add address 10.96.0.1"), w.position("leftover delete chain"); vip < 0 || gone < vip {
				t.Errorf("the VIP came as change %d, the leftovers went with change %d", vip, gone)
			}
			if n, err := w.observe(); err != nil || n != 0 {
				t.Errorf("%d differences afterwards, %v", n, err)
			}
			if err := other.Restore(rules); err != nil {
				t.Fatal(err)
			}
			if n, err := w.observe(); err != nil || n == 0 {
				t.Errorf("%d differences when they are back, %v", n, err)
			}
			if err := w.reconciler.Flush().Err(); err != nil || strings.Contains(other.Save(), "KUBE-SERVICES") {
				t.Errorf("%v; left:\n%s", err, other.Save())
			}
		})
	}
}

// If our rules were refused, kube-proxy's stay in the other back end until ours are written.
func TestLeftoversWaitForRules(t *testing.T) {
	w := newWorld(t)
	other := w.addLeftovers(ofIptablesMode)
	w.refuse = func(change string) error {
		if strings.HasPrefix(change, "write chain IPv4 nat/") {
			return errors.New("no")
		}
		return nil
	}
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	if left := other.Save(); !strings.Contains(left, "KUBE-SEP-") {
		t.Errorf("without our rules, left:\n%s", left)
	}
	w.refuse = nil
	if err := w.reconciler.Flush().Err(); err != nil || strings.Contains(other.Save(), "KUBE-SEP-") {
		t.Errorf("tried again: %v; left:\n%s", err, other.Save())
	}
}

// A dry run lists the leftovers among what it would change, and deletes none.
func TestDryRunKeepsLeftovers(t *testing.T) {
	w := newWorld(t)
	other := w.addLeftovers(ofIptablesMode)
	before, listed := other.Save(), 0
	w.reconciler.kernel = w.reconciler.kernel.DryRun(func(part, operation, change string) {
		if part == "iptables" && operation == nat.DeleteChain.String() {
			listed++
		}
	})
	if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000")).Err(); err != nil {
		t.Fatal(err)
	}
	if other.Save() != before || len(w.order) > 0 || listed == 0 {
		t.Errorf("%d deleted chains are listed; written %q; left of\n%s\n%s", listed, w.order, before, other.Save())
	}
}

// Unreadable leftovers are reported and prevent nothing else.
func TestUnreadableLeftovers(t *testing.T) {
	w := newWorld(t)
	other := w.addLeftovers(ofIptablesMode)
	other.FailObserve = func() error { return errors.New("not today") }
	if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000")).Err(); err != nil {
		t.Fatal(err)
	}
	if unseen := w.reconciler.unseen(); len(unseen) != 1 || !strings.Contains(unseen[0], "iptables-legacy") || !strings.Contains(unseen[0], "not today") {
		t.Errorf("unseen: %q", unseen)
	}
	if _, err := w.cleaner().cleanup(); err == nil || !strings.Contains(err.Error(), "not today") {
		t.Errorf("cleanup: %v", err)
	}
}

// A kube-proxy that serves with the other back end by now keeps its rules there.
func TestCleanupBesideOtherBackEnd(t *testing.T) {
	w := newWorld(t)
	if err := w.start(clusterIP("a", "10.96.0.1", here)).Err(); err != nil {
		t.Fatal(err)
	}
	w.restart()
	other := w.addLeftovers(ofIptablesMode + "*nat\n:KUBE-IPVS-OLD - [0:0]\nCOMMIT\n")
	if _, err := w.cleaner().cleanup(); err != nil || !w.cleaner().kubeProxyActive() {
		t.Errorf("given back: %v, %v", w.cleaner().kubeProxyActive(), err)
	}
	if left := other.Save(); !strings.Contains(left, "KUBE-SEP-") || strings.Contains(left, "KUBE-IPVS-OLD") {
		t.Errorf("left:\n%s", left)
	}
	w.check(nil, []string{"KUBE-"})
}

// A family that is not served, because its programs are missing, is not changed.
func TestUnservedFamilyIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	if err := w.start(loadBalancer("a", "fd00::b", "2001:db8::1", "[fd00::2]:8000")).Err(); err != nil {
		t.Fatal(err)
	}
	mentions := func() int {
		return strings.Count(w.kernel(), "fd00::b") + strings.Count(w.kernel(), "2001:db8::1") + strings.Count(w.kernel(), "rule 99")
	}
	before := mentions()
	w.cfg.Families = []ip.Family{ip.IPv4}
	w.restart()
	delete(w.reconciler.kernel.NAT, ip.IPv6)
	if err := w.start().Err(); err != nil {
		t.Fatal(err)
	}
	if after := mentions(); after != before {
		t.Errorf("%d mentions of IPv6, want %d in\n%s", after, before, w.kernel())
	}
}
