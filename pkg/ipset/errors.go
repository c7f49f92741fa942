package ipset

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Error is an error of ipset, in addition to the common errnos: IPSET_ERR_* of
// <linux/netfilter/ipset/ip_set.h>, and those of the set types.
type Error uint16

// Errors that requests of this package can return.
const (
	ErrProtocol     Error = 4097 // something is missing, or of the wrong family
	ErrNoType       Error = 4098 // no such set type or revision
	ErrMaxSets      Error = 4099
	ErrBusy         Error = 4100 // a rule or another set refers to the set
	ErrNoOtherSet   Error = 4101 // the second set to swap does not exist
	ErrTypeMismatch Error = 4102 // sets to swap are of different types
	errNoMember     Error = 4103 // of a look-up
	ErrInvalidCIDR  Error = 4104 // a /0, which a set cannot contain
	ErrNoMarks      Error = 4114 // a mark for a member of a set without marks
	ErrFull         Error = 4352 // a hash set is full; for a bitmap: port outside its range
	ErrNullElement  Error = 4353 // the unspecified address
	ErrInvalidProto Error = 4354
)

// errPrivate is the first of ipset's own numbers.
const errPrivate = 4096

func (e Error) Error() string {
	switch e {
	case ErrProtocol:
		return "entry or set does not fit the set's type or family"
	case ErrNoType:
		return "the kernel has no such set type"
	case ErrMaxSets:
		return "the kernel's maximum of sets is reached"
	case ErrBusy:
		return "set is in use"
	case ErrNoOtherSet:
		return "the set to swap with does not exist"
	case ErrTypeMismatch:
		return "sets are of different types or families"
	case ErrInvalidCIDR:
		return "invalid prefix length (no set can hold a /0)"
	case ErrNoMarks:
		return "the set's members carry no marks"
	case ErrFull:
		return "set is full"
	case ErrNullElement:
		return "the unspecified address cannot be a member"
	case ErrInvalidProto:
		return "invalid protocol"
	}
	return fmt.Sprintf("ipset error %d", uint16(e))
}

// named converts ipset's own numbers to Error.
func named(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) && errno >= errPrivate {
		return Error(errno)
	}
	return err
}

// explain adds the fix to an error.
func explain(c Change, err error) error {
	switch {
	case errors.Is(err, ErrNoType):
		return fmt.Errorf("%s: %w; load it with \"modprobe %s\" on the node", c.Set.Type, err, module(c.Set.Type))
	case kernel.IsPermission(err):
		return fmt.Errorf("%w; sets need CAP_NET_ADMIN", err)
	}
	return err
}

// module returns the kernel module of a set type: ip_set_hash_ipport for hash:ip,port.
func module(t Type) string {
	return "ip_set_" + strings.NewReplacer(":", "_", ",", "").Replace(t.kernel())
}
