package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"time"

	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// answerTimeout limits one request. Adding a virtual server can load a scheduler's module,
// which takes seconds on a busy node.
const answerTimeout = 15 * time.Second

// Netlink programs IPVS in the network namespace of the thread that called New.
type Netlink struct{ client }

// New connects to the kernel, in the network namespace of the calling thread. If the kernel
// has no IPVS and its module cannot be loaded, it fails with an error that names the fix.
func New() (*Netlink, error) {
	if err := require(); err != nil {
		return nil, err
	}
	handle, err := ipvs.New("")
	if err != nil {
		return nil, fmt.Errorf("connect to IPVS: %w", err)
	}
	options, err := newControl()
	if err != nil {
		handle.Close()
		return nil, err
	}
	s := &socket{handle: handle, options: options, timeout: answerTimeout}
	if s.listed, err = os.Open(listFile); err != nil {
		s.listed = nil // no /proc: real servers are requested one by one
	}
	return &Netlink{client{raw: s}}, nil
}

// require makes sure that IPVS is available before the library looks for it: the library
// looks once per process and caches even a failure. Kernels since 5.9 load the module when
// its netlink family is looked up, also for a process in a container without modprobe.
func require() error {
	return loadAndRetry(func() error {
		_, err := netlink.GenlFamilyGet("IPVS")
		return err
	}, func() error { return exec.Command("modprobe", "ip_vs").Run() })
}

// loadAndRetry looks the family up, and again after loading the module. It ignores errors of
// loading if the second lookup succeeds.
func loadAndRetry(family, load func() error) error {
	err := family()
	if errors.Is(err, unix.ENOENT) {
		_ = load()
		err = family()
	}
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("the kernel has no IPVS and its module cannot be loaded from here (%w); run \"modprobe ip_vs\" on the node", err)
	}
	if err != nil {
		return fmt.Errorf("look for IPVS in the kernel: %w", err)
	}
	return nil
}

// Probe writes nothing if the scheduler's module is visibly loaded, so that a restart leaves
// the kernel unchanged.
func (n *Netlink) Probe(scheduler string) error {
	if _, err := os.Stat("/sys/module/ip_vs_" + scheduler); err == nil {
		return nil
	}
	return n.client.Probe(scheduler)
}

// socket implements raw with generic netlink sockets (the library's for reads, one for
// writes), socket options and the list. It relies on the locks of its client: one for the
// handle, one for the writer, one for the list.
type socket struct {
	handle  *ipvs.Handle // nil after a timeout
	options *control
	writer  *writer // nil before the first change, and after an error
	timeout time.Duration
	listed  *os.File // nil without /proc

	// noIPv6 is set once a dump had no IPv6 virtual server, until one is added here.
	// Until then, those that another program adds are not observed.
	noIPv6 atomic.Bool
}

func (s *socket) close() {
	s.options.close()
	if s.listed != nil {
		s.listed.Close()
		s.listed = nil
	}
	if s.handle != nil {
		s.handle.Close()
		s.handle = nil
	}
	if s.writer != nil {
		s.writer.Close()
		s.writer = nil
	}
}

// call makes one request. The library waits for an answer forever, even past the socket's
// own timeout; closing the socket ends the wait. The next request opens a new socket, which
// late answers cannot reach.
//
// The new socket belongs to the network namespace of the calling thread, as with New: the
// process must not have threads in several.
func (s *socket) call(request func(*ipvs.Handle) error) error {
	if s.handle == nil {
		handle, err := ipvs.New("")
		if err != nil {
			return err
		}
		s.handle = handle
	}
	watchdog := time.AfterFunc(s.timeout, s.handle.Close)
	err := request(s.handle)
	if !watchdog.Stop() {
		s.handle = nil
		return fmt.Errorf("no reply from IPVS within %s: %w", s.timeout, unix.ETIMEDOUT)
	}
	return err
}

// services uses the socket option, which returns only IPv4, if the kernel has no IPv6
// virtual server.
func (s *socket) services() ([]listed, error) {
	if s.noIPv6.Load() || onlyIPv4(s.options.count, moduleUsers) {
		if services, err := s.options.services(); err == nil {
			return services, nil
		}
	}
	// Set before the dump, so that an addition meanwhile is not lost.
	s.noIPv6.Store(true)
	services, err := s.dumpServices()
	if err != nil || hasIPv6(services) {
		s.noIPv6.Store(false)
	}
	return services, err
}

func (s *socket) dumpServices() ([]listed, error) {
	var list []*ipvs.Service
	err := s.call(func(h *ipvs.Handle) (err error) {
		list, err = h.GetServices()
		return err
	})
	if err != nil {
		return nil, err
	}
	return readServices(list)
}

func readServices(list []*ipvs.Service) ([]listed, error) {
	services := make([]listed, 0, len(list))
	for _, service := range list {
		key, err := keyOf(service)
		if err != nil {
			return nil, err
		}
		services = append(services, listed{key, VirtualServer{
			Scheduler: service.SchedName,
			Flags:     Flags(service.Flags) &^ flagHashed,
			Timeout:   service.Timeout,
		}})
	}
	return services, nil
}

