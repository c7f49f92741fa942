//go:build e2e

package conformance

import (
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// side is one of both programs on a node of its own. The nodes are in labs of
// their own, and have the same interfaces and addresses.
type side struct {
	name    string
	node    *lab.Node
	program *lab.Process
}

func newSide(t testing.TB, name string) *side {
	l := lab.New(t)
	fabric := l.Fabric("fabric")
	fabric.Uplink()
	segment := fabric.Segment("192.168.50.1/24", "fd00:50::1/64")
	node := l.Node(name)
	segment.Attach(node.Namespace, "eth0", NodeIPv4+"/24", NodeIPv6+"/64")
	segment.DefaultRoute(node.Namespace, "eth0")
	node.Bridge("cni0", "10.244.1.1/24", "fd00:244:1::1/64")
	return &side{name: name, node: node}
}

const podCIDRs = "10.244.0.0/16,fd00:244::/32"

func (s *side) startKubeProxy() {
	s.program = s.node.StartProgram(running, lab.Peer("kube-proxy"),
		"--proxy-mode", "ipvs", "--kubeconfig", lab.Kubeconfig(), "--hostname-override", NodeName,
		"--cluster-cidr", podCIDRs, "--ipvs-min-sync-period", "0s",
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
		"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s")
}

func (s *side) startKubeIPVS(program string) {
	s.program = s.node.StartProgram(running, program, "--kubeconfig", lab.Kubeconfig(), "--hostname-override", NodeName,
		"--cluster-cidr", podCIDRs, "--ipvs-min-sync-period", "0s")
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

// families are kube-proxy's names for them.
var families = []string{"IPv4", "IPv6"}

// passes are the times at which the last complete pass of each family ended.
func (s *side) passes() (map[string]time.Time, error) {
	out, err := s.node.TryExec("curl", "-s", "--max-time", "10", "http://127.0.0.1:10249/metrics")
	if err != nil {
		return nil, err
	}
	if draining.MatchString(out) {
		return nil, fmt.Errorf("real servers are draining")
	}
	times := map[string]time.Time{}
	for _, match := range lastPass.FindAllStringSubmatch(out, -1) {
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

// syncLimit is how long a change may take to be in the kernel of an emulated
// node that is busy.
const syncLimit = 5 * time.Minute

// await waits until a state of the marker, written at a time, is all that the
// kernel has of it, and then for the end of the pass that brought it: that ended
// after the last moment at which it was not there yet. What was written before
// the marker is in the kernel then. Each family has its own passes, of which
// there may be no other for a long time.
func (s *side) await(want marker, written time.Time) error {
	absent := map[string]time.Time{}
	for _, family := range families {
		absent[family] = written
	}
	err := eventually(s.name+" has the marker", func() error {
		now := time.Now()
		got, err := s.marker()
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

// draining is how kube-ipvs says that no real server waits for the end of
// connections: it looks from time to time. kube-proxy looks at once, too.
var draining = regexp.MustCompile(`(?m)^kube_ipvs_draining_real_servers [^0]`)

// eventually asks again until check returns nil. What it asks for has no event
// that could be waited for.
func eventually(what string, check func() error) error {
	deadline := time.Now().Add(syncLimit)
	for {
		err := check()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: not within %s: %w", what, syncLimit, err)
		}
		time.Sleep(250 * time.Millisecond)
	}
}

// marker is what a kernel has of the marker: of each family its virtual servers
// with their real servers.
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

// marker reads it. Real servers that drain do not count, nor virtual servers that
// have no others: kube-ipvs deletes both later on.
func (s *side) marker() (marker, error) {
	k, err := ParseKernel("### ipvsadm -Sn\n" + s.node.Exec("ipvsadm", "-Sn"))
	if err != nil {
		return nil, err
	}
	got := marker{}
	for key, vs := range k.virtualServers {
		for to, options := range vs.realServers {
			if isMarker(key.at.Addr()) && active(options) {
				got.add(key, to)
			}
		}
	}
	return got, nil
}

// read reads the kernel's state.
func (s *side) read() (*Kernel, error) {
	k, err := ParseKernel(s.node.Exec("sh", "-c", StateCommand))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	return k, nil
}
