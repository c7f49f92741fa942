//go:build e2e

package bench

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// What a node does besides serving changes: pods start and end, other programs write rules
// and virtual servers, the conntrack table is full, and one Service has thousands of
// endpoints.

// TestCounted counts the instructions that a node's process executes, and writes a page to $LAB_OUT.
// It needs a guest whose clock counts instructions (the lab's flag -icount).
func TestCounted(t *testing.T) {
	b := newBench(t)
	sizes := numbers(t, "BENCH_SIZES")
	describe(b.results, sizes, nil)
	b.eachSize(func(t *testing.T, n int) {
		s := *byRoute
		s.args = append(slices.Clone(s.args), "--profiling")
		r := b.begin(t, &s, n)
		floors(t, r.Results, n, false)
		floor, _ := r.Get(Kernel, Floor, n)
		r.Put(FloorCounted, Floor, n, 1000*floor)
		r.counting = true
		r.seldom("1h")
		r.counted(StartCounted, func() { r.coldStart() })
		r.rolling()
		r.compare()
		r.podStarts(20)
		r.manyEndpoints(20)
		r.seldom("30s")
		r.counted(RestartCounted, func() { r.restart() })
		r.idle(0) // waits for the first comparison
		r.profiled(fmt.Sprintf("counted-idle-%d.prof", n), func() { r.idle(idleTime) })
		r.emptied()
		r.fullConntrack(5) // last, because the entries stay
		r.log(Counted...)
		b.results.Fact("ended", now())
		keep(t, "counted.md", b.results.CountedPage(CountedTargets(slices.Max(sizes))))
	})
}

// counted counts the instructions of a process from its start to the end of a function.
func (r *run) counted(m Measure, start func()) {
	start()
	r.count(m, milliseconds(cpu(r.t, r.process.PID())))
}

// podStarts measures the CPU time that the start of one pod costs.
func (r *run) podStarts(count int) {
	r.t.Helper()
	r.settled()
	before := cpu(r.t, r.process.PID())
	for i := range count {
		r.must(r.addPod(i))
		time.Sleep(time.Second) // the program reads the network once for several changes within that
	}
	r.settled()
	r.put(PodStart, milliseconds(cpu(r.t, r.process.PID())-before)/float64(count))
	for i := range count {
		r.must(r.removePod(i))
	}
	r.settled()
}

func (r *run) must(err error) {
	r.t.Helper()
	must(r.t, err)
}

func podLink(i int) string { return fmt.Sprintf("churn%d", i) }

// addPod does what a CNI plugin does on the node: a veth pair with a route to the pod.
func (r *run) addPod(i int) error {
	return r.node.Do(func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: podLink(i), Flags: unix.IFF_UP}, PeerName: fmt.Sprintf("inner%d", i)}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		link, err := netlink.LinkByName(podLink(i))
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		pod := netlink.NewIPNet(netip.AddrFrom4([4]byte{10, 254, 7, byte(1 + i)}).AsSlice())
		return netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: pod, Scope: netlink.SCOPE_LINK})
	})
}

func (r *run) removePod(i int) error {
	return r.node.Do(func() error {
		link, err := netlink.LinkByName(podLink(i))
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	})
}

// The Service of many endpoints, in slices of a hundred as their controller writes them.
const manyEndpoints, perSlice = 5000, 100

var manyIP = netip.MustParseAddr("10.96.0.40")

func manySlice(n, version int) *discoveryv1.EndpointSlice {
	s := newSlice(0, 0)
	s.Name, s.Labels = fmt.Sprintf("many-%d", n), map[string]string{discoveryv1.LabelServiceName: "many"}
	s.Endpoints = nil
	for i := range perSlice {
		address := numbered(netip.MustParseAddr("10.240.0.0"), 256*n+2*i)
		if i == 0 {
			address = numbered(address, 200+version%50)
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{address.String()}})
	}
	return s
}

// manyEndpoints measures the CPU time of a change of one endpoint of a Service with thousands.
// It deletes the Service in the end.
func (r *run) manyEndpoints(count int) {
	r.t.Helper()
	tp := openTap(r.t, r.node.Namespace)
	defer tp.close()
	api, ctx := r.api, r.t.Context()
	svc := newService(0)
	svc.Name, svc.Spec.ClusterIP, svc.Spec.ClusterIPs = "many", manyIP.String(), []string{manyIP.String()}
	_, err := api.client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, svc, metav1.CreateOptions{})
	r.must(err)
	slicesOfMany := api.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	api.parallel(0, manyEndpoints/perSlice, func(ctx context.Context, n int) error {
		_, err := slicesOfMany.Create(ctx, manySlice(n, 0), metav1.CreateOptions{})
		return err
	})
	if !tp.await(r.limit, func(t tally) bool { return t.Writes[newReal] >= manyEndpoints }) {
		r.t.Fatalf("%s has not programmed a Service of %d endpoints", r.subject.name, manyEndpoints)
	}
	r.settled()
	before := cpu(r.t, r.process.PID())
	for i := range count {
		slice := manySlice(i, i+1)
		address := netip.MustParseAddr(slice.Endpoints[0].Addresses[0])
		tp.forget()
		tp.expect(address, true)
		_, err := slicesOfMany.Update(ctx, slice, metav1.UpdateOptions{})
		r.must(err)
		if _, ok := tp.met(r.limit); !ok {
			r.t.Fatalf("%s has not programmed %s", r.subject.name, address)
		}
	}
	r.put(ManyEndpoints, milliseconds(cpu(r.t, r.process.PID())-before)/float64(count))
	r.must(api.client.CoreV1().Services(metav1.NamespaceDefault).Delete(ctx, svc.Name, metav1.DeleteOptions{}))
	for n := range manyEndpoints / perSlice {
		r.must(slicesOfMany.Delete(ctx, manySlice(n, 0).Name, metav1.DeleteOptions{}))
	}
	r.undrained()
}

