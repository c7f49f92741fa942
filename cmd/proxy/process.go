package main

import (
	"context"
	"maps"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// setOOMScore keeps the process from being the kernel's first victim when memory runs
// out: without the process, the node no longer follows changes of Services.
func setOOMScore(ctx context.Context, score int32) {
	err := os.WriteFile(oomScoreFile, []byte(strconv.Itoa(int(score))), 0)
	if err == nil {
		return
	}
	logger := klog.FromContext(ctx)
	if have, errRead := os.ReadFile(oomScoreFile); errRead == nil && strings.HasPrefix(string(have), "-") {
		// The kubelet has set -997 for the priority class system-node-critical.
		logger.V(2).Info("Keeping the OOM score, which only a privileged process can lower", "score", strings.TrimSpace(string(have)))
		return
	}
	logger.Error(err, "Cannot set --oom-score-adj", "score", score)
}

const oomScoreFile = "/proc/self/oom_score_adj"

// Keys of the size of the conntrack table: the most entries, and the buckets of their hash
// table, which does not grow by itself.
const (
	conntrackMax     = "net/netfilter/nf_conntrack_max"
	conntrackBuckets = "net/netfilter/nf_conntrack_buckets"
)

// setConntrack sizes connection tracking, and sets its timeouts. The size applies to the whole
// machine, so it is only raised. Values that are right, perhaps because an init container has set
// them, are not written: /proc/sys may be read-only. A failure is only logged: Services work
// without it.
func setConntrack(ctx context.Context, cfg *config.Conntrack, kernel sysctlKernel) {
	want := conntrackSysctls(cfg, cpus(onlineCPUs))
	have := sysctl.ObserveReadable(kernel.Observe, maps.Keys(want))
	for _, size := range []string{conntrackMax, conntrackBuckets} {
		if atLeast(have[size], want[size]) {
			delete(want, size)
		}
	}
	for _, failure := range applySysctls(ctx, kernel, sysctl.Diff(have, want)) {
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

// onlineCPUs lists the machine's CPUs.
const onlineCPUs = "/sys/devices/system/cpu/online"

// cpus counts the CPUs in a list such as "0-3,8". Unlike runtime.NumCPU, this includes those
// that the process may not use, because the kubelet has given them to single pods
// (kubernetes#99225). It returns runtime.NumCPU if the list cannot be read.
func cpus(list string) int {
	text, err := os.ReadFile(list)
	if err != nil {
		return runtime.NumCPU()
	}
	n := 0
	for _, part := range strings.Split(strings.TrimSpace(string(text)), ",") {
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		first, errFirst := strconv.Atoi(low)
		last, errLast := strconv.Atoi(high)
		if errFirst != nil || errLast != nil || last < first {
			return runtime.NumCPU()
		}
		n += last - first + 1
	}
	return n
}

const (
	// maxScaled limits the table of machines with many CPUs, as in kube-proxy.
	maxScaled = 1 << 20
	// bucketsPerPage divides every number of buckets that the kernel stores: it rounds up to
	// whole pages of 4 to 64 KiB.
	bucketsPerPage = 64 << 10 / 8
)

// conntrackSysctls returns the parameters for kube-proxy's --conntrack-* flags. Zero
// keeps the kernel's value. There is a bucket for every four entries, as in kube-proxy.
func conntrackSysctls(cfg *config.Conntrack, cpus int) sysctl.State {
	want := sysctl.State{}
	if cfg.MaxPerCore > 0 {
		most := max(min(int(cfg.MaxPerCore)*cpus, maxScaled), int(cfg.Min))
		pages := (most/4 + bucketsPerPage - 1) / bucketsPerPage
		want[conntrackMax], want[conntrackBuckets] = strconv.Itoa(most), strconv.Itoa(pages*bucketsPerPage)
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
