package main

import (
	"context"
	"os"
	"runtime"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// setOOMScore keeps the process from being the kernel's first victim when memory runs
// out: without the process, the node no longer follows changes of Services.
func setOOMScore(ctx context.Context, score int32) {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(int(score))), 0); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot set --oom-score-adj", "score", score)
	}
}

// setConntrack sizes connection tracking. The size applies to the whole machine, so it
// is only raised. A failure, as in a container with a read-only /proc/sys, is only
// logged: Services work without it.
func setConntrack(ctx context.Context, cfg *config.Conntrack, kernel sysctlKernel) {
	want := conntrackSysctls(cfg, runtime.NumCPU())
	const limit = "net/netfilter/nf_conntrack_max"
	if have, err := kernel.Observe([]string{limit}); err == nil && atLeast(have[limit], want[limit]) {
		delete(want, limit)
	}
	for _, failure := range kernel.Apply(sysctl.Diff(nil, want)) {
		klog.FromContext(ctx).Error(failure.Err, "Cannot set a connection tracking parameter",
			"sysctl", failure.Change.Key, "value", failure.Change.Value)
	}
}

// sysctlKernel is the part of package sysctl that is used here.
type sysctlKernel interface {
	Observe([]string) (sysctl.State, error)
	Apply([]sysctl.Change) []sysctl.Failure
}

// atLeast compares two decimal numbers.
func atLeast(have, want string) bool {
	h, errHave := strconv.Atoi(have)
	w, errWant := strconv.Atoi(want)
	return errHave == nil && errWant == nil && h >= w
}

// conntrackSysctls returns the parameters for kube-proxy's --conntrack-* flags. Zero
// keeps the kernel's value.
func conntrackSysctls(cfg *config.Conntrack, cpus int) sysctl.State {
	want := sysctl.State{}
	if cfg.MaxPerCore > 0 {
		want["net/netfilter/nf_conntrack_max"] = strconv.Itoa(max(int(cfg.MaxPerCore)*cpus, int(cfg.Min)))
	}
	for key, d := range map[string]time.Duration{
		"nf_conntrack_tcp_timeout_established": cfg.TCPEstablished,
		"nf_conntrack_tcp_timeout_close_wait":  cfg.TCPCloseWait,
		"nf_conntrack_udp_timeout":             cfg.UDP,
		"nf_conntrack_udp_timeout_stream":      cfg.UDPStream,
	} {
		if d > 0 {
			want["net/netfilter/"+key] = strconv.Itoa(int(d / time.Second))
		}
	}
	if cfg.TCPBeLiberal {
		want["net/netfilter/nf_conntrack_tcp_be_liberal"] = "1"
	}
	return want
}