// disturbed measures single changes while pods start and end, and while the whole state and
// the rules are compared again and again.
func (r *run) disturbed(samples int) {
	r.t.Helper()
	ctx, stop := context.WithCancel(r.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.disturb(ctx) }()
	count, _ := r.compared()
	took, _ := r.oneByOne(samples)
	stop()
	if err := <-ended; err != nil {
		r.t.Fatal(err)
	}
	if after, _ := r.compared(); after == count {
		r.t.Fatal("nothing was compared meanwhile")
	}
	r.put(OneDisturbed, Percentile(took, 0.999))
}

// disturb lets a pod start and another one end every second, and triggers a comparison of
// everything every 10 s.
func (r *run) disturb(ctx context.Context) error {
	const alive = 10
	for i := 0; ctx.Err() == nil; i++ {
		if err := r.addPod(i % 200); err != nil {
			return err
		}
		if i >= alive {
			if err := r.removePod((i - alive) % 200); err != nil {
				return err
			}
		}
		if i%10 == 0 {
			r.foreign++
			if _, err := r.node.TryExec("ipvsadm", "-A", "-t", fmt.Sprintf("192.0.2.1:%d", r.foreign), "-s", "rr"); err != nil {
				return err
			}
			for _, args := range [][]string{{"-I", "FORWARD", "-d", "192.0.2.1"}, {"-D", "FORWARD", "-d", "192.0.2.1"}} {
				if _, err := r.node.TryExec("iptables", append([]string{"-w"}, args...)...); err != nil {
					return err
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	return nil
}

// trackedFlows is the number of conntrack entries beside which a UDP endpoint changes.
const trackedFlows = 262144

// fullConntrack measures the CPU time of a change of a UDP endpoint, whose flows are to be
// deleted, beside many entries of other flows.
func (r *run) fullConntrack(count int) {
	r.t.Helper()
	r.must(os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_max", []byte(fmt.Sprint(2*trackedFlows)), 0o644))
	r.must(r.node.Do(trackFlows))
	r.settled()
	tp := openTap(r.t, r.node.Namespace)
	defer tp.close()
	var used []float64
	for i := range count {
		before := cpu(r.t, r.process.PID())
		r.moveDNS(tp, numbered(dnsEndpoint, 1+i%2))
		used = append(used, milliseconds(cpu(r.t, r.process.PID())-before))
	}
	r.moveDNS(tp, dnsEndpoint) // where the next run expects it
	r.put(FullConntrack, Percentile(used, 0.5))
}

// moveDNS changes the endpoint of the DNS Service. It returns when the new one is programmed and
// the proxy is idle.
func (r *run) moveDNS(tp *tap, address netip.Addr) {
	r.t.Helper()
	slicesOfDNS := r.api.client.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem)
	slice, err := slicesOfDNS.Get(r.t.Context(), "kube-dns-1", metav1.GetOptions{})
	r.must(err)
	slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{address.String()}}}
	tp.forget()
	tp.expect(address, true)
	_, err = slicesOfDNS.Update(r.t.Context(), slice, metav1.UpdateOptions{})
	r.must(err)
	if _, ok := tp.met(r.limit); !ok {
		r.t.Fatalf("%s has not programmed %s", r.subject.name, address)
	}
	r.settled()
}

// trackFlows fills the conntrack table with UDP flows to other addresses.
func trackFlows() error {
	handle, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer handle.Close()
	for i := range trackedFlows {
		client, server := netip.AddrFrom4([4]byte{10, 255, byte(i >> 16), 9}), netip.AddrFrom4([4]byte{198, 51, 100, byte(i)})
		port := uint16(i)
		flow := &netlink.ConntrackFlow{
			FamilyType: unix.AF_INET, TimeOut: 3600,
			Forward: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: client.AsSlice(), SrcPort: port, DstIP: server.AsSlice(), DstPort: 53},
			Reverse: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: server.AsSlice(), SrcPort: 53, DstIP: client.AsSlice(), DstPort: port},
		}
		if err := handle.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, flow); err != nil {
			return fmt.Errorf("flow %d: %w", i, err)
		}
	}
	return nil
}
