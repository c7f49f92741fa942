package conntrack

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func openFake(testing.TB) table {
	f := NewFake()
	return table{&f.client, f.Add, f.Entries}
}

func TestFakeLongest(t *testing.T) {
	f := NewFake()
	f.Timeout = lifetime
	testLongest(t, table{&f.client, f.Add, f.Entries})
}

func TestFake(t *testing.T) { testDelete(t, openFake) }

func TestOneDumpForAFamily(t *testing.T) {
	f := NewFake()
	var matches []Match
	for port := range uint16(10) {
		e := flow(ip.UDP, port, "10.96.0.1:53", "192.0.2.1:53")
		f.Add(e)
		matches = append(matches, Match{Protocol: ip.UDP, OriginalDst: e.OriginalDst, ReplySrc: e.ReplySrc})
	}
	if n, err := f.Delete(matches); n != 10 || err != nil {
		t.Error(n, err)
	}
	if n := f.Dumps(); n != 1 {
		t.Errorf("%d dumps", n)
	}
	if n, err := f.Delete(nil); n != 0 || err != nil || f.Dumps() != 0 {
		t.Error("a dump without matches", n, err)
	}
}

func TestErrors(t *testing.T) {
	a, b := flow(ip.UDP, 1, "10.96.0.1:53", "192.0.2.1:53"), flow(ip.UDP, 2, "10.96.0.1:53", "192.0.2.1:53")
	all := []Match{{Protocol: ip.UDP, OriginalDst: a.OriginalDst}}
	t.Run("transient", func(t *testing.T) {
		f := NewFake()
		f.Add(a, b)
		dumps := 0
		f.FailDump = func() error {
			if dumps++; dumps == 1 {
				return unix.EINTR
			}
			return nil
		}
		if n, err := f.Delete(all); n != 2 || err != nil {
			t.Error(n, err)
		}
	})
	t.Run("one is refused, the others are deleted", func(t *testing.T) {
		f := NewFake()
		f.Add(a, b)
		f.Refuse = func(e Entry) error {
			if e == a {
				return unix.EPERM
			}
			return nil
		}
		if n, err := f.Delete(all); n != 1 || !errors.Is(err, unix.EPERM) || len(f.Entries()) != 1 {
			t.Error(n, err, f.Entries())
		}
	})
	t.Run("one expires meanwhile", func(t *testing.T) {
		f := NewFake()
		f.Add(a, b)
		f.Refuse = func(e Entry) error {
			if e == a {
				return unix.ENOENT
			}
			return nil
		}
		if n, err := f.Delete(all); n != 1 || err != nil {
			t.Error(n, err)
		}
	})
}
