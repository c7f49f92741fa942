package reconcile

import (
	"fmt"
	"net/netip"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// TestParametersOfANewInterface creates an interface again under its name, with the kernel's
// initial parameters, before anything is compared.
func TestParametersOfANewInterface(t *testing.T) {
	const key = "net/ipv4/conf/eth0/src_valid_mark"
	w := newWorld(t)
	w.cfg.VIPs.LoadBalancers = plan.ClaimAuto
	link := routing.Link{Index: 2, Name: "eth0", Type: "device", Up: true, Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("192.0.2.1/24"), Global: true}}}
	w.Sysctl.Set(key, "0")
	become := func(index int) {
		link.Index = index
		w.reconciler.SetNode(plan.Node{Inventory: routing.Inventory{Links: []routing.Link{link}}}, 0)
		if err := w.reconciler.Flush().Err(); err != nil {
			t.Fatal(err)
		}
		if got := w.Sysctl.Values()[key]; got != "1" {
			t.Errorf("interface %d: %s is %q, want 1", index, key, got)
		}
	}
	w.start(loadBalancer("a", "10.96.0.1", vip, "10.244.0.2:8000"))
	become(2)
	writes := w.Sysctl.Writes()
	become(2)
	if w.Sysctl.Writes() != writes {
		t.Error("parameters of the same interface are written again")
	}
	w.Sysctl.Set(key, "0")
	become(3)
}

// TestDeletedLinkIsAddedByTheRetry: when another program has deleted the link, and with it all VIPs,
// the first retry of all Services adds it again, without a comparison.
func TestDeletedLinkIsAddedByTheRetry(t *testing.T) {
	w := newWorld(t)
	services := make([]service.Service, 50)
	var names []types.NamespacedName
	var removed []routing.Removal
	for i := range services {
		address := fmt.Sprintf("10.96.0.%d", i+1)
		services[i] = clusterIP(fmt.Sprintf("s%d", i), address, "10.244.0.2:8000")
		names = append(names, services[i].Name)
		removed = append(removed, routing.Removal{Addr: netip.MustParseAddr(address)})
	}
	if err := w.start(services...).Err(); err != nil {
		t.Fatal(err)
	}
	w.Routing.Do(routing.Change{Op: routing.DeleteLink})
	w.reconciler.vips.noteRemoved(removed)
	if problems := w.reconciler.Flush(); len(problems) == 0 {
		t.Fatal("the refusal was not seen")
	}
	w.reconciler.retry(names...)
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Error(err)
	}
	if is, err := w.Routing.Observe(); err != nil || len(is.Addresses) != len(services) {
		t.Errorf("%d addresses (%v), want %d", len(is.Addresses), err, len(services))
	}
}

// TestWrittenWhileObserved changes the node's state while the kernel is read, and back before
// anything is compared: what was read is older than the second change.
func TestWrittenWhileObserved(t *testing.T) {
	w := newWorld(t)
	w.start()
	set := func(priority int) {
		n := plan.ForNode(&w.cfg, &plan.Node{})
		n.Rules = []routing.Rule{{Family: ip.IPv4, Priority: priority, Mark: 1, Mask: 1, Table: 7}}
		w.reconciler.setNode(n)
	}
	set(100)
	w.reconciler.Flush()
	seen, err := w.reconciler.beginObserve(everything)()
	if err != nil {
		t.Fatal(err)
	}
	set(200)
	w.reconciler.Flush()
	w.reconciler.need = extent{}
	d := w.reconciler.beginResync(seen)
	set(100)
	w.reconciler.Flush()
	for d.step() {
	}
	d.end()
	if !w.reconciler.need.routing || !w.reconciler.need.rules {
		t.Fatalf("the next comparison reads %+v", w.reconciler.need)
	}
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	is, err := w.Routing.Observe()
	if err != nil || len(is.Rules) != 1 {
		t.Errorf("policy rules: %v (%v), want one", is.Rules, err)
	}
}
