package ipset

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Error is a reason for which the kernel refuses a request on sets, beside
// the errnos that all of the kernel shares. It is IPSET_ERR_* of
// <linux/netfilter/ipset/ip_set.h>, and those of the set types.
type Error uint16

// The errors that requests of this package can meet.
const (
	ErrProtocol     Error = 4097 // the request lacks something, e.g. is of the wrong family
	ErrNoType       Error = 4098 // no such set type, or not in this revision
	ErrMaxSets      Error = 4099
	ErrBusy         Error = 4100 // a rule or another set refers to the set
	ErrNoOtherSet   Error = 4101 // the second set to swap is not there
	ErrTypeMismatch Error = 4102 // sets to swap are of different makes
	ErrInvalidCIDR  Error = 4104 // a /0, which no set can hold
	ErrNoMarks      Error = 4114 // a mark for a member of a set without
	ErrFull         Error = 4352 // of a bitmap: port outside its range
	ErrNullElement  Error = 4353 // the unspecified address
	ErrInvalidProto Error = 4354
)

// errPrivate is where ipset's own numbers begin.
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

// named gives the kernel's answer its name, where it is one of ipset's own.
func named(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) && errno >= errPrivate {
		return Error(errno)
	}
	return err
}

// explain adds the cure to an error that does not tell it.
func explain(c Change, err error) error {
	switch {
	case errors.Is(err, ErrNoType):
		return fmt.Errorf("%s: %w; load it with \"modprobe %s\" on the node", c.Set.Type, err, module(c.Set.Type))
	case kernel.IsPermission(err):
		return fmt.Errorf("%w; sets need the capability NET_ADMIN", err)
	}
	return err
}

// module is the kernel module of a set type: ip_set_hash_ipport of
// hash:ip,port.
func module(t Type) string {
	return "ip_set_" + strings.NewReplacer(":", "_", ",", "").Replace(t.kernel())
}
