package reconcile

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"unique"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// seeds make hashes unpredictable: users choose addresses and ports.
var seeds = [2]uint64{rand.Uint64(), rand.Uint64()}

// hashAddr hashes an address and another value.
func hashAddr(a netip.Addr, more uint64) uint64 {
	b := a.As16()
	high, low := bits.Mul64(binary.NativeEndian.Uint64(b[:8])^more^seeds[0], binary.NativeEndian.Uint64(b[8:])^seeds[1])
	high, low = bits.Mul64(high^more^seeds[1], low^seeds[0])
	return high ^ low
}

func hashServer(k ipvs.Key) uint64 {
	return hashAddr(k.Addr, uint64(k.FWMark)<<32|uint64(k.Port)<<8|uint64(k.Protocol))
}

func hashMember(k memberKey) uint64 {
	h := hashAddr(k.addr, uint64(k.set)<<32|uint64(k.port)<<8|uint64(k.protocol))
	if k.more != (unique.Handle[memberRest]{}) {
		rest := k.more.Value()
		h ^= hashAddr(rest.addr2, 0) ^ hashAddr(rest.net.Addr(), uint64(rest.net.Bits()))
	}
	return h
}

func hashVIP(v plan.VIP) uint64 { return hashAddr(v.Addr, 0) }