func (s *socket) destinations(key Key) ([]destination, error) {
	if key.Family() == ip.IPv4 {
		return s.options.destinations(key)
	}
	return s.dumpDestinations(key)
}

// dumpDestinations reads the real servers of a virtual server with netlink.
func (s *socket) dumpDestinations(key Key) ([]destination, error) {
	var list []*ipvs.Destination
	err := s.call(func(h *ipvs.Handle) (err error) {
		list, err = h.GetDestinations(serviceOf(key))
		return err
	})
	if err != nil {
		return nil, err
	}
	return readDestinations(list)
}

func readDestinations(list []*ipvs.Destination) ([]destination, error) {
	dests := make([]destination, len(list))
	for i, d := range list {
		addr, ok := netip.AddrFromSlice(d.Address)
		if !ok {
			return nil, fmt.Errorf("real server's address %v: %w", d.Address, unix.EINVAL)
		}
		dests[i] = destination{
			Dest:       netip.AddrPortFrom(addr, d.Port),
			RealServer: RealServer{Weight: d.Weight, MaxConnections: d.UpperThreshold},
			Connections: Connections{
				Active: d.ActiveConnections, Inactive: d.InactiveConnections,
				In: d.Stats.PacketsIn, Out: d.Stats.PacketsOut,
			},
		}
	}
	return dests, nil
}

func (s *socket) list() (map[Key]map[netip.AddrPort]RealServer, error) {
	if s.listed == nil {
		return nil, os.ErrNotExist
	}
	return listOf(s.listed)
}

// execute skips the remaining changes after a timeout: if the kernel hangs, it must not wait
// once for each change.
func (s *socket) execute(changes []Change) []error {
	errs := make([]error, 0, len(changes))
	for batch := range slices.Chunk(changes, nlmsg.BatchSize) {
		answers, err := s.write(batch)
		if slices.ContainsFunc(batch, func(c Change) bool { return c.Op == AddVirtualServer && c.Key.Family() == ip.IPv6 }) {
			s.noIPv6.Store(false)
		}
		if err != nil {
			answers = slices.Repeat([]error{err}, len(batch))
		}
		errs = append(errs, answers...)
		if errors.Is(err, unix.ETIMEDOUT) {
			return append(errs, slices.Repeat([]error{err}, len(changes)-len(errs))...)
		}
	}
	return errs
}

// write sends one batch. After an error it is unknown which changes were applied; the next
// batch opens a new socket, as in call.
func (s *socket) write(batch []Change) ([]error, error) {
	if s.writer == nil {
		w, err := newWriter(s.timeout)
		if err != nil {
			return nil, err
		}
		s.writer = w
	}
	errs, err := s.writer.write(batch)
	if err == nil {
		return errs, nil
	}
	s.writer.Close()
	s.writer = nil
	if nlmsg.IsTimeout(err) {
		err = fmt.Errorf("no reply from IPVS within %s: %w", s.timeout, unix.ETIMEDOUT)
	}
	return nil, err
}

func (s *socket) timeouts() (Timeouts, error) {
	var config *ipvs.Config
	err := s.call(func(h *ipvs.Handle) (err error) {
		config, err = h.GetConfig()
		return err
	})
	if err != nil {
		return Timeouts{}, err
	}
	return Timeouts{TCP: seconds(config.TimeoutTCP), TCPFin: seconds(config.TimeoutTCPFin), UDP: seconds(config.TimeoutUDP)}, nil
}

func (s *socket) setTimeouts(t Timeouts) error {
	config := ipvs.Config{TimeoutTCP: duration(t.TCP), TimeoutTCPFin: duration(t.TCPFin), TimeoutUDP: duration(t.UDP)}
	return s.call(func(h *ipvs.Handle) error { return h.SetConfig(&config) })
}

func seconds(d time.Duration) uint32    { return uint32(d / time.Second) }
func duration(sec uint32) time.Duration { return time.Duration(sec) * time.Second }

// serviceOf converts a key for the library.
func serviceOf(key Key) *ipvs.Service {
	s := &ipvs.Service{FWMark: key.FWMark, AddressFamily: unix.AF_INET}
	if key.Family() == ip.IPv6 {
		s.AddressFamily = unix.AF_INET6
	}
	if key.FWMark == 0 {
		s.Protocol, s.Address, s.Port = uint16(key.Protocol), net.IP(key.Addr.AsSlice()), key.Port
	}
	return s
}

func keyOf(s *ipvs.Service) (Key, error) {
	if s.FWMark != 0 {
		family := ip.IPv4
		if s.AddressFamily == unix.AF_INET6 {
			family = ip.IPv6
		}
		return Key{Addr: family.Unspecified(), FWMark: s.FWMark}, nil
	}
	addr, ok := netip.AddrFromSlice(s.Address)
	if !ok {
		return Key{}, fmt.Errorf("virtual server's address %v: %w", s.Address, unix.EINVAL)
	}
	return Key{Protocol: ip.Protocol(s.Protocol), Addr: addr, Port: s.Port}, nil
}

func (s *socket) count() (int, error) { return s.options.count() }
