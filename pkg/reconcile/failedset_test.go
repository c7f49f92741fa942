package reconcile

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// If the kernel lacks a set type, only the feature of that set is missing. The problem is
// reported once, for the node, and affects no Service. Members are added once the type is
// available.
func TestSetThatCannotBeCreated(t *testing.T) {
	for name, member := range map[plan.SetName]string{plan.LoopBack: "10.244.0.2,tcp:8000,10.244.0.2", plan.VIPAddresses: "10.96.0.1"} {
		t.Run(string(name), func(t *testing.T) {
			lost := "create set " + name.In(ip.IPv4)
			w := newWorld(t)
			w.refuse = func(change string) error {
				if strings.HasPrefix(change, lost+" ") || change == lost {
					return fmt.Errorf("no such type: %w", unix.EPROTO)
				}
				return nil
			}
			svc := clusterIP("a", "10.96.0.1", here)
			svc.Ports[0].Endpoints[0].Node = w.cfg.NodeName
			problems := w.start(svc)
			if len(problems) == 0 {
				t.Fatalf("nothing is refused: is %q a change? %q", lost, w.order)
			}
			for _, p := range problems {
				if len(p.Owners) > 0 {
					t.Errorf("the problem names a Service: %v", p.Err)
				}
			}
			if w.position("add address 10.96.0.1") < 0 || w.position("add virtual server TCP 10.96.0.1:80") < 0 {
				t.Errorf("the Service is not served:\n%s", strings.Join(w.order, "\n"))
			}
			w.refuse = nil
			w.reconciler.retry(nodeOwner.Name)
			if err := w.reconciler.Flush().Err(); err != nil {
				t.Fatal(err)
			}
			if n, err := w.observe(); err != nil || n > 0 {
				t.Errorf("%d differences, %v", n, err)
			}
			if members := w.IPSet.Dump(); !strings.Contains(members, "add "+name.In(ip.IPv4)+" "+member) {
				t.Errorf("members:\n%s", members)
			}
		})
	}
}

// A set whose creation failed may exist nevertheless: the answer of the kernel was lost, or
// another program created it. Once a resync finds the set, its members are added.
func TestFailedSetThatExists(t *testing.T) {
	name := plan.ClusterIP.In(ip.IPv4)
	w := newWorld(t)
	w.refuse = func(change string) error {
		if change == "create set "+name || strings.HasPrefix(change, "create set "+name+" ") {
			return unix.ENOMEM
		}
		return nil
	}
	w.start(clusterIP("a", "10.96.0.1", here))
	w.refuse = nil
	set := w.reconciler.node.sets[name]
	if failures := w.IPSet.Apply([]ipset.Change{{Op: ipset.CreateSet, Set: set}}); len(failures) > 0 {
		t.Fatal(failures)
	}
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	if members := w.IPSet.Dump(); !strings.Contains(members, "add "+name+" 10.96.0.1,tcp:80") {
		t.Errorf("members:\n%s", members)
	}
	if n, err := w.observe(); n != 0 || err != nil {
		t.Errorf("%d differences, %v", n, err)
	}
}
