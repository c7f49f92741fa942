//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"math/rand"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// TestReliabilitySoak changes everything for a while, as TestENIChurn does. In addition
// Services are created and deleted, the proxy is stopped, killed and restarted, and the
// network loses packets. SOAK is the duration (make soak).
//
// Every reply is checked: it must come from an endpoint that the Service has, or had when
// the client sent its request. No request is refused, and only lost packets cause
// timeouts. The process does not leak memory or files, and in the end doctor finds no
// problem.
func TestReliabilitySoak(t *testing.T) {
	record := reliability.Begin(t, reliability.Soak, "soak")
	s := newSoak(t)
	s.startClients()
	begin := time.Now()
	settled, restarts := process{}, 0
	for rounds := 0; ; rounds++ {
		passed := time.Since(begin)
		// On a slow machine one round may take as long as a short run. At least one round
		// is between the two measurements of the process.
		if passed > s.length && settled != (process{}) {
			s.progress(begin, rounds)
			break
		}
		if passed < s.length*2/3 {
			s.restart([]syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[rounds%2])
			restarts++
		} else if settled == (process{}) {
			settled = s.measure()
		}
		s.round()
		s.churnServices()
		s.progress(begin, rounds+1)
	}
	s.stopClients()
	end := s.measure()
	s.checkGrowth(settled, end)
	s.checkDoctor()
	s.checkAnswers()
	if !t.Failed() { // the failures are easier to find without the figures after them
		record(s.figures(time.Since(begin), restarts, settled, end)...)
	}
}

// soak is the cluster and the expected replies.
type soak struct {
	*eniChurn
	length time.Duration
	stop   chan struct{}
	done   sync.WaitGroup
	number int // of the next temporary Service
	extra  []*soakService
	from   *lab.Pod // the client of temporary Services

	mu       sync.Mutex
	web      soakService // the permanent one
	answers  map[lab.Outcome]int
	wrong    []string
	failures []string
	gone     int // number of deleted Services
}

// soakService is a Service and its endpoints, each with the time from which it is removed
// from the kernel too; zero for current ones.
type soakService struct {
	name      string
	address   string
	endpoints map[string]time.Time
}

// soakLimit is the maximum time of a change on a busy machine.
const soakLimit = 2 * time.Minute

func newSoak(t *testing.T) *soak {
	length := time.Duration(reliability.Times(60, 1800)) * time.Second
	if text := os.Getenv("SOAK"); text != "" {
		var err error
		if length, err = time.ParseDuration(text); err != nil {
			t.Fatalf("SOAK: %v", err)
		}
	}
	s := &soak{eniChurn: newENIChurn(t), length: length, stop: make(chan struct{}), answers: map[lab.Outcome]int{}}
	s.limit = soakLimit
	s.web = soakService{name: "web", endpoints: map[string]time.Time{}}
	for _, e := range s.live {
		s.web.endpoints[e.pod.Name] = time.Time{}
	}
	s.from = s.Primary.AddPod("asker")
	for _, i := range []*lab.NodeInterface{s.Primary, s.flaps, s.stays} {
		i.Lose("1%")
	}
	return s
}

// startClients starts the clients of the permanent Service.
func (s *soak) startClients() {
	pod1, pod3, plain := s.flaps.AddPod("pod1"), s.stays.AddPod("pod3"), s.Primary.AddPod("plain")
	byEth0, byEth3 := s.AddClient("by-eth0"), s.AddClient("by-eth3")
	for family := range 2 {
		s.client(pod1.Namespace, vipsInside[family])
		s.client(pod3.Namespace, clusterIPs(1)[family])
		s.client(byEth0, vipsByEth0[family])
		s.client(byEth3, vipsByEth3[family])
	}
	s.client(plain.Namespace, vipsInside[1])
	s.client(s.Node.Namespace, clusterIPs(1)[0])
}

func (s *soak) client(from *lab.Namespace, vip string) {
	s.done.Go(func() {
		for {
			select {
			case <-s.stop:
				return
			case <-time.After(pause):
			}
			s.ask(from, &s.web, at(vip, 80))
		}
	})
}

func (s *soak) stopClients() {
	close(s.stop)
	s.done.Wait()
}

// ask opens one connection and checks the reply.
func (s *soak) ask(from *lab.Namespace, svc *soakService, address string) {
	began := time.Now()
	answer := from.DialWithin(soakLimit, lab.TCP, address)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[answer.Outcome()]++
	if answer.Err != nil {
		s.failures = append(s.failures, fmt.Sprintf("%s from %s at %s: %s", address, from.Name, began.Format(time.TimeOnly), answer))
		return
	}
	if until, known := svc.endpoints[answer.Server]; !known || !until.IsZero() && until.Before(began) {
		s.wrong = append(s.wrong, fmt.Sprintf("%s from %s was answered by %s, which is no endpoint of %s since %s", address, from.Name, answer.Server, svc.name, until))
	}
}

