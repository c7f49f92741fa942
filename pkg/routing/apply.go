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

// stack is what the kernel and the fake differ in. Each method is one request
// and gives the errno that the kernel gives.
type stack interface {
	addLink() error
	deleteLink() error
	addAddress(netip.Addr) error // EEXIST also if the scope is another
	deleteAddress(netip.Addr) error
	misbound() (map[netip.Addr]struct{}, error) // of DummyLink
	addRule(Rule) error
	deleteRule(Rule) error
	rawRules(ip.Family) ([]rawRule, error) // in the kernel's order
	addRaw(rawRule) error                  // also if there is one like it
	deleteRaw(rawRule) error               // the first one like it
	orderLock() sync.Locker                // of the rules around that of table local
	replaceRoute(Route) error
	deleteRoute(Route) error
	// together carries out what it can of changes to VIPs that are of one kind,
	// with few writes, and gives the others back.
	together([]Change) []Change
}

func apply(s stack, changes []Change) []Failure {
	misbound := sync.OnceValues(s.misbound) // read once, and only if needed
	var failures []Failure
	for _, run := range runs(changes) {
		if len(run) > 1 {
			run = s.together(run)
		}
		for _, c := range run {
			if err := change(s, c, misbound); err != nil {
				failures = append(failures, Failure{Change: c, Err: err})
			}
		}
	}
	return failures
}

// runs cuts changes where the order matters: those of one run may be carried
// out in any.
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

// ofVIP tells whether a change is one of those of which there are as many as
// VIPs: an address, or a route that makes one local.
func ofVIP(c Change) bool {
	switch c.Op {
	case AddAddress, DeleteAddress:
		return check(c) == nil
	case AddRoute, DeleteRoute:
		return c.Route.Local && c.Route.Dst.IsSingleIP() && !c.Route.Src.IsValid() && check(c) == nil
	}
	return false
}

func change(s stack, c Change, misbound func() (map[netip.Addr]struct{}, error)) error {
	if err := check(c); err != nil {
		return err
	}
	switch c.Op {
	case AddLink:
		return unless(kernel.IsExist, s.addLink())
	case DeleteLink:
		return unless(kernel.IsNotExist, s.deleteLink())
	case AddAddress:
		return bind(s, c.Address, misbound)
	case DeleteAddress:
		return unless(kernel.IsNotExist, s.deleteAddress(c.Address))
	case AddRule:
		if c.Rule.Action == SkipLocal {
			return skipLocal(s, c.Rule)
		}
		return unless(kernel.IsExist, s.addRule(c.Rule))
	case DeleteRule:
		if c.Rule.Action == SkipLocal {
			return endSkipLocal(s, c.Rule)
		}
		return unless(kernel.IsNotExist, s.deleteRule(c.Rule))
	case AddRoute:
		return s.replaceRoute(c.Route)
	}
	return unless(kernel.IsNotExist, s.deleteRoute(c.Route))
}

// bind adds an address. The kernel cannot change the scope of one that is
// there, so that is removed for the moment between two requests.
func bind(s stack, a netip.Addr, misbound func() (map[netip.Addr]struct{}, error)) error {
	err := s.addAddress(a)
	if !kernel.IsExist(err) {
		return err
	}
	wrong, err := misbound()
	if err != nil {
		return err
	}
	if _, ok := wrong[a]; !ok {
		return nil
	}
	if err := unless(kernel.IsNotExist, s.deleteAddress(a)); err != nil {
		return err
	}
	return unless(kernel.IsExist, s.addAddress(a))
}

func unless(harmless func(error) bool, err error) error {
	if harmless(err) {
		return nil
	}
	return err
}

// check refuses what cannot be put into a request.
func check(c Change) error {
	ok := true
	switch c.Op {
	case AddLink, DeleteLink:
	case AddAddress, DeleteAddress:
		ok = c.Address.IsValid() && !c.Address.Is4In6() && c.Address.Zone() == ""
	case AddRule, DeleteRule:
		ok = soundRule(c.Rule, c.Op)
	case AddRoute, DeleteRoute:
		ok = c.Route.Table > 0 && c.Route.Link != "" &&
			c.Route.Dst.IsValid() && of(c.Route.Family, c.Route.Dst)
	default:
		ok = false
	}
	if !ok {
		return fmt.Errorf("not a sound change: %w", unix.EINVAL)
	}
	return nil
}

func soundRule(r Rule, op Op) bool {
	if r.Action == SkipLocal {
		bare := r == Rule{Family: r.Family, Action: SkipLocal, IIf: r.IIf, Mark: r.Mark, Mask: r.Mask, Stray: r.Stray}
		return bare && of(r.Family, netip.Prefix{}) && (r.Mask != 0 && !r.Stray || r.Stray && op == DeleteRule)
	}
	return r.Action == Lookup && !r.Other && !r.Own && r.Table > 0 && r.Priority > 0 &&
		of(r.Family, r.From) && of(r.Family, r.To)
}

// of tells whether a prefix, if there is one, is masked and of the family,
// and the family is one of the two.
func of(f ip.Family, p netip.Prefix) bool {
	if f != ip.IPv4 && f != ip.IPv6 {
		return false
	}
	return !p.IsValid() || p.Masked() == p && ip.Of(p.Addr()) == f
}

// attempts is how often a read is tried that the kernel's changes disturb.
const attempts = 10

// errChanged tells that what was read does not fit together.
var errChanged = errors.New("the network changed while it was read")

// retry repeats a read after an error for which that helps. The last error is
// given back; what was read along with it is dropped, as it may be a part.
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
