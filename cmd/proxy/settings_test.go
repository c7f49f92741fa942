package main

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
)

// proc creates a /proc with processes by PID.
func proc(t *testing.T, processes map[string][]string) string {
	t.Helper()
	root := t.TempDir()
	write := func(pid, file, text string) {
		if err := os.MkdirAll(filepath.Join(root, pid, "ns"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, pid, file), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	namespace := func(pid, name string) {
		if err := os.Symlink(name, filepath.Join(root, pid, "ns/net")); err != nil {
			t.Fatal(err)
		}
	}
	write("self", "comm", "kube-ipvs\n")
	namespace("self", "net:[1]")
	for pid, args := range processes {
		write(pid, "comm", args[0]+"\n")
		write(pid, "cmdline", strings.Join(args[1:], "\x00")+"\x00")
		namespace(pid, map[bool]string{true: "net:[2]", false: "net:[1]"}[pid == "99"])
	}
	return root
}

// TestSettingsOfTheRunningProxy: commands use the configuration of the proxy that serves
// this network namespace, and of no other.
func TestSettingsOfTheRunningProxy(t *testing.T) {
	folder := t.TempDir()
	o := settingsFlags{proc: proc(t, map[string][]string{
		"5":  {"sh", "sh", "--cluster-cidr=10.5.0.0/16"},
		"6":  {"kube-ipvs", "/bin/kube-ipvs", "doctor"},
		"7":  {"kube-ipvs", "/bin/kube-ipvs", "--once", "--cluster-cidr=10.7.0.0/16"},
		"8":  {"kube-ipvs", "/bin/kube-ipvs", "--manifests", folder, "--hostname-override=node8", "--cluster-cidr=10.8.0.0/16", "--probe-bind-address=127.0.0.1:1234", "-v=4"},
		"99": {"kube-ipvs", "/bin/kube-ipvs", "--cluster-cidr=10.9.0.0/16"},
	})}
	s, notes, err := o.settings()
	if err != nil || len(notes) > 0 {
		t.Fatal(err, notes)
	}
	if s.PID != 8 || s.Plan.NodeName != "node8" || s.Source.Manifests != folder || s.Probes.String() != "127.0.0.1:1234" {
		t.Errorf("%d, %s, %+v, %s", s.PID, s.Plan.NodeName, s.Source, s.Probes)
	}
	o.kubeconfig = "/k"
	if s, _, _ = o.settings(); s.Source.Kubeconfig != "/k" || s.Source.Manifests != "" {
		t.Errorf("--kubeconfig does not take precedence: %+v", s.Source)
	}
	o.hostname = "Other"
	if s, _, _ = o.settings(); s.Plan.NodeName != "other" {
		t.Errorf("--hostname-override does not take precedence: %s", s.Plan.NodeName)
	}
}

// TestSettingsWithoutAProxy: the defaults suffice to inspect a node, and unusable
// configurations are reported.
func TestSettingsWithoutAProxy(t *testing.T) {
	o := settingsFlags{proc: proc(t, nil)}
	s, notes, err := o.settings()
	if err != nil || s.PID != 0 || s.Origin != "the defaults" || len(notes) > 0 {
		t.Errorf("%v, %v, %+v", err, notes, s.Origin)
	}
	o.proc = proc(t, map[string][]string{"8": {"kube-ipvs", "/bin/kube-ipvs", "--config=/nowhere"}})
	s, notes, err = o.settings()
	if err != nil || s.Origin != "the defaults" || len(notes) != 1 || !strings.Contains(notes[0], "process 8") {
		t.Errorf("%v, %v, %+v", err, notes, s.Origin)
	}
	o.config = "/nowhere"
	if _, _, err = o.settings(); err == nil {
		t.Error("--config names a missing file, but there is no error")
	}
	o.config = filepath.Join(t.TempDir(), "config.yaml")
	text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclientConnection: {kubeconfig: /pod/kubeconfig}\n"
	if err := os.WriteFile(o.config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if s, _, err = o.settings(); err != nil || s.Source.Kubeconfig != "/pod/kubeconfig" {
		t.Errorf("%v, %+v", err, s.Source)
	}
}

// TestNamesThatCannotBeRead: the result is no names, and one note.
func TestNamesThatCannotBeRead(t *testing.T) {
	var notes strings.Builder
	s := settings{Config: config.Config{Source: config.Source{Kubeconfig: "/nowhere"}}}
	names := s.names(t.Context(), &notes)
	if names == nil || len(names.Services()) != 0 || strings.Count(notes.String(), "\n") != 1 {
		t.Errorf("%v, %q", names, notes.String())
	}
}

// TestExitCodes: the exit codes distinguish findings from failures.
func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		args []string
		want int
	}{
		{[]string{"doctor", "--nonsense"}, exitFailed},
		{[]string{"trace", "--output", "xml"}, exitFailed},
		{[]string{"get", "nothing"}, exitFailed},
		{[]string{"--nonsense"}, exitStopped},
		{[]string{"get", "--help"}, 0},
		{[]string{"status", "--config", "/nowhere"}, exitFailed},
	} {
		var errors strings.Builder
		cmd := newCommand(nil)
		cmd.SetOut(&strings.Builder{})
		if got := execute(cmd, c.args, &errors); got != c.want || (got != 0) == (errors.String() == "") {
			t.Errorf("%q: ends with %d, want %d: %s", c.args, got, c.want, errors.String())
		}
	}
}

// After a restart the node has the VIPs of the earlier process.
func TestMetricsAddressIsNoVIP(t *testing.T) {
	network := func(s string) net.Addr {
		p := netip.MustParsePrefix(s)
		return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	}
	vips := []net.Addr{network("10.0.0.1/32"), network("10.0.0.10/32")}
	have := append([]net.Addr{network("127.0.0.1/8"), network("10.20.0.5/16")}, vips...)
	in := netip.MustParsePrefix("10.0.0.0/8")
	if got, ok := lowestAddress(in, have, vips); !ok || got != netip.MustParseAddr("10.20.0.5") {
		t.Errorf("%s, %t, want the node's address", got, ok)
	}
	if got, ok := lowestAddress(in, vips, vips); ok {
		t.Errorf("%s, want none", got)
	}
}

// TestMetricsAddress: a CIDR selects an address of the node.
func TestMetricsAddress(t *testing.T) {
	for in, want := range map[string]string{"127.0.0.0/8": "127.0.0.1:10249", "240.0.0.0/8": "", "": "10.0.0.1:10249"} {
		cfg := config.Config{Metrics: netip.MustParseAddrPort("10.0.0.1:10249")}
		if in != "" {
			cfg.MetricsIn = netip.MustParsePrefix(in)
		}
		got, err := metricsAddress(&cfg)
		if (err == nil) != (want != "") || err == nil && got.String() != want {
			t.Errorf("%s: %s, %v, want %s", in, got, err, want)
		}
	}
}

// TestAPIServers: client-go accepts an address without a scheme.
func TestAPIServers(t *testing.T) {
	for master, want := range map[string]string{
		"https://10.0.0.1:6443": "10.0.0.1:6443",
		"https://[fd00::1]":     "[fd00::1]:443",
		"http://10.0.0.1":       "10.0.0.1:80",
		"10.0.0.1:6443":         "10.0.0.1:6443",
		"https://api.example":   "",
	} {
		var got string
		for _, a := range apiServers(&config.Source{Master: master}) {
			got += a.String()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", master, got, want)
		}
	}
}
