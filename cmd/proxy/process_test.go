package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

func TestConntrackSysctls(t *testing.T) {
	cfg := &config.Conntrack{MaxPerCore: 32768, Min: 131072, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour}
	want := sysctl.State{
		"net/netfilter/nf_conntrack_max":                     "131072",
		"net/netfilter/nf_conntrack_tcp_timeout_established": "86400",
		"net/netfilter/nf_conntrack_tcp_timeout_close_wait":  "3600",
	}
	if diff := cmp.Diff(want, conntrackSysctls(cfg, 2)); diff != "" {
		t.Error(diff)
	}
	if got := conntrackSysctls(cfg, 16)["net/netfilter/nf_conntrack_max"]; got != "524288" {
		t.Errorf("with 16 CPUs: %s", got)
	}
	if got := conntrackSysctls(&config.Conntrack{}, 2); len(got) != 0 {
		t.Errorf("nothing configured, and %v would be set", got)
	}
}

func TestConntrackMaxIsOnlyRaised(t *testing.T) {
	const limit = "net/netfilter/nf_conntrack_max"
	cfg := &config.Conntrack{MaxPerCore: 1, Min: 1000}
	for have, want := range map[string]string{"500": "1000", "262144": "262144"} {
		kernel := sysctl.NewFake(sysctl.State{limit: have})
		setConntrack(t.Context(), cfg, kernel)
		if got := kernel.Values()[limit]; got != want {
			t.Errorf("from %s to %s, want %s", have, got, want)
		}
	}
}
