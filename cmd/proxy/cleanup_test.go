package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// TestAwaitTakeOver waits only for a kube-proxy that runs.
func TestAwaitTakeOver(t *testing.T) {
	broken := errors.New("broken")
	for _, tc := range []struct {
		name  string
		mode  string
		taken time.Duration // when kube-proxy has taken over; 0 is never
		err   error
		want  time.Duration
		fails string
	}{
		{name: "no kube-proxy", want: 0},
		{name: "kube-proxy in nftables mode", mode: "nftables", want: 0},
		{name: "kube-proxy that has synced", mode: "ipvs", taken: time.Nanosecond, want: time.Second},
		{name: "kube-proxy that syncs later", mode: "iptables", taken: 50500 * time.Millisecond, want: 51 * time.Second},
		{name: "kube-proxy that never syncs", mode: "iptables", want: kubeProxyLimit + time.Second, fails: "(mode: iptables) runs, but has not written its rules for [IPv6]"},
		{name: "kube-proxy that does not answer yet", mode: doctor.UnknownMode, taken: 3 * time.Second, want: 3 * time.Second},
		{name: "the kernel cannot be read", mode: "iptables", err: broken, fails: "broken"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				err := awaitKubeProxy(t.Context(), func(context.Context) string { return tc.mode }, func() ([]ip.Family, error) {
					if tc.taken > 0 && time.Since(begin) >= tc.taken {
						return nil, nil
					}
					return []ip.Family{ip.IPv6}, tc.err
				})
				if (err == nil) != (tc.fails == "") || err != nil && !strings.Contains(err.Error(), tc.fails) {
					t.Errorf("error %v, want %q", err, tc.fails)
				}
				if took := time.Since(begin); took != tc.want {
					t.Errorf("took %s, want %s", took, tc.want)
				}
			})
		})
	}
}
