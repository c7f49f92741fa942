package proxy

import (
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// While the API server does not deliver the Services, for example because the role does not
// allow to list EndpointSlices, the rules of another version or configuration serve alone. New
// rules of one table beside old ones of the others would give packets marks that no rule reads.
func TestOldRulesServeUntilServicesAreKnown(t *testing.T) {
	var o Options
	run(t, func(options *Options) { o = *options }, func(w *world) {
		w.externalLocal("a", "203.0.113.1")
		w.synced()
		w.sleep(time.Minute)
	})
	rules := func() string {
		return o.Kernel.NAT[ip.IPv4].(*nat.Fake).Save() + o.Kernel.NAT[ip.IPv6].(*nat.Fake).Save()
	}
	before := rules()
	run(t, func(options *Options) { options.Kernel, options.Config.LocalMark.Value = o.Kernel, 0x8 }, func(w *world) {
		w.sink.Begun()
		w.sleep(10 * time.Minute)
		if got := rules(); got != before {
			t.Errorf("rules before the Services are known:\n%s\nwant\n%s", got, before)
		}
		w.externalLocal("a", "203.0.113.1")
		w.synced()
		w.sleep(time.Minute)
		if rules() == before {
			t.Error("the new rules are not written")
		}
	})
}
