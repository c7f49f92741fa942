package nat

import (
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func TestSourceTranslations(t *testing.T) {
	const none = "none"
	for rule, from := range map[Rule]string{
		"-j ACCEPT": none,
		"-m comment --comment \"-j MASQUERADE\" -j ACCEPT":                          none,
		"-m mark --mark 0x2000/0x2000 -j MASQUERADE":                                none,
		"-m set --match-set cali40masq-ipam-pools src -j MASQUERADE --random-fully": none,
		"-i wg0 -j MASQUERADE":                                                      none,
		"! -s 10.244.0.0/16 -d 10.244.0.0/16 -j MASQUERADE --random-fully":          "",
		"-m set ! --match-set pods src -j MASQUERADE":                               "",
		"-m mark ! --mark 0x4000/0x4000 -j SNAT --to-source 192.0.2.1":              "",
		"-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE":                               "172.17.0.0/16",
		"-s 10.8.0.2/32 -o eth0 -j SNAT --to-source 192.0.2.1":                      "10.8.0.2/32",
	} {
		got := sourceTranslations(Chain{Family: ip.IPv4, Table: NAT, Name: "POSTROUTING"}, []Rule{rule})
		if from == none {
			if len(got) != 0 {
				t.Errorf("%s: %+v", rule, got)
			}
			continue
		}
		want, _ := netip.ParsePrefix(from)
		if len(got) != 1 || got[0].From != want {
			t.Errorf("%s: %+v, want %v", rule, got, want)
		}
	}
	if got := sourceTranslations(Chain{Table: Mangle}, []Rule{"-j SNAT"}); got != nil {
		t.Errorf("table mangle: %+v", got)
	}
}
