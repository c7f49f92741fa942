//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestLabAnswers tests the lab's servers and clients: every protocol, both families,
// through the router, and the ways in which a request can fail.
func TestLabAnswers(t *testing.T) {
	l := lab.New(t)
	fabric := l.Fabric("fabric")
	client := fabric.Segment("10.1.0.1/24", "fd00:1::1/64").Client("client", "10.1.0.9/24", "fd00:1::9/64")
	server := fabric.Segment("10.2.0.1/24", "fd00:2::1/64").Client("server", "10.2.0.9/24", "fd00:2::9/64")
	for _, protocol := range lab.Protocols {
		server.Serve("server", protocol, 8000)
		for address, source := range map[string]string{"10.2.0.9:8000": "10.1.0.9", "[fd00:2::9]:8000": "fd00:1::9"} {
			answer := client.Dial(protocol, address)
			if answer.Server != "server" || answer.SeenSource.Addr().String() != source {
				t.Errorf("%s %s: %s (%v)", protocol, address, answer, answer.Err)
			}
		}
		if answer := client.Dial(protocol, "10.2.0.9:8001"); answer.Outcome() != lab.Refused {
			t.Errorf("%s to a closed port: %s", protocol, answer)
		}
	}
	if answer := client.DialWithin(time.Second, lab.TCP, "10.2.0.77:8000"); answer.Err == nil {
		t.Errorf("an address without a host: %s", answer)
	}
	tally := client.Load(2, lab.TCP, "10.2.0.9:8000").Stop()
	if tally.Outcomes[lab.OK] < 2 || len(tally.Failures) > 0 {
		t.Errorf("load: %+v", tally)
	}
}

// TestLabSCTP tests the lab's SCTP: a client reacts to a refusal, and a server survives
// signals that the runtime sends to its threads.
func TestLabSCTP(t *testing.T) {
	l := lab.New(t)
	host := l.Namespace("host")
	host.Serve("server", lab.SCTP, 8000)
	for _, iptables := range []string{"iptables", "ip6tables"} {
		host.Exec(iptables, "-w", "-A", "INPUT", "-p", "sctp", "--dport", "8001", "-j", "REJECT")
	}
	for _, address := range []string{"127.0.0.1:8001", "[::1]:8001"} {
		if answer := host.DialWithin(lostAfter, lab.SCTP, address); answer.Outcome() != lab.Refused {
			t.Errorf("%s: %s, want it refused", address, answer)
		}
	}
	done := make(chan struct{})
	defer close(done)
	go signalOften(done)
	for range 200 {
		if answer := host.DialWithin(lostAfter, lab.SCTP, "127.0.0.1:8000"); answer.Err != nil {
			t.Fatalf("while signals come: %s", answer)
		}
	}
}

// signalOften sends this process the signal by which Go's runtime preempts threads, until
// done.
func signalOften(done chan struct{}) {
	for {
		select {
		case <-done:
			return
		default:
			// It cannot fail for the own process.
			_ = unix.Kill(os.Getpid(), unix.SIGURG)
		}
	}
}

// TestLabFabricDropsSpoofedSources checks that a fabric that checks sources lets
// an interface use the addresses that it owns, and no others.
func TestLabFabricDropsSpoofedSources(t *testing.T) {
	l := lab.New(t)
	fabric := l.Fabric("fabric")
	left, right := fabric.Segment("10.1.0.1/24"), fabric.Segment("10.2.0.1/24")
	right.Client("server", "10.2.0.9/24").Serve("server", lab.TCP, 8000)
	host := l.Namespace("host")
	port := left.Attach(host, "eth0", "10.1.0.9/24")
	left.DefaultRoute(host, "eth0")
	fabric.CheckSources()

	if answer := host.Dial(lab.TCP, "10.2.0.9:8000"); answer.Err != nil {
		t.Fatalf("with its own address: %s", answer)
	}
	if dropped := port.Spoofed(); dropped != 0 {
		t.Errorf("%d packets with the right source were dropped", dropped)
	}
	host.Address("lo", "10.1.0.66/32")
	host.Route("10.2.0.9 via 10.1.0.1 src 10.1.0.66")
	if answer := host.DialWithin(time.Second, lab.TCP, "10.2.0.9:8000"); answer.Outcome() != lab.TimedOut {
		t.Errorf("with another's address: %s", answer)
	}
	if port.Spoofed() == 0 {
		t.Error("no packet was counted as spoofed")
	}
	port.Own("10.1.0.66")
	if answer := host.Dial(lab.TCP, "10.2.0.9:8000"); answer.Err != nil {
		t.Errorf("with an address that it was given: %s", answer)
	}
}

