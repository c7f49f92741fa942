package routing

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// stack is the part in which the kernel and the Fake differ. Each method is one request
// and returns the kernel's errno.
type stack interface {
	addLink() error
	deleteLink() error
	addAddress(netip.Addr) error // EEXIST also if the scope is another
	deleteAddress(netip.Addr) error
	wrongScope() (map[netip.Addr]struct{}, error) // of DummyLink
	addRule(Rule) error
	deleteRule(Rule) error
	rawRules(ip.Family) ([]rawRule, error) // in the kernel's order
	addRaw(rawRule) error                  // even if an equal one exists
	deleteRaw(rawRule) error               // the first equal one
	orderLock() sync.Locker                // held while the rules around the one of table local are changed
	replaceRoute(Route) error
	deleteRoute(Route) error
	// applyBatch applies changes to VIPs that have the same operation with few writes, and
	// returns those that must be applied one by one.
	applyBatch([]Change) []Change
}

func apply(s stack, changes []Change) []Failure {
	wrongScope := sync.OnceValues(s.wrongScope) // read once, and only if needed
	var failures []Failure
	for _, run := range runs(changes) {
		if len(run) > 1 {
			run = s.applyBatch(run)
		}
		for _, c := range run {
			if err := change(s, c, wrongScope); err != nil {
				failures = append(failures, Failure{Change: c, Err: err})
			}
		}
	}
	return failures
}

// runs splits changes where the order matters: the changes of one run may be applied in any
// order.
func runs(changes []Change) [][]Change {
	var out [][]Change
	for i, c := range changes {
		if i > 0 && c.Op == changes[i-1].Op && ofVIP(c) && ofVIP(changes[i-1]) {
			last := &out[len(out)-1]
			*last = append(*last, c)
		} else {
			out = append(out, []Change{c})
		}
	}
	return out
}

// ofVIP reports whether a change concerns a single VIP: an address, or a local route to a
// single address.
func ofVIP(c Change) bool {
	switch c.Op {
	case AddAddress, DeleteAddress:
		return check(c) == nil
	case AddRoute, DeleteRoute:
		return c.Route.Local && c.Route.Dst.IsSingleIP() && !c.Route.Src.IsValid() && check(c) == nil
	}
	return false
}

func change(s stack, c Change, wrongScope func() (map[netip.Addr]struct{}, error)) error {
	if err := check(c); err != nil {
		return err
	}
	switch c.Op {
	case AddLink:
		return ignore(kernel.IsExist, s.addLink())
	case DeleteLink:
		return ignore(kernel.IsNotExist, s.deleteLink())
	case AddAddress:
		return addAddress(s, c.Address, wrongScope)
	case DeleteAddress:
		return ignore(kernel.IsNotExist, s.deleteAddress(c.Address))
	case AddRule:
		if c.Rule.Action == SkipLocal {
			return skipLocal(s, c.Rule)
		}
		return ignore(kernel.IsExist, s.addRule(c.Rule))
	case DeleteRule:
		if c.Rule.Action == SkipLocal {
			return endSkipLocal(s, c.Rule)
		}
		return ignore(kernel.IsNotExist, s.deleteRule(c.Rule))
	case AddRoute:
		return s.replaceRoute(c.Route)
	}
	return ignore(kernel.IsNotExist, s.deleteRoute(c.Route))
}

// addAddress adds an address to DummyLink. If the address exists with another scope, which the
// kernel cannot change, it is replaced.
func addAddress(s stack, a netip.Addr, wrongScope func() (map[netip.Addr]struct{}, error)) error {
	err := s.addAddress(a)
	if !kernel.IsExist(err) {
		return err
	}
	wrong, err := wrongScope()
	if err != nil {
		return err
	}
	if _, ok := wrong[a]; !ok {
		return nil
	}
	return replaceAddress(s, a)
}

// replaceAddress deletes an address and adds it again. A route keeps it local meanwhile: otherwise
// the node would forward a packet to it, perhaps to another node, which would reset the connection.
// After a failure the route stays.
func replaceAddress(s stack, a netip.Addr) error {
	route := LocalRoute(a)
	if err := s.replaceRoute(route); err != nil {
		return err
	}
	if err := ignore(kernel.IsNotExist, s.deleteAddress(a)); err != nil {
		return err
	}
	if err := ignore(kernel.IsExist, s.addAddress(a)); err != nil {
		return err
	}
	return ignore(kernel.IsNotExist, s.deleteRoute(route))
}

// LocalRoute returns the route in table local that makes an address local, whether or not an
// interface has it. The link only has to be up: IPv6 routes cannot be added on DummyLink, which
// is down.
func LocalRoute(a netip.Addr) Route {
	r := Route{Family: ip.Of(a), Dst: netip.PrefixFrom(a, a.BitLen()), Table: TableLocal, Link: "lo", Local: true}
	if a.Is4() {
		// The route that the kernel adds for an address has metric 0. Ours must coexist with it.
		// IPv6 routes have such a metric anyway.
		r.Metric = coexistMetric
	}
	return r
}

// coexistMetric is the metric of our IPv4 route for an address, beside the one of the kernel.
const coexistMetric = 1024

func ignore(harmless func(error) bool, err error) error {
	if harmless(err) {
		return nil
	}
	return err
}

// check rejects what a request cannot express.
func check(c Change) error {
	ok := true
	switch c.Op {
	case AddLink, DeleteLink:
	case AddAddress, DeleteAddress:
		ok = c.Address.IsValid() && !c.Address.Is4In6() && c.Address.Zone() == ""
	case AddRule, DeleteRule:
		ok = validRule(c.Rule, c.Op)
	case AddRoute, DeleteRoute:
		ok = c.Route.Table > 0 && c.Route.Link != "" &&
			c.Route.Dst.IsValid() && isFamily(c.Route.Family, c.Route.Dst)
	default:
		ok = false
	}
	if !ok {
		return fmt.Errorf("invalid change: %w", unix.EINVAL)
	}
	return nil
}

func validRule(r Rule, op Op) bool {
	if r.Action == SkipLocal {
		bare := r == Rule{Family: r.Family, Action: SkipLocal, IIf: r.IIf, Mark: r.Mark, Mask: r.Mask, Leftover: r.Leftover}
		return bare && isFamily(r.Family, netip.Prefix{}) && (r.Mask != 0 && !r.Leftover || r.Leftover && op == DeleteRule)
	}
	return r.Action == Lookup && !r.Other && !r.Own && r.Table > 0 && r.Priority > 0 &&
		isFamily(r.Family, r.From) && isFamily(r.Family, r.To)
}

// isFamily reports whether f is IPv4 or IPv6 and p is invalid, or masked and of the family.
func isFamily(f ip.Family, p netip.Prefix) bool {
	if f != ip.IPv4 && f != ip.IPv6 {
		return false
	}
	return !p.IsValid() || p.Masked() == p && ip.Of(p.Addr()) == f
}

// attempts is how often a read is tried that concurrent changes disturb.
const attempts = 10

// errChanged means that lists read one after the other are inconsistent.
var errChanged = errors.New("the network changed while it was read")

// retry repeats a read while again returns true for its error. It returns the last error,
// and no value with it, since that may be incomplete.
func retry[T any](read func() (T, error), again func(error) bool) (T, error) {
	var zero T
	var err error
	for range attempts {
		var v T
		if v, err = read(); err == nil {
			return v, nil
		}
		if !again(err) {
			break
		}
	}
	return zero, err
}
