package reconcile

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
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
