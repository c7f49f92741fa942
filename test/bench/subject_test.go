//go:build e2e

package bench

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// subject is a program with one configuration.
type subject struct {
	name     string
	peer     bool // for comparison, not kube-ipvs
	program  string
	args     []string
	nftables bool
	// pause is how long the program itself waits between two changes. An earlier change
	// would only measure this pause.
	pause time.Duration
}

var common = []string{"--hostname-override", "node", "--cluster-cidr", "10.128.0.0/9"}

// kubeIPVS is kube-ipvs with one way to claim cluster IPs.
func kubeIPVS(claim string) *subject {
	return &subject{
		name: "kube-ipvs, " + claim, program: filepath.Join(os.Getenv("LAB_SRC"), "bin/kube-ipvs"),
		args: append([]string{"--claim-cluster-ips", claim, "--ipvs-min-sync-period", "0s"}, common...),
	}
}

// kubeProxy is kube-proxy in a mode. It leaves the size of the conntrack table, which
// belongs to the machine, unchanged.
func kubeProxy(mode string, args ...string) *subject {
	return &subject{
		name: "kube-proxy, " + mode, peer: true, program: lab.Peer("kube-proxy"), nftables: mode == "nftables",
		args: append(append([]string{"--proxy-mode", mode,
			"--conntrack-max-per-core", "0", "--conntrack-min", "0",
			"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s"}, args...), common...),
	}
}

var (
	byAddress = kubeIPVS("address")
	byRoute   = kubeIPVS("route")
	iptPeer   = kubeProxy("iptables", "--iptables-min-sync-period", "0s")
	ipvsPeer  = kubeProxy("ipvs", "--ipvs-min-sync-period", "0s")
	nftPeer   = func() *subject { s := kubeProxy("nftables"); s.pause = 1100 * time.Millisecond; return s }()
)

const metricsURL = "http://127.0.0.1:10249/metrics"

// site is a node with a network, for one program at a time.
type site struct {
	t       testing.TB
	node    *lab.Node
	subject *subject
	process *lab.Process
	pages   *http.Client
	started time.Time
}

func newSite(t testing.TB, s *subject) *site {
	t.Helper()
	l := lab.New(t)
	fabric := l.Fabric("fabric")
	segment := fabric.Segment("192.168.60.1/24")
	node := l.Node("node")
	segment.Attach(node.Namespace, "eth0", "192.168.60.11/24")
	segment.DefaultRoute(node.Namespace, "eth0")
	fabric.Uplink()
	addTap(node.Namespace)
	made := &site{t: t, node: node, subject: s, pages: pagesOf(node)}
	made.addPods()
	return made
}

// start starts the program.
func (s *site) start() {
	s.t.Helper()
	s.started = time.Now()
	args := append([]string{"--kubeconfig", lab.Kubeconfig()}, s.subject.args...)
	s.process = s.node.StartProgram(func(*lab.Process) error { return nil }, s.subject.program, args...)
}

// stop stops the program. The kernel state stays.
func (s *site) stop() {
	must(s.t, s.process.Signal(unix.SIGTERM))
	<-s.process.Done()
	s.pages.CloseIdleConnections()
}

func (s *site) metrics() (string, error) {
	response, err := s.pages.Get(metricsURL)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return string(text), err
}

var lastPass = regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds(?:\{ip_family="IPv[46]"\})? (\S+)$`)

// passed waits until every family has finished a pass that began after the program's
// start, and returns the time of the last end.
func (s *site) passed(limit time.Duration) time.Time {
	s.t.Helper()
	latest, err := s.passedWithin(limit)
	if err != nil {
		s.t.Fatalf("%s has programmed everything: not within %s: %v", s.subject.name, limit, err)
	}
	return latest
}

// passedWithin is passed, but returns an error if the limit is exceeded.
func (s *site) passedWithin(limit time.Duration) (time.Time, error) {
	s.t.Helper()
	var latest time.Time
	err := s.within(limit, func() (err error) { latest, err = s.lastPass(); return err })
	return latest, err
}

// lastPass returns the time of the last end of a pass. It fails if a family has finished no pass
// that began after the program's start.
func (s *site) lastPass() (latest time.Time, err error) {
	text, err := s.metrics()
	if err != nil {
		return latest, err
	}
	times := lastPass.FindAllStringSubmatch(text, -1)
	if len(times) == 0 || s.subject.peer && len(times) < 2 {
		return latest, fmt.Errorf("%d of its families have had a pass", len(times))
	}
	for _, match := range times {
		seconds, err := strconv.ParseFloat(match[1], 64)
		if err != nil {
			return latest, err
		}
		at := time.Unix(0, int64(seconds*float64(time.Second)))
		if at.Before(s.started) {
			return latest, fmt.Errorf("no pass so far")
		}
		if at.After(latest) {
			latest = at
		}
	}
	return latest, nil
}

// eventually repeats a check until it succeeds, and fails the test after the limit.
func (s *site) eventually(limit time.Duration, what string, check func() error) {
	s.t.Helper()
	if err := s.within(limit, check); err != nil {
		s.t.Fatalf("%s: not within %s: %v", what, limit, err)
	}
}

// within repeats a check with increasing pauses, because each check costs the program time. The
// check itself reports since when its condition holds. After the limit, within returns the
// check's last error.
func (s *site) within(limit time.Duration, check func() error) error {
	s.t.Helper()
	begin := time.Now()
	deadline := begin.Add(limit)
	for {
		err := check()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		select {
		case <-s.process.Done():
			s.t.Fatalf("%s has ended:\n%s", s.subject.name, s.process.Log())
		case <-time.After(min(max(500*time.Millisecond, time.Since(begin)/4), 5*time.Second)):
		}
	}
}

// sees returns the number of Services in the kernel.
func (s *site) sees() int {
	s.t.Helper()
	if s.subject.nftables {
		return strings.Count(s.node.Exec("nft", "list", "map", "ip", "kube-proxy", "service-ips"), " . tcp . 80 : ")
	}
	// /proc/net/ip_vs omits some entries if several network namespaces have any.
	return strings.Count(s.node.Exec("ipvsadm", "-Ln"), ":80 rr")
}
