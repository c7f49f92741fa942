//go:build e2e

package conformance

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// side is one of the two programs, on a node of its own. The nodes are in separate labs
// and have the same interfaces and addresses.
type side struct {
	name    string
	node    *lab.Node
	program *lab.Process
	http    *http.Client
	ipvs    *ipvs.Handle // opened at the first read, when the kernel has IPVS
}

func newSide(t testing.TB, name string) *side {
	l := lab.New(t)
	fabric := l.Fabric("fabric")
	fabric.Uplink()
	segment := fabric.Segment("192.168.50.1/24", "fd00:50::1/64")
	node := l.Node(name)
	// Each link-local address would add an address to every node port, and make each pass
	// of kube-proxy slower.
	node.Sysctl("net.ipv6.conf.default.addr_gen_mode", "1")
	segment.Attach(node.Namespace, "eth0", NodeIPv4+"/24", NodeIPv6+"/64")
	segment.DefaultRoute(node.Namespace, "eth0")
	node.Bridge("cni0", "10.244.1.1/24", "fd00:244:1::1/64")
	return &side{name: name, node: node, http: clientIn(node.Namespace)}
}

// clientIn returns a client in a network namespace.
func clientIn(n *lab.Namespace) *http.Client {
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = n.Do(func() error {
			conn, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
	return &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: dial}}
}

const podCIDRs = "10.244.0.0/16,fd00:244::/32"

// kubeProxyRests is how long kube-proxy waits after a pass. Each pass costs the same,
// whatever has changed. During the wait the test reads both kernels and writes the next
// step, so that kube-proxy needs one pass for the step and not two.
const kubeProxyRests = 3 * time.Second

func (s *side) startKubeProxy() {
	s.program = s.node.StartProgram(running, lab.Peer("kube-proxy"),
		"--proxy-mode", "ipvs", "--kubeconfig", lab.Kubeconfig(), "--hostname-override", NodeName,
		"--cluster-cidr", podCIDRs, "--ipvs-min-sync-period", kubeProxyRests.String(),
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
		"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s")
}

func (s *side) startKubeIPVS(program string) {
	s.program = s.node.StartProgram(running, program, "--kubeconfig", lab.Kubeconfig(), "--hostname-override", NodeName,
		"--cluster-cidr", podCIDRs, "--ipvs-min-sync-period", "0s")
}

// demandInternal lets kube-ipvs write the rules for internal clients of externalTrafficPolicy
// Local from the beginning, as if one had connected before. No packet is sent in these tests,
// and until the first connection internal clients get what kube-proxy gives them.
func (s *side) demandInternal() {
	s.node.Exec("ipset", "add", "-exist", "KUBE-IPVS-DEMAND-INTERNAL", NodeIPv4)
	s.node.Exec("ipset", "add", "-exist", "KUBE-6-IPVS-DEMAND-INTERNAL", NodeIPv6)
}

func (s *side) stop() { s.program.Stop() }

func running(*lab.Process) error { return nil }

// passed waits for the first pass of each family.
func (s *side) passed() error {
	return eventually(s.name+" has passed", func() error {
		_, err := s.passes()
		return err
	})
}

