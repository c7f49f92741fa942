package proxy

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// errnos lists the errors of operations of every kernel package. EBADMSG is a truncated
// answer, ETIMEDOUT a missing one, and EINTR a dump interrupted by a change.
var errnos = []unix.Errno{
	unix.ENOMEM, unix.EBUSY, unix.EPERM, unix.EINTR, unix.ENOBUFS, unix.EEXIST, unix.EAGAIN, unix.ENOENT, unix.EINVAL, unix.ENOSPC, unix.ESRCH, unix.EMSGSIZE,
	unix.EBADMSG, unix.ETIMEDOUT, unix.EACCES, unix.EROFS, unix.EIO, unix.ERANGE, unix.ENODEV, unix.EADDRNOTAVAIL, unix.ENETUNREACH, unix.ENETDOWN,
	unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.ELOOP, unix.EMLINK, unix.ENOTEMPTY, unix.E2BIG,
}

// harmless reports whether an error says that the operation's goal already holds. The
// kernel returns such an error only if it does.
func harmless(operation string, err unix.Errno) bool {
	takesAway := strings.HasPrefix(operation, "delete") || strings.HasPrefix(operation, "forget")
	return takesAway && kernel.IsNotExist(err) || !takesAway && kernel.IsExist(err)
}

// two returns a machine with two Services that share nothing.
func two(t testing.TB) *machine {
	m := newMachine(t)
	m.set(exposed("steady", 1, nil, at("10.244.0.9", "10.244.1.9")...))
	m.set(exposed("web", 2, nil, at("10.244.0.2", "10.244.1.2")...))
	return m
}

// refuse makes an operation fail whenever it is tried.
func (m *machine) refuse(refused func(operation string) error) {
	m.OnChange = refused
	for _, f := range m.NAT {
		f.Refuse = func(c nat.Change) error { return m.OnChange(c.String()) }
	}
}

// deed is what a process does while the kernel refuses something.
type deed struct {
	name string
	do   func(*machine)
}

var deeds = []deed{
	{"a start", func(m *machine) { m.boot() }},
	{"a deletion", func(m *machine) {
		m.ask()
		m.delete("web")
		m.turn()
		m.pass() // compare before the kernel works again
	}},
}

// TestReliabilityRefusals refuses each operation of a start, and of a Service's
// deletion, with each error (in most runs: every 13th operation with one error), until
// the kernel works again. Each time an error names the operation, the unaffected
// Service is served, and the kernel is as planned after the retries, or after a start
// instead of them. The list of connections, which is read to delete flows, counts as an
// operation.
func TestReliabilityRefusals(t *testing.T) {
	record := reliability.Begin(t, reliability.Refusals, "fakes")
	operations, refused, most := 0, 0, 0
	for at, d := range deeds {
		undisturbed := two(t)
		for _, before := range deeds[:at] {
			before.do(undisturbed)
		}
		writes := undisturbed.recording()
		d.do(undisturbed)
		of, want := *writes, normal(undisturbed.kernel())
		if d.name == "a deletion" {
			of = append(of, "connections")
		}
		operations += len(of)
		for i := 0; i < len(of); i += reliability.Times(13, 1) {
			for j := range reliability.Times(1, len(errnos)) {
				if err := errnos[(i+j)%len(errnos)]; !harmless(of[i], err) {
					most = max(most, refuseOne(t, at, of[i], err, want))
					refused++
				}
			}
		}
	}
	record(
		reliability.Figure{Name: "operations of a start and of a deletion, each refused", Value: float64(operations), Shows: "of IPVS, IP sets, iptables, routing, parameters, nftables"},
		reliability.Figure{Name: "errors that each was refused with, at most", Value: float64(reliability.Times(1, len(errnos))), Shows: "without errors that mean that an added object exists or a deleted one does not"},
		reliability.Figure{Name: "refusals after which retries made the kernel equal the plan", Value: float64(refused)},
		reliability.Figure{Name: "error messages of one refusal, at most", Value: float64(most), Shows: "over all retries until the kernel accepts the operation"},
	)
}

// refuseOne returns the number of error messages.
func refuseOne(t *testing.T, at int, operation string, err unix.Errno, want string) int {
	t.Helper()
	context := fmt.Sprintf("%s: %q refused with %q", deeds[at].name, operation, err)
	m := two(t)
	for _, before := range deeds[:at] {
		before.do(m)
	}
	refused := func(o string) error {
		if o == operation {
			return err
		}
		return nil
	}
	m.refuse(refused)
	m.OnRead = refused
	deeds[at].do(m)
	told := len(m.errors)
	if told > 10 {
		t.Errorf("%s: the log has %d errors:\n%s", context, told, strings.Join(m.errors, "\n"))
	}
	if !strings.Contains(strings.Join(m.errors, "\n"), err.Error()) {
		t.Errorf("%s: the log has %q", context, m.errors)
	}
	for _, service := range []*regexp.Regexp{steadyAddress, webAddress} {
		other := map[*regexp.Regexp]*regexp.Regexp{steadyAddress: webAddress, webAddress: steadyAddress}[service]
		if service.MatchString(operation) && !other.MatchString(operation) {
			if diff := cmp.Diff(only(other, want), only(other, normal(m.kernel()))); diff != "" {
				t.Errorf("%s: the other Service is not served:\n%s", context, diff)
			}
		}
	}
	m.refuse(func(string) error { return nil })
	m.OnRead = nil
	if len(operation)%2 == 0 {
		m.boot()
	}
	for range 3 { // including what depends on the refused operation
		m.pass()
	}
	if diff := cmp.Diff(want, normal(m.kernel())); diff != "" {
		t.Errorf("%s: planned (-), observed after the retries (+):\n%s", context, diff)
	}
	return told
}

