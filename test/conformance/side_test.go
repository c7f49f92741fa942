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

func (s *side) startKubeProxy() error {
	s.program = s.node.StartProgram(running, lab.Peer("kube-proxy"),
		"--proxy-mode", "ipvs", "--kubeconfig", lab.Kubeconfig(), "--hostname-override", NodeName,
		"--cluster-cidr", podCIDRs, "--ipvs-min-sync-period", "0s",
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
		"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s")
	return s.passed(2)
}

func (s *side) startKubeIPVS(program string) error {
	s.program = s.node.StartProgram(running, program, "--kubeconfig", lab.Kubeconfig(), "--hostname-override", NodeName,
		"--cluster-cidr", podCIDRs, "--ipvs-min-sync-period", "0s")
	return s.passed(1)
}

func (s *side) stop() { s.program.Stop() }

func running(*lab.Process) error { return nil }

// passed waits for the first pass of each family; of ours one serves both.
func (s *side) passed(passes int) error {
	return eventually(s.name+" has passed", func() error {
		times, err := s.passes()
		if err == nil && len(times) < passes {
			err = fmt.Errorf("%d passes so far", len(times))
		}
		return err
	})
}

var lastPass = regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds(?:\{.*\})? (\S+)$`)

// passes are the times at which the last complete pass of each family ended.
func (s *side) passes() ([]time.Time, error) {
	out, err := s.node.TryExec("curl", "-s", "--max-time", "10", "http://127.0.0.1:10249/metrics")
	if err != nil {
		return nil, err
	}
	if draining.MatchString(out) {
		return nil, fmt.Errorf("real servers are draining")
	}
	var times []time.Time
	for _, match := range lastPass.FindAllStringSubmatch(out, -1) {
		seconds, err := strconv.ParseFloat(match[1], 64)
		if err != nil {
			return nil, err
		}
		if seconds > 0 {
			times = append(times, time.Unix(0, int64(seconds*float64(time.Second))))
		}
	}
	return times, nil
}

// syncLimit is how long a change may take to be in the kernel of an emulated
// node that is busy.
const syncLimit = 5 * time.Minute

// await waits until a state of the marker is all that the kernel has of it,
// in both families, and then for the end of the passes that brought it: they
// ended after the last moment, absent at first, at which it was not there yet.
// What was written before the marker is in the kernel then.
func (s *side) await(marker marker, absent time.Time) error {
	err := eventually(s.name+" has the marker", func() error {
		now := time.Now()
		err := s.hasMarker(marker)
		if err != nil {
			absent = now
		}
		return err
	})
	if err != nil {
		return err
	}
	return eventually(s.name+" has ended its pass", func() error {
		times, err := s.passes()
		for _, at := range times {
			if at.Before(absent) {
				return fmt.Errorf("the last pass ended at %s, and the marker came after %s", at, absent)
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

// marker is what a kernel has of the marker: its virtual servers with their real
// servers.
type marker map[endpoint]map[netip.AddrPort]bool

func (m marker) add(key endpoint, to netip.AddrPort) {
	if m[key] == nil {
		m[key] = map[netip.AddrPort]bool{}
	}
	m[key][to] = true
}

// hasMarker tells what is missing. Real servers that drain do not count, nor
// virtual servers that have no others: kube-ipvs deletes both later on.
func (s *side) hasMarker(want marker) error {
	k, err := ParseKernel("### ipvsadm -Sn\n" + s.node.Exec("ipvsadm", "-Sn"))
	if err != nil {
		return err
	}
	got := marker{}
	for key, vs := range k.virtualServers {
		if !isMarker(key.at.Addr()) {
			continue
		}
		for to, options := range vs.realServers {
			if active(options) {
				got.add(key, to)
			}
		}
	}
	if !maps.EqualFunc(got, want, maps.Equal) {
		return fmt.Errorf("it has %v, want %v", got, want)
	}
	return nil
}

// read reads the kernel's state.
func (s *side) read() (*Kernel, error) {
	k, err := ParseKernel(s.node.Exec("sh", "-c", StateCommand))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	return k, nil
}