var lastPass = regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds(?:\{ip_family="(IPv[46])"\})? (\S+)$`)

// families are kube-proxy's names of the families.
var families = []string{"IPv4", "IPv6"}

// passes returns the times at which the last complete pass of each family ended.
func (s *side) passes() (map[string]time.Time, error) {
	out, err := s.metrics()
	if err != nil {
		return nil, err
	}
	if draining.Match(out) {
		return nil, fmt.Errorf("real servers are draining")
	}
	times := map[string]time.Time{}
	for _, found := range lastPass.FindAllSubmatch(out, -1) {
		match := []string{string(found[0]), string(found[1]), string(found[2])}
		seconds, err := strconv.ParseFloat(match[2], 64)
		if err != nil {
			return nil, err
		}
		of := []string{match[1]}
		if match[1] == "" {
			of = families // one pass of kube-ipvs serves both
		}
		for _, family := range of {
			times[family] = time.Unix(0, int64(seconds*float64(time.Second)))
		}
	}
	for _, family := range families {
		if times[family].Before(time.Unix(1, 0)) {
			return nil, fmt.Errorf("no pass for %s so far", family)
		}
	}
	return times, nil
}

func (s *side) metrics() ([]byte, error) {
	response, err := s.http.Get("http://127.0.0.1:10249/metrics")
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return io.ReadAll(response.Body)
}

// syncLimit is the maximum time until a change is in the kernel of a busy emulated node.
const syncLimit = 5 * time.Minute

// await waits until the kernel has exactly the given state of the marker, and then for
// the end of the pass that wrote it: a pass that ended after the last moment at which the
// state was missing. Then everything that was written before the marker is in the kernel.
// Each family has its own passes, and the next one of a family may be long in coming.
func (s *side) await(want marker, port uint16, written time.Time) error {
	absent := map[string]time.Time{}
	for _, family := range families {
		absent[family] = written
	}
	err := eventually(s.name+" has the marker", func() error {
		now := time.Now()
		got, err := s.marker(port)
		if err != nil {
			return err
		}
		for _, family := range families {
			if !maps.EqualFunc(got[family], want[family], maps.Equal) {
				absent[family] = now
				err = fmt.Errorf("it has %v, want %v", got, want)
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	return eventually(s.name+" has ended its pass", func() error {
		ended, err := s.passes()
		for family, at := range ended {
			if at.Before(absent[family]) {
				return fmt.Errorf("the last pass for %s ended at %s, and the marker came after %s", family, at, absent[family])
			}
		}
		return err
	})
}

// draining matches kube-ipvs's metric while a real server drains. kube-ipvs checks
// connections from time to time; kube-proxy checks at once.
var draining = regexp.MustCompile(`(?m)^kube_ipvs_draining_real_servers [^0]`)

// eventually repeats check until it returns nil. There is no event to wait for, and each
// check takes CPU time from the programs under test.
func eventually(what string, check func() error) error {
	deadline := time.Now().Add(syncLimit)
	for pause := 100 * time.Millisecond; ; pause = min(pause*3/2, time.Second) {
		err := check()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: not within %s: %w", what, syncLimit, err)
		}
		time.Sleep(pause)
	}
}

// marker is the kernel's state of the marker: for each family its virtual servers with
// their real servers.
type marker map[string]map[endpoint]map[netip.AddrPort]bool

func (m marker) add(key endpoint, to netip.AddrPort) {
	family := families[0]
	if key.at.Addr().Is6() {
		family = families[1]
	}
	if m[family] == nil {
		m[family] = map[endpoint]map[netip.AddrPort]bool{}
	}
	if m[family][key] == nil {
		m[family][key] = map[netip.AddrPort]bool{}
	}
	m[family][key][to] = true
}

// marker reads the marker's state with the given port and with the previous one. It is
// called often, so it reads only these, directly from the kernel.
func (s *side) marker(port uint16) (marker, error) {
	if err := s.openIPVS(); err != nil {
		return nil, err
	}
	got := marker{}
	for _, a := range markerIPs {
		for _, at := range []netip.AddrPort{netip.AddrPortFrom(a, port), netip.AddrPortFrom(a, port-1)} {
			destinations, err := s.ipvs.GetDestinations(serviceAt(at))
			if err != nil {
				return nil, err
			}
			for _, d := range destinations {
				if to, ok := netip.AddrFromSlice(d.Address); ok {
					got.add(endpoint{"UDP", at}, netip.AddrPortFrom(to, d.Port))
				}
			}
		}
	}
	return got, nil
}

func serviceAt(at netip.AddrPort) *ipvs.Service {
	s := &ipvs.Service{AddressFamily: unix.AF_INET, Protocol: unix.IPPROTO_UDP, Address: at.Addr().AsSlice(), Port: at.Port()}
	if at.Addr().Is6() {
		s.AddressFamily = unix.AF_INET6
	}
	return s
}

func (s *side) openIPVS() error {
	if s.ipvs != nil {
		return nil
	}
	return s.node.Do(func() (err error) {
		s.ipvs, err = ipvs.New("")
		return err
	})
}

// read reads the kernel's state.
func (s *side) read() (*Kernel, error) {
	out, err := s.node.TryExec("sh", "-c", StateCommand)
	if err != nil {
		return nil, err
	}
	k, err := ParseKernel(out)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	return k, s.node.Do(func() error {
		kernel, err := trace.Read()
		if err != nil {
			return err
		}
		for i, family := range ip.Families {
			if k.nodes[i], err = kernel.Node(family); err != nil {
				return err
			}
		}
		return nil
	})
}