// TestLabENIClusterUnderKubeProxy reproduces the original problem: under kube-proxy's
// rules a pod that connects to the LoadBalancer IP times out. The request leaves by the
// pods' interface with the other interface's address. The reply enters by that other
// interface, where the reverse-path check drops it.
func TestLabENIClusterUnderKubeProxy(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{})
	lab.KubeProxyRules(c.Node, c.VIP, c.Endpoints...)
	onNode := c.Node.Watch(lab.TCP, c.Endpoints...)

	answer := c.Pod.Dial(lab.TCP, c.VIP)
	if answer.Outcome() != lab.TimedOut {
		t.Errorf("the pod's request: %s, want a time-out", answer)
	}
	path := onNode.Path()
	if path.RequestOut != "eth1" || path.RequestSource != c.NodeAddress || path.ReplyIn != "eth0" {
		t.Errorf("path %+v, want out by eth1 as %s, back by eth0", path, c.NodeAddress)
	}
	if path.ReplyOut != "" {
		t.Errorf("the reply was delivered by %s", path.ReplyOut)
	}
	t.Log(onNode)

	// The set-up works without the Service: the pod reaches a backend.
	if answer := c.Pod.Dial(lab.TCP, c.Endpoints[0]); answer.Server != "backend1" {
		t.Errorf("the pod's direct request: %s", answer)
	}
}

// TestLabENIClusterChecked does the same on a fabric that checks sources, which drops the
// request.
func TestLabENIClusterChecked(t *testing.T) {
	for _, options := range []lab.ENIOptions{{CheckSources: true}, {CheckSources: true, IPv6: true}} {
		c := lab.NewENICluster(t, options)
		lab.KubeProxyRules(c.Node, c.VIP, c.Endpoints...)
		if answer := c.Pod.Dial(lab.TCP, c.VIP); answer.Outcome() != lab.TimedOut {
			t.Errorf("%+v: the pod's request: %s, want a time-out", options, answer)
		}
		if c.Eth1.Spoofed() == 0 {
			t.Errorf("%+v: no packet was dropped for its source", options)
		}
	}
}

// TestLabThreeNodes checks that pods, nodes and the client of the ordinary
// cluster reach each other, with their own addresses.
func TestLabThreeNodes(t *testing.T) {
	c := lab.NewThreeNodes(t)
	from, to := c.Nodes[0].AddPod("from"), c.Nodes[1].AddPod("to")
	to.Serve("to", lab.TCP, 8000)
	for _, address := range []string{"10.244.2.2:8000", "[fd00:244:2::2]:8000"} {
		for _, host := range []*lab.Namespace{from.Namespace, c.Nodes[1].Namespace, c.Nodes[2].Namespace, c.Client} {
			answer := host.Dial(lab.TCP, address)
			if answer.Server != "to" || answer.SeenSource != answer.Local {
				t.Errorf("%s from %s: %s (%v)", address, host.Name, answer, answer.Err)
			}
		}
	}
}

// TestLabUplink checks that a host behind the fabric reaches the API server.
func TestLabUplink(t *testing.T) {
	if lab.Kubeconfig() == "" {
		t.Fatal("no API server: run the lab with -apiserver")
	}
	c := lab.NewThreeNodes(t)
	server := lab.APIServer(t)
	out := c.Nodes[0].Exec("curl", "-sk", "--max-time", "20", "-o", "/dev/null", "-w", "%{http_code}", server+"/readyz")
	if out != "200" && out != "401" {
		t.Errorf("%s answered %s", server, out)
	}
}

// TestLabSteersFlows sends the first two datagrams of each flow from two processors at the same
// time. The lab's network has both processed in order, so that IPVS creates one connection.
func TestLabSteersFlows(t *testing.T) {
	const flows = 300
	l := lab.New(t)
	node := l.Fabric("node")
	client := node.Segment("10.1.0.1/24").Client("client", "10.1.0.9/24")
	node.Segment("10.2.0.1/24").Client("servers", "10.2.0.8/24", "10.2.0.9/24")
	node.Exec("ipvsadm", "-A", "-u", "10.1.0.1:80", "-s", "rr")
	for _, server := range []string{"10.2.0.8:8000", "10.2.0.9:8000"} {
		node.Exec("ipvsadm", "-a", "-u", "10.1.0.1:80", "-r", server, "-m")
	}
	client.DialWithin(time.Second, lab.UDP, "10.2.0.8:9") // neighbors are resolved
	var arrived atomic.Int64
	var senders sync.WaitGroup
	for processor := range 2 {
		senders.Go(func() {
			err := client.Do(func() error {
				return sendFirsts(processor%runtime.NumCPU(), flows, func(flow int) {
					arrived.Add(1)
					for arrived.Load() < int64(2*(flow+1)) { // no other wait is short enough
						runtime.Gosched()
					}
				})
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	senders.Wait()
	connections := func() int { return strings.Count(node.Exec("ipvsadm", "-Lnc"), "10.1.0.1:80") }
	lab.Eventually(t, syncLimit, "each flow has a connection", func() error {
		if n := connections(); n < flows {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	if n := connections(); n != flows {
		t.Errorf("%d connections of %d flows", n, flows)
	}
}

// sendFirsts sends a datagram of each flow, on one processor, after together has returned.
func sendFirsts(processor, flows int, together func(flow int)) error {
	var only, before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return err
	}
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	only.Set(processor)
	if err := unix.SchedSetaffinity(0, &only); err != nil {
		return err
	}
	for flow := range flows {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 20000 + flow}); err != nil {
			return err
		}
		together(flow)
		if err := unix.Sendto(fd, []byte("who are you?\n"), 0, &unix.SockaddrInet4{Port: 80, Addr: [4]byte{10, 1, 0, 1}}); err != nil {
			return err
		}
	}
	return nil
}
