package nat

import (
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

const nftables = unix.NFNL_SUBSYS_NFTABLES << 8

// message returns a message with texts as its attributes 1, 2 and so on.
func message(kind uint16, family byte, attributes ...string) syscall.NetlinkMessage {
	data := []byte{family, 0, 0, 0}
	for i, text := range attributes {
		data = nlmsg.AppendAttr(data, uint16(1+i), append([]byte(text), 0))
	}
	return syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: data}
}

// A truncated message, or one of another kind, is ignored without a panic.
func TestChangedChain(t *testing.T) {
	rule := message(nftables|msgNewRule, unix.AF_INET6, "filter", "INPUT")
	for _, tc := range []struct {
		name    string
		message syscall.NetlinkMessage
		want    Chain
	}{
		{"rule added", rule, Chain{ip.IPv6, Filter, "INPUT"}},
		{"rule deleted", message(nftables|msgDelRule, unix.AF_INET, "nat", "KUBE-SERVICES"), Chain{ip.IPv4, NAT, "KUBE-SERVICES"}},
		{"chain deleted", message(nftables|msgDelChain, unix.AF_INET, "nat", "handle", "KUBE-SERVICES"), Chain{ip.IPv4, NAT, "KUBE-SERVICES"}},
		{"table deleted", message(nftables|msgDelTable, unix.AF_INET, "nat"), Chain{ip.IPv4, NAT, ""}},
		{"policy set", message(nftables|msgNewChain, unix.AF_INET, "filter", "handle", "FORWARD"), Chain{ip.IPv4, Filter, "FORWARD"}},
		{"chain added", message(nftables|msgNewChain, unix.AF_INET, "nat", "handle", "KUBE-SERVICES"), Chain{}},
		{"of another family", message(nftables|msgNewRule, 1, "nat", "KUBE-SERVICES"), Chain{}},
		{"of another subsystem", message(unix.NFNL_SUBSYS_IPSET<<8|msgNewRule, unix.AF_INET, "nat", "KUBE-SERVICES"), Chain{}},
		{"without a table", message(nftables|msgNewRule, unix.AF_INET), Chain{}},
	} {
		if got, ok := changedChain(tc.message); got != tc.want && ok || ok != (tc.want != Chain{}) {
			t.Errorf("%s: %v, %t; want %v", tc.name, got, ok, tc.want)
		}
	}
	for end := range rule.Data {
		cut := rule
		cut.Data = slices.Clone(rule.Data[:end])
		if got, ok := changedChain(cut); ok && got.Table != Filter {
			t.Errorf("cut at %d: %v", end, got)
		}
	}
}

// FuzzChangedChain: a decoded chain, encoded again, decodes to the same chain.
func FuzzChangedChain(f *testing.F) {
	for _, m := range []syscall.NetlinkMessage{
		message(nftables|msgNewRule, unix.AF_INET6, "filter", "INPUT"), message(nftables|msgDelTable, unix.AF_INET, "nat"),
		message(nftables|msgDelChain, unix.AF_INET, "nat", "handle", "KUBE-SERVICES"), message(unix.NFNL_SUBSYS_IPSET<<8|msgNewRule, unix.AF_INET, "nat"),
	} {
		f.Add(m.Header.Type, m.Data)
	}
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		got, ok := changedChain(syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: data})
		if !ok {
			return
		}
		family := map[ip.Family]byte{ip.IPv4: unix.AF_INET, ip.IPv6: unix.AF_INET6}[got.Family]
		again := message(nftables|msgNewRule, family, string(got.Table), got.Name)
		if got.Name == "" {
			again = message(nftables|msgDelTable, family, string(got.Table))
		}
		if c, ok := changedChain(again); !ok || c != got {
			t.Errorf("%+v is read as %+v, %v", got, c, ok)
		}
	})
}

func TestOwnConcerns(t *testing.T) {
	own := Owned{Chains: []Chain{{ip.IPv4, NAT, "KUBE-SERVICES"}}, Prefixes: []string{"KUBE-IPVS-"}}
	for _, tc := range []struct {
		chain Chain
		want  bool
	}{
		{Chain{ip.IPv4, NAT, "KUBE-SERVICES"}, true},
		{Chain{ip.IPv6, Mangle, "KUBE-IPVS-CLAIM"}, true},
		{Chain{ip.IPv4, Filter, "INPUT"}, true},
		{Chain{ip.IPv4, NAT, ""}, true},
		{Chain{ip.IPv4, Filter, "KUBE-ROUTER-INPUT"}, false},
		{Chain{ip.IPv4, "kube-router", "INPUT"}, false},
	} {
		if got := own.Concerns(tc.chain); got != tc.want {
			t.Errorf("%v: %t, want %t", tc.chain, got, tc.want)
		}
	}
}
