package service

import (
	"net/netip"
	"slices"
	"unique"
)

// updatedUpTo is the largest number of endpoints that a change of a slice may add and remove for
// update to apply it. Each of them moves the endpoints behind it, so for more, merging is cheaper.
const updatedUpTo = 8

// update makes the reports and endpoints those of the present slices, if at most one slice has
// changed, by few endpoints, and each address and port is reported once. Otherwise it changes nothing
// and returns false.
func (k *merged) update(endpointSlices []*Slice) bool {
	if len(k.endpoints) == 0 || len(k.endpoints) != len(k.reports) || len(k.slices) != len(endpointSlices) {
		return false
	}
	changed := -1
	for i, slice := range endpointSlices {
		switch {
		case slice == k.slices[i]:
		case changed >= 0:
			return false
		default:
			changed = i
		}
	}
	if changed >= 0 && !k.replace(changed, endpointSlices[changed]) {
		return false
	}
	k.slices = endpointSlices
	return true
}

// replace replaces the reports and endpoints of one slice by those of its new version; see update.
func (k *merged) replace(slice int, now *Slice) bool {
	was := k.slices[slice]
	port, listed, once := k.numberIn(now)
	switch {
	case !slices.Equal(was.ports, now.ports) || !once:
		return false
	case !listed:
		return true
	case !k.replaceable(was, now, port):
		return false
	}
	eachPair(was, now, func(i, j int) bool {
		switch {
		case j < 0:
			at, _ := k.find(was.endpoints[i].addr, port)
			k.reports, k.endpoints = slices.Delete(k.reports, at, at+1), slices.Delete(k.endpoints, at, at+1)
		case i < 0:
			e := &now.endpoints[j]
			at, _ := k.find(e.addr, port)
			k.reports = slices.Insert(k.reports, at, newReport(e.addr, port, slice, j))
			k.endpoints = slices.Insert(k.endpoints, at, e.endpoint(port))
		case i != j || was.endpoints[i] != now.endpoints[j]:
			e := &now.endpoints[j]
			at, _ := k.find(e.addr, port)
			k.reports[at].at, k.endpoints[at] = int32(j), e.endpoint(port)
		}
		return true
	})
	return true
}

// numberIn returns the number that a slice has for the port, if it lists the port, and whether it does
// so once at most.
func (k *merged) numberIn(slice *Slice) (number uint16, listed, once bool) {
	name := unique.Make(k.name)
	for _, p := range slice.ports {
		if p.name != name || p.protocol != k.protocol {
			continue
		}
		if listed {
			return 0, true, false
		}
		number, listed = p.number, true
	}
	return number, listed, true
}

// replaceable reports whether two versions of a slice differ by few endpoints, and no address is in
// the new one twice or in another slice.
func (k *merged) replaceable(was, now *Slice, port uint16) bool {
	for j := 1; j < len(now.endpoints); j++ {
		if now.endpoints[j].addr == now.endpoints[j-1].addr {
			return false
		}
	}
	differ := 0
	return eachPair(was, now, func(i, j int) bool {
		if i >= 0 && j >= 0 {
			return true
		}
		if i < 0 {
			if _, found := k.find(now.endpoints[j].addr, port); found {
				return false
			}
		}
		differ++
		return differ <= updatedUpTo
	})
}

// eachPair calls f for each address of two versions of a slice, with its positions in both, -1 where
// it is not listed. It stops and returns false if f does.
func eachPair(was, now *Slice, f func(i, j int) bool) bool {
	i, j := 0, 0
	for i < len(was.endpoints) || j < len(now.endpoints) {
		order := -1
		switch {
		case i == len(was.endpoints):
			order = 1
		case j < len(now.endpoints):
			order = was.endpoints[i].addr.Compare(now.endpoints[j].addr)
		}
		proceed := false
		switch order {
		case -1:
			proceed = f(i, -1)
			i++
		case 1:
			proceed = f(-1, j)
			j++
		default:
			proceed = f(i, j)
			i, j = i+1, j+1
		}
		if !proceed {
			return false
		}
	}
	return true
}

// find returns the position of an address and port among the reports, or the one to insert it at.
func (k *merged) find(addr netip.Addr, port uint16) (at int, found bool) {
	first := newReport(addr, port, 0, 0) // sorts before all others of the address and port
	at, _ = slices.BinarySearchFunc(k.reports, first, func(a, b report) int { return a.compare(&b) })
	return at, at < len(k.reports) && k.reports[at].sameDest(&first)
}