// set replaces the endpoints of the permanent Service. The previous ones may answer
// requests that began before the kernel had the change.
func (s *soak) set(endpoints ...podEndpoint) {
	s.t.Helper()
	s.mu.Lock()
	for _, e := range endpoints {
		if !e.terminating {
			s.web.endpoints[e.pod.Name] = time.Time{}
		}
	}
	s.mu.Unlock()
	s.eniChurn.set(endpoints...)
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, until := range s.web.endpoints {
		serves := slices.ContainsFunc(endpoints, func(e podEndpoint) bool { return e.pod.Name == name && !e.terminating })
		if until.IsZero() && !serves {
			s.web.endpoints[name] = time.Now()
		}
	}
}

// round changes endpoints and ENIs once. It replaces eniChurn's round, whose clients
// expect more and tolerate no loss.
func (s *soak) round() {
	s.flaps.Carry()
	s.follows("eth1 has a SNAT source", func() bool { return s.snats("eth1") == 2 })
	s.replace(s.set)
	s.comes.Unplug()
	s.follows("eth2 is not bound", func() bool { return s.binds("eth2") == 0 })
	s.flaps.Drop()
	s.follows("eth1 has no SNAT source", func() bool { return s.snats("eth1") == 0 })
	s.replace(s.set)
	s.comes.Plug()
	s.follows("eth2 is bound", func() bool { return s.binds("eth2") == 2 })
}

// soakServices is the number of temporary Services that a round creates. Each exists for
// two rounds.
const soakServices = 5

// churnServices creates temporary Services, connects to them, and deletes as many.
func (s *soak) churnServices() {
	for range soakServices {
		s.addService()
	}
	for _, svc := range s.extra {
		s.Eventually(soakLimit, svc.name+" is served", func() error { return s.serves(svc, true) })
		for range 3 {
			s.ask(s.from.Namespace, svc, svc.address)
		}
	}
	if len(s.extra) > soakServices {
		for _, svc := range s.extra[:soakServices] {
			s.removeService(svc)
		}
		s.extra = s.extra[soakServices:]
	}
}

func (s *soak) addService() {
	s.number++
	n := s.number%200 + 2
	svc := newService(fmt.Sprintf("extra%d", s.number), corev1.ProtocolTCP, 80, clusterIPs(n)...)
	first := rand.Intn(len(s.pods))
	pods := []*lab.Pod{s.pods[first], s.pods[(first+1)%len(s.pods)]}
	for _, slice := range dualStackSlices(svc, webPort, ready(pods[0]), ready(pods[1])) {
		s.write(slice.Name, slice)
	}
	s.write(svc.Name, svc)
	s.extra = append(s.extra, &soakService{
		name: svc.Name, address: at(clusterIPs(n)[s.number%2], 80),
		endpoints: map[string]time.Time{pods[0].Name: {}, pods[1].Name: {}},
	})
}

// removeService deletes a Service and checks that nothing answers.
func (s *soak) removeService(svc *soakService) {
	files, err := filepath.Glob(filepath.Join(s.dir, svc.name+"*"))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, file := range files {
		if file == filepath.Join(s.dir, svc.name+".yaml") || strings.HasPrefix(filepath.Base(file), svc.name+"-") {
			if err := os.Remove(file); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	s.Eventually(soakLimit, svc.name+" is not served", func() error { return s.serves(svc, false) })
	s.mu.Lock()
	s.gone++
	s.mu.Unlock()
	if answer := s.from.DialWithin(lostAfter, lab.TCP, svc.address); answer.Err == nil {
		s.t.Errorf("%s was deleted, but %s answered", svc.name, answer)
	}
}

// serves returns an error unless the node serves a Service, or unless it does not. A new
// Service's address becomes local after its virtual server exists; a packet sent between the
// two leaves the node.
func (s *soak) serves(svc *soakService, want bool) error {
	out := s.Node.Exec("ipvsadm", "-Sn")
	if strings.Contains(out, "-A -t "+svc.address+" ") != want {
		return fmt.Errorf("%s is served: %t", svc.address, !want)
	}
	if vip := netip.MustParseAddrPort(svc.address).Addr(); want && !bound(s.Node)[vip] {
		return fmt.Errorf("%s is not local", vip)
	}
	return nil
}

// restart stops the process with a signal and starts it again.
func (s *soak) restart(signal syscall.Signal) {
	if err := s.proxy.Signal(signal); err != nil {
		s.t.Fatal(err)
	}
	if code := s.proxy.ExitCode(); signal == syscall.SIGTERM && code != 0 {
		s.t.Errorf("the proxy ended with %d:\n%s", code, s.proxy.Log())
	}
	s.startProxy()
}

// process is the resource usage of the proxy, from its metrics.
type process struct{ memory, files, goroutines float64 }

// measure reads the proxy's metrics.
func (s *soak) measure() process {
	s.t.Helper()
	values := map[string]float64{}
	for line := range strings.Lines(s.Node.Exec("curl", "-s", "http://127.0.0.1:10249/metrics")) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			values[name], _ = strconv.ParseFloat(value, 64)
		}
	}
	p := process{values["process_resident_memory_bytes"] / 1e6, values["process_open_fds"], values["go_goroutines"]}
	if p.memory == 0 || p.files == 0 || p.goroutines == 0 {
		s.t.Errorf("the process does not report its resources: %+v", p)
	}
	return p
}

