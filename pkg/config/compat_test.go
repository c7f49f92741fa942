package config

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// asKubeProxy changes the defaults to those of kube-proxy's IPVS mode.
func asKubeProxy(c *Config) {
	c.Plan.SNAT.Mode = plan.SNATOff
	c.Plan.LocalMark = plan.LocalMark{}
	c.Plan.LeaveToInputPolicy = true
	c.Plan.VIPs.ClusterIPs = plan.ClaimAddress
	c.Plan.VIPs.LoadBalancers = plan.ClaimAddress
	c.Plan.VIPs.ExternalIPs = plan.ClaimAddress
	c.Plan.VIPs.Ping = false
	c.Plan.LocalhostNodePorts = false
	c.Plan.RemoteFallback = true
	c.DrainDeadline = compatDrainDeadline
}

func TestCompatFlags(t *testing.T) {
	for _, tc := range []struct {
		args string
		want func(*Config)
	}{
		{"", func(*Config) {}},
		{"--snat-mode=auto", func(c *Config) { c.Plan.SNAT.Mode = plan.SNATAuto }},
		{"--local-mark=0x9/0x3fff", func(c *Config) { c.Plan.LocalMark = plan.LocalMark{Value: 0x9, Mask: 0x3fff} }},
		{"--claim-load-balancers=port", func(c *Config) { c.Plan.VIPs.LoadBalancers = plan.ClaimPort }},
		{"--claim-external-ips=none", func(c *Config) { c.Plan.VIPs.ExternalIPs = plan.ClaimNone }},
		{"--claim-cluster-ips=route", func(c *Config) { c.Plan.VIPs.ClusterIPs = plan.ClaimRoute }},
		{"--vip-ping=true", func(c *Config) { c.Plan.VIPs.Ping = true }},
		{"--iptables-localhost-nodeports=true", func(c *Config) { c.Plan.LocalhostNodePorts = true }},
		{"--accept-service-traffic=true", func(c *Config) { c.Plan.LeaveToInputPolicy = false }},
		{"--remote-fallback=false", func(c *Config) { c.Plan.RemoteFallback = false }},
		{"--drain-deadline=1m", func(c *Config) { c.DrainDeadline = time.Minute }},
		{"--drain-lost-nodes=false", func(c *Config) { c.ResetLostNodeConnections = true }},
	} {
		want := defaults()
		asKubeProxy(&want)
		tc.want(&want)
		got := mustParse(t, append([]string{"--compat=kube-proxy"}, strings.Fields(tc.args)...)...)
		if diff := cmp.Diff(want, got, compare); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.args, diff)
		}
		// A configuration survives writing and reading, also if a field has the default
		// without the profile.
		name := filepath.Join(t.TempDir(), "written.yaml")
		if err := got.Write(name); err != nil {
			t.Fatal(err)
		}
		read := mustParse(t, "--config="+name)
		read.File, read.Notices, got.Notices = "", nil, nil
		if diff := cmp.Diff(got, read, compare); diff != "" {
			t.Errorf("%s, after writing and reading (-want +got):\n%s", tc.args, diff)
		}
	}
}

func TestCompatFile(t *testing.T) {
	const profile = "compat: kube-proxy\n"
	for _, tc := range []struct {
		name, proxy, own, args string
		want                   func(*Config)
	}{
		{"the file names it", "", profile, "", func(*Config) {}},
		{"a flag names it", "", "", "--compat=kube-proxy", func(*Config) {}},
		{"fields win", "iptables: {localhostNodePorts: true}\n",
			profile + "snat: {mode: fwmark}\nlocalMark: 0x9/0x3fff\nvips: {loadBalancers: route, ping: true}\ndrainDeadline: 2m\ndrainLostNodes: false\n", "",
			func(c *Config) {
				c.Plan.SNAT.Mode = plan.SNATFWMark
				c.Plan.LocalMark = plan.LocalMark{Value: 0x9, Mask: 0x3fff}
				c.Plan.VIPs.LoadBalancers = plan.ClaimRoute
				c.Plan.VIPs.Ping = true
				c.Plan.LocalhostNodePorts = true
				c.DrainDeadline = 2 * time.Minute
				c.ResetLostNodeConnections = true
			}},
		{"fields win over the flag's profile", "", "snat: {mode: fwmark}\n", "--compat=kube-proxy", func(c *Config) { c.Plan.SNAT.Mode = plan.SNATFWMark }},
		{"flags win over both", "", profile + "snat: {mode: fwmark}\n", "--snat-mode=auto", func(c *Config) { c.Plan.SNAT.Mode = plan.SNATAuto }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			name := writeFile(t, proxyHead+"clusterCIDR: 10.244.0.0/16\n"+tc.proxy+ownHead+tc.own)
			want := defaults()
			asKubeProxy(&want)
			tc.want(&want)
			got := mustParse(t, append([]string{"--config=" + name}, strings.Fields(tc.args)...)...)
			want.Plan.LocalTraffic, want.MinSyncPeriod = got.Plan.LocalTraffic, got.MinSyncPeriod
			want.File, want.Notices, got.Notices = name, nil, nil
			if diff := cmp.Diff(want, got, compare); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestCompatUnknown(t *testing.T) {
	_, err := parse(t, "--compat=iptables")
	checkError(t, err, []string{`--compat: Unsupported value: "iptables": supported values: "kube-proxy"`})
	name := writeFile(t, proxyHead+ownHead+"compat: x\n")
	_, err = parse(t, "--config="+name)
	checkError(t, err, []string{name + `: compat: Unsupported value: "x"`})
}
