package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Without the configured scheduler, another one is used. An unknown name, or any other
// error, ends the process.
func TestChooseScheduler(t *testing.T) {
	for _, c := range []struct {
		name      string
		configure string
		kernel    []string
		err       error
		want      string // "": an error
	}{
		{"there", "rr", []string{"wrr", "rr"}, unix.ENOENT, "rr"},
		{"missing", "rr", []string{"wlc", "wrr"}, unix.ENOENT, "wrr"},
		{"none", "rr", nil, unix.ENOENT, ""},
		{"a typing error", "rrr", []string{"rr"}, unix.ENOENT, ""},
		{"not permitted", "rr", []string{"wrr"}, unix.EPERM, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := plan.Config{Scheduler: c.configure}
			err := chooseScheduler(&cfg, func(name string) error {
				if slices.Contains(c.kernel, name) {
					return nil
				}
				return fmt.Errorf("probe: %w", c.err)
			})
			switch {
			case c.want == "":
				if !errors.Is(err, c.err) || cfg.MissingScheduler != "" {
					t.Errorf("%v, scheduler %+v", err, cfg)
				}
			case err != nil || cfg.Scheduler != c.want || (cfg.MissingScheduler != "") != (c.want != c.configure):
				t.Errorf("%v, scheduler %q in place of %q", err, cfg.Scheduler, cfg.MissingScheduler)
			}
		})
	}
}

// TestRefusedTimeouts checks that Services are served if the kernel refuses the timeouts, as under
// kube-proxy.
func TestRefusedTimeouts(t *testing.T) {
	before := ipvs.Timeouts{TCP: 900, TCPFin: 120, UDP: 300}
	for set, want := range map[ipvs.Timeouts]ipvs.Timeouts{
		{UDP: 20}:      {TCP: 900, TCPFin: 120, UDP: 20},
		{UDP: 1 << 31}: before,
	} {
		k := ipvs.NewFake()
		cfg := config.Config{Plan: plan.Config{Scheduler: "rr"}, IPVSTimeouts: set}
		if err := prepare(context.Background(), &cfg, k); err != nil {
			t.Errorf("%+v end the process: %v", set, err)
		}
		if got, err := k.Timeouts(); err != nil || got != want {
			t.Errorf("after %+v: %+v, %v, want %+v", set, got, err, want)
		}
	}
}