var webAddress = regexp.MustCompile(`203\.0\.\d+\.2\b[^0-9]|fd00:10:96::2\b|fd00:203::2\b|:3002\d|10\.244\.[01]\.2\b`)

func only(which *regexp.Regexp, kernel string) string {
	var kept []string
	for line := range strings.Lines(kernel) {
		if which.MatchString(line) && strings.HasPrefix(line, "-") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// lists are the parts of the kernel that are read for a comparison.
var lists = []string{"virtual servers", "sets", "routing", "loopback rules", "IPv4 rules", "IPv6 rules"}

// TestReliabilityUnreadable makes each list unreadable, with each error, at a start and
// in a comparison of a kernel in service: nothing is written meanwhile
// (kubernetes#129146). In most runs it uses every fourth error. The list of kube-proxy's nftables
// tables is an exception: nothing that serves depends on it (TestUnreadableNFTablesMode).
func TestReliabilityUnreadable(t *testing.T) {
	record := reliability.Begin(t, reliability.Refusals, "unreadable")
	tries, written := 0, 0
	for first, list := range lists {
		for i := first % reliability.Times(4, 1); i < len(errnos); i += reliability.Times(4, 1) {
			err := errnos[i]
			m := two(t)
			for _, begins := range []string{"a start", "a comparison"} {
				writes := m.recording()
				m.OnRead = func(of string) error {
					if of == list {
						return err
					}
					return nil
				}
				m.errors = nil
				if begins == "a start" {
					if m.boot() {
						t.Errorf("%s: the start continued without the list of %s", err, list)
					}
				} else {
					m.pass()
				}
				tries++
				if written += len(*writes); len(*writes) > 0 {
					t.Errorf("%s in which the list of %s failed with %q wrote %q", begins, list, err, *writes)
				}
				if len(m.errors) != 1 || !strings.Contains(m.errors[0], err.Error()) {
					t.Errorf("%s in which the list of %s failed with %q logged %q", begins, list, err, m.errors)
				}
				m.OnRead = nil
				if begins == "a start" {
					m.boot()
				}
			}
		}
	}
	record(
		reliability.Figure{Name: "lists that could not be read", Value: float64(tries), Shows: "each with each error, at a start and during a comparison"},
		reliability.Figure{Name: "operations on the kernel meanwhile", Value: float64(written)},
	)
}

// TestReliabilityRandomRefusals makes random operations and lists fail through a life
// with all kinds of changes.
func TestReliabilityRandomRefusals(t *testing.T) {
	record := reliability.Begin(t, reliability.Refusals, "random")
	random := rand.New(rand.NewPCG(3, 4))
	lives, failures := reliability.Times(5, 50), 0
	for range lives {
		m := node(t, beginnings[random.IntN(len(beginnings))])
		var mu sync.Mutex // lists are read in the background
		fail := func(operation string, one int) error {
			mu.Lock()
			defer mu.Unlock()
			err := errnos[random.IntN(len(errnos))]
			if random.IntN(one) > 0 || harmless(operation, err) {
				return nil
			}
			failures++
			return err
		}
		m.refuse(func(operation string) error { return fail(operation, 20) })
		listing := func(string) error { return fail("", 10) }
		m.OnRead = listing
		for !m.boot() {
		}
		for _, s := range life[1 : len(life)-1] {
			m.OnRead = nil // the test itself reads
			s.do(m)
			m.OnRead = listing
			m.pass()
		}
		m.OnRead = nil
		m.refuse(func(string) error { return nil })
		for range 3 {
			m.pass()
		}
		m.boot() // without an ENI some rules stay until the next start
		if diff := cmp.Diff(m.reference(len(life)-1), normal(m.kernel())); diff != "" {
			t.Errorf("planned (-), observed (+):\n%s", diff)
		}
	}
	record(
		reliability.Figure{Name: "operations and lists that failed at random", Value: float64(failures), Shows: fmt.Sprintf("1 of 20 and 1 of 10, in %d process lifetimes with all kinds of changes", lives)},
		reliability.Figure{Name: "process lifetimes after which the kernel equaled the plan", Value: float64(lives)},
	)
}