// checkGrowth compares the resource usage, with tolerance for current work and
// uncollected garbage.
func (s *soak) checkGrowth(before, after process) {
	if after.memory > before.memory*1.5+10 || after.files > before.files+5 || after.goroutines > before.goroutines+10 {
		s.t.Errorf("the process has grown from %+v to %+v", before, after)
	}
}

func (s *soak) checkDoctor() {
	var findings []doctor.Finding
	if code := decode(s.t, s.Node, &findings, "doctor", "-o", "json"); code != 0 || slices.ContainsFunc(findings, func(f doctor.Finding) bool { return f.Severity != doctor.OK }) {
		s.t.Errorf("doctor ended with %d and found %+v", code, findings)
	}
}

func (s *soak) asked() int {
	sum := 0
	for _, n := range s.answers {
		sum += n
	}
	return sum
}

func (s *soak) lost() int {
	lost := 0
	for _, i := range []*lab.NodeInterface{s.Primary, s.flaps, s.stays} {
		lost += i.Lost()
	}
	return lost
}

func (s *soak) progress(begin time.Time, rounds int) {
	p, lost := s.measure(), s.lost()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.t.Logf("%s of %s: %d rounds, %d connections, %v, %d wrong, %d packets lost, %.1f MB, %.0f files, %.0f goroutines",
		time.Since(begin).Round(time.Second), s.length, rounds, s.asked(), s.answers, len(s.wrong), lost, p.memory, p.files, p.goroutines)
}

// checkAnswers checks the results of all connections. A connection whose packets are lost one
// after another times out; fewer than one in a thousand may.
func (s *soak) checkAnswers() {
	others := maps.Clone(s.answers)
	delete(others, lab.OK)
	delete(others, lab.TimedOut)
	if len(s.wrong) > 0 || len(others) > 0 || s.answers[lab.TimedOut] > s.asked()/1000 {
		s.t.Errorf("%v, wrong: %v, the first failures: %v", s.answers, s.wrong, s.failures[:min(len(s.failures), 20)])
	}
}

func (s *soak) figures(took time.Duration, restarts int, before, after process) []reliability.Figure {
	answered, asked := s.answers[lab.OK], s.asked()
	n := func(name string, value int, unit, shows string) reliability.Figure {
		return reliability.Figure{Name: name, Value: float64(value), Unit: unit, Shows: shows}
	}
	return []reliability.Figure{
		n("length", int(took.Seconds()), "s", ""),
		n("connections", asked, "", "by pods, the node and external clients, each reply checked"),
		n("answered", answered, "", "by an endpoint of the Service"),
		n("wrong answers", len(s.wrong), "", "by any other host"),
		n("timed out", s.answers[lab.TimedOut], "", "because consecutive packets were lost"),
		n("packets lost", s.lost(), "", "by the network, 1 % in each direction"),
		n("endpoints replaced", s.next-2, "", ""),
		n("Services added", s.number, "", fmt.Sprintf("and %d removed", s.gone)),
		n("restarts", restarts, "", "by SIGTERM and SIGKILL in turn"),
		{Name: "memory", Value: after.memory, Unit: "MB", Shows: fmt.Sprintf("resident, at the end; %.1f a third of the time earlier", before.memory)},
		{Name: "open files", Value: after.files, Shows: fmt.Sprintf("at the end; %.0f earlier", before.files)},
		{Name: "goroutines", Value: after.goroutines, Shows: fmt.Sprintf("at the end; %.0f earlier", before.goroutines)},
	}
}
