package config

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// parse runs a command line.
func parse(t *testing.T, args ...string) (Config, error) {
	t.Helper()
	o := NewOptions()
	o.Hostname = func() (string, error) { return " Node-A\n", nil }
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	fs.SetOutput(&strings.Builder{})
	for _, section := range o.Flags().FlagSets {
		fs.AddFlagSet(section)
	}
	if err := fs.Parse(args); err != nil {
		return Config{}, err
	}
	return o.Complete()
}

func mustParse(t *testing.T, args ...string) Config {
	t.Helper()
	c, err := parse(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// writeFile writes a configuration file and returns its name.
func writeFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

const (
	proxyHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	ownHead   = "---\napiVersion: kube-ipvs.io/v1alpha1\nkind: KubeIPVSConfiguration\n"
)

// compare ignores fields that repeat others in another form.
var compare = cmp.Options{
	cmpopts.IgnoreFields(Config{}, "Proxy", "Own", "Flags", "Features", "Logging"),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmpopts.EquateEmpty(),
}

// defaults is the result without any flag.
func defaults() Config {
	p := scenario.DefaultConfig() // that of the tests of the plan
	p.NodeName, p.Families, p.LocalhostNodePorts = "node-a", ip.Families, true
	return Config{
		Plan:          p,
		SyncPeriod:    30 * time.Second,
		MinSyncPeriod: time.Second,
		Conntrack: Conntrack{
			MaxPerCore: 32768, Min: 131072,
			TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour,
		},
		Healthz: netip.MustParseAddrPort("0.0.0.0:10256"),
		Metrics: netip.MustParseAddrPort("127.0.0.1:10249"),
		Probes:  netip.MustParseAddrPort("127.0.0.1:10266"),
		Source: Source{
			ContentType: "application/vnd.kubernetes.protobuf", QPS: 5, Burst: 10,
			ConfigSyncPeriod: 15 * time.Minute,
		},
		DrainDeadline: 15 * time.Minute,
		StateDir:      "/run/kube-ipvs",
		OOMScoreAdj:   -999,
		Action:        Serve,
		Notices: []string{
			"--cluster-cidr is not set: Pods cannot be distinguished from other clients, so traffic to cluster IPs is not masqueraded",
		},
	}
}

func TestDefaults(t *testing.T) {
	got := mustParse(t)
	if diff := cmp.Diff(defaults(), got, compare); diff != "" {
		t.Error(diff)
	}
	if got.Logging.Format != "text" {
		t.Errorf("logging format %q", got.Logging.Format)
	}
}

func TestFlags(t *testing.T) {
	pfx := netip.MustParsePrefix
	for _, tc := range []struct {
		args string
		want func(*Config)
	}{
		{"--hostname-override=\tNode-B ", func(c *Config) { c.Plan.NodeName = "node-b" }},
		{"--cluster-cidr=10.244.1.0/16,fd00::/56", func(c *Config) {
			c.Plan.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{pfx("10.244.0.0/16"), pfx("fd00::/56")}}
			c.Notices = nil
		}},
		{"--detect-local-mode=NodeCIDR", func(c *Config) { c.Plan.LocalTraffic.Mode = plan.DetectNodeCIDR; c.Notices = nil }},
		{"--detect-local-mode=BridgeInterface --pod-bridge-interface=cni0 --cluster-cidr=wrong-but-unused", func(c *Config) {
			c.Plan.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectBridgeInterface, Interface: "cni0"}
			c.Notices = nil
		}},
		{"--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=veth", func(c *Config) {
			c.Plan.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectInterfaceNamePrefix, Interface: "veth"}
			c.Notices = nil
		}},
		{"--ipvs-scheduler=mh", func(c *Config) { c.Plan.Scheduler = "mh" }},
		{"--ipvs-udp-timeout=90500ms --conntrack-tcp-timeout-established=1440h", func(c *Config) {
			c.IPVSTimeouts.UDP, c.Conntrack.TCPEstablished = 90, 1440*time.Hour
			c.Notices = append(c.Notices, "--ipvs-udp-timeout: 1m30.5s is rounded down to 1m30s: the kernel takes whole seconds")
		}},
		{"--ipvs-sync-period=1m --ipvs-min-sync-period=0", func(c *Config) { c.SyncPeriod = time.Minute; c.MinSyncPeriod = 0 }},
		{"--ipvs-exclude-cidrs=10.9.0.0/16,fd09::/64", func(c *Config) {
			c.Plan.ExcludeCIDRs = []netip.Prefix{pfx("10.9.0.0/16"), pfx("fd09::/64")}
		}},
		{"--ipvs-strict-arp", func(c *Config) { c.Plan.StrictARP = true }},
		{"--ipvs-tcp-timeout=15m --ipvs-tcpfin-timeout=30s --ipvs-udp-timeout=5s", func(c *Config) {
			c.IPVSTimeouts = ipvs.Timeouts{TCP: 900, TCPFin: 30, UDP: 5}
		}},
		{"--masquerade-all --iptables-masquerade-bit=5", func(c *Config) {
			c.Plan.MasqueradeAll, c.Plan.MasqueradeMark, c.Plan.SNAT.Mark = true, 0x20, 0x3040
			c.Plan.LocalMark.Mask = 0x3fdf
		}},
		{"--iptables-masquerade-bit=0", func(c *Config) {
			c.Plan.MasqueradeMark, c.Plan.LocalMark = 0x1, plan.LocalMark{Value: 0xa, Mask: 0x3ffe}
		}},
		{"--iptables-masquerade-bit=1", func(c *Config) { c.Plan.MasqueradeMark, c.Plan.LocalMark.Mask = 0x2, 0x3ffd }},
		{"--iptables-masquerade-bit=2", func(c *Config) {
			c.Plan.MasqueradeMark, c.Plan.LocalMark.Mask, c.Plan.VIPs.Mark = 0x4, 0x3ffb, 0x2
		}},
		{"--iptables-masquerade-bit=3", func(c *Config) {
			c.Plan.MasqueradeMark, c.Plan.LocalMark = 0x8, plan.LocalMark{Value: 0x3, Mask: 0x3ff7}
		}},
		{"--nodeport-addresses=primary", func(c *Config) { c.Plan.NodePortAddresses.Primary = true }},
		{"--nodeport-addresses=192.168.0.0/16", func(c *Config) {
			c.Plan.NodePortAddresses.Prefixes = []netip.Prefix{pfx("192.168.0.0/16")}
		}},
		{"--bind-address=fd00::1", func(c *Config) { c.Plan.NodeAddress = netip.MustParseAddr("fd00::1") }},
		{"--bind-address=::", func(*Config) {}},
		// kube-proxy reads leading zeros as decimal, and IPv4-mapped IPv6 as IPv4.
		{"--bind-address=010.0.0.01", func(c *Config) { c.Plan.NodeAddress = netip.MustParseAddr("10.0.0.1") }},
		{"--bind-address=::ffff:10.0.0.1", func(c *Config) { c.Plan.NodeAddress = netip.MustParseAddr("10.0.0.1") }},
		{"--healthz-bind-address=127.000.000.001:010 --metrics-bind-address=010.0.0.1", func(c *Config) {
			c.Healthz, c.Metrics = netip.MustParseAddrPort("127.0.0.1:10"), netip.MustParseAddrPort("10.0.0.1:10249")
		}},
		{"--nodeport-addresses=010.0.0.0/8,::ffff:11.0.0.0/104", func(c *Config) {
			c.Plan.NodePortAddresses.Prefixes = []netip.Prefix{pfx("10.0.0.0/8"), pfx("11.0.0.0/8")}
		}},
		{"--cluster-cidr=010.244.0.0/16", func(c *Config) {
			c.Plan.LocalTraffic, c.Notices = plan.LocalTraffic{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{pfx("10.244.0.0/16")}}, nil
		}},
		{"--bind-address=127.0.0.1", func(*Config) {}},
		{"--bind-address=", func(*Config) {}},
		{"--proxy-mode=ipvs", func(*Config) {}},
		{"--cleanup", func(c *Config) { c.Action = Cleanup }},
		{"--init-only", func(c *Config) { c.Action = InitOnly }},
		{"--once --manifests=/m", func(c *Config) { c.Action = Once; c.Source.Manifests = "/m" }},
		{"--healthz-bind-address=[::]:1 --metrics-bind-address=::1", func(c *Config) {
			c.Healthz, c.Metrics = netip.MustParseAddrPort("[::]:1"), netip.MustParseAddrPort("[::1]:10249")
		}},
		{"--metrics-bind-address=10.1.2.3/8", func(c *Config) {
			c.Metrics, c.MetricsIn = netip.MustParseAddrPort("10.0.0.0:10249"), netip.MustParsePrefix("10.0.0.0/8")
		}},
		{"--metrics-bind-address=[fd00::/8]:9", func(c *Config) {
			c.Metrics, c.MetricsIn = netip.MustParseAddrPort("[fd00::]:9"), netip.MustParsePrefix("fd00::/8")
		}},
		// kube-proxy ignores an empty address, and a port if the address has one, as the default has.
		{"--healthz-bind-address= --metrics-bind-address=", func(*Config) {}},
		{"--healthz-port=0 --metrics-port=0", func(c *Config) { c.Healthz, c.Metrics = netip.AddrPort{}, netip.AddrPort{} }},
		{"--healthz-bind-address= --healthz-port=0 --metrics-port=10249", func(c *Config) { c.Healthz = netip.AddrPort{} }},
		{"--healthz-port=7 --metrics-bind-address=127.0.0.2 --metrics-port=8", func(c *Config) {
			c.Metrics = netip.MustParseAddrPort("127.0.0.2:8")
			c.Notices = append([]string{"--healthz-port has no effect, as in kube-proxy: --healthz-bind-address is 0.0.0.0:10256"}, c.Notices...)
		}},
		{"--master=10.0.0.1:6443", func(c *Config) { c.Source.Master = "10.0.0.1:6443" }},
		{"--bind-address-hard-fail --profiling", func(c *Config) { c.BindAddressHardFail, c.Profiling = true, true }},
		{"--show-hidden-metrics-for-version=1.35", func(c *Config) { c.ShowHiddenMetricsForVersion = "1.35" }},
		{"--conntrack-max-per-core=0 --conntrack-min=1", func(c *Config) { c.Conntrack.MaxPerCore, c.Conntrack.Min = 0, 1 }},
		{"--conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=2s", func(c *Config) {
			c.Conntrack.TCPEstablished, c.Conntrack.TCPCloseWait = 0, 2*time.Second
		}},
		{"--conntrack-tcp-be-liberal --conntrack-udp-timeout=3s --conntrack-udp-timeout-stream=4s", func(c *Config) {
			c.Conntrack.TCPBeLiberal, c.Conntrack.UDP, c.Conntrack.UDPStream = true, 3*time.Second, 4*time.Second
		}},
		{"--kubeconfig=/k --master=https://10.0.0.1:6443", func(c *Config) { c.Source.Kubeconfig, c.Source.Master = "/k", "https://10.0.0.1:6443" }},
		{"--kube-api-qps=-1 --kube-api-burst=99 --kube-api-content-type=application/json", func(c *Config) {
			c.Source.QPS, c.Source.Burst, c.Source.ContentType = -1, 99, "application/json"
		}},
		{"--config-sync-period=1h --oom-score-adj=-1000", func(c *Config) { c.Source.ConfigSyncPeriod, c.OOMScoreAdj = time.Hour, -1000 }},
		{"--udp-drain --drain-deadline=90s", func(c *Config) { c.Plan.UDPDrain, c.DrainDeadline = true, 90*time.Second }},
		{"--reset-lost-node-connections", func(c *Config) { c.ResetLostNodeConnections = true }},
		{"--drain-lost-nodes", func(*Config) {}},
		{"--drain-lost-nodes=false", func(c *Config) { c.ResetLostNodeConnections = true }},
		{"--drain-lost-nodes=false --reset-lost-node-connections=false", func(*Config) {}},
		{"--timeouts-from-conntrack", func(c *Config) { c.IPVSTimeouts.TCP = 86400 }},
		{"--timeouts-from-conntrack --conntrack-tcp-timeout-established=2h --conntrack-udp-timeout-stream=3m --conntrack-udp-timeout=1m", func(c *Config) {
			c.IPVSTimeouts.TCP, c.Conntrack.TCPEstablished = 7200, 2*time.Hour
			c.IPVSTimeouts.UDP, c.Conntrack.UDPStream, c.Conntrack.UDP = 180, 3*time.Minute, time.Minute
		}},
		{"--timeouts-from-conntrack --ipvs-tcp-timeout=1h --conntrack-tcp-timeout-established=0", func(c *Config) {
			c.IPVSTimeouts.TCP, c.Conntrack.TCPEstablished = 3600, 0
		}},
		{"--state-dir=/var/lib/own", func(c *Config) { c.StateDir = "/var/lib/own" }},
		{"--snat-source=0A:58:00:00:00:01=10.0.1.5", func(c *Config) {
			c.Plan.SNAT.Sources = map[string][]netip.Addr{"0a:58:00:00:00:01": {netip.MustParseAddr("10.0.1.5")}}
		}},
		{"--snat-mode=snat --snat-source=eth1=10.0.1.5 --snat-source=eth1=fd01::5,eth2=10.0.2.5", func(c *Config) {
			c.Plan.SNAT.Mode = plan.SNATSource
			c.Plan.SNAT.Sources = map[string][]netip.Addr{
				"eth1": {netip.MustParseAddr("10.0.1.5"), netip.MustParseAddr("fd01::5")},
				"eth2": {netip.MustParseAddr("10.0.2.5")},
			}
		}},
		{"--reply-gateway=eth1=10.13.0.1 --reply-gateway=eth1=fe80::1,0A:58:00:00:00:02=10.14.0.1", func(c *Config) {
			c.Plan.SNAT.Gateways = map[string][]netip.Addr{
				"eth1":              {netip.MustParseAddr("10.13.0.1"), netip.MustParseAddr("fe80::1")},
				"0a:58:00:00:00:02": {netip.MustParseAddr("10.14.0.1")},
			}
		}},
		{"--masquerade-external-local", func(c *Config) { c.Plan.MasqueradeExternalLocal, c.Own.MasqueradeExternalLocal = true, true }},
		{"--local-mark=off", func(c *Config) { c.Plan.LocalMark, c.Own.LocalMark = plan.LocalMark{}, "off" }},
		{"--local-mark=0x200000/0x2f0000 --reply-mark=0xf --claim-mark=0x10", func(c *Config) {
			c.Plan.VIPs.Mark = 0x10
			c.Plan.LocalMark = plan.LocalMark{Value: 0x200000, Mask: 0x2f0000}
			c.Plan.SNAT.Mark = 0xf
		}},
		{"--service-metrics=500", func(c *Config) { c.ServiceMetrics = 500 }},
		{"--snat-mode=fwmark --reply-mark=0x100 --reply-rule-priority=99", func(c *Config) {
			c.Plan.SNAT = plan.SNAT{Mode: plan.SNATFWMark, Mark: 0x100, Priority: 99}
			c.Plan.VIPs.Priority = 98
		}},
		{"--claim-load-balancers=address --claim-mark=0x10000 --claim-table=9 --claim-rule-priority=9", func(c *Config) {
			c.Plan.VIPs = plan.VIPs{ClusterIPs: plan.ClaimAddress, LoadBalancers: plan.ClaimAddress, ExternalIPs: plan.ClaimAuto, Ping: true, Mark: 0x10000, Table: 9, Priority: 9}
		}},
		{"--claim-cluster-ips=route", func(c *Config) { c.Plan.VIPs.ClusterIPs = plan.ClaimRoute }},
		{"--claim-cluster-ips=auto", func(c *Config) { c.Plan.VIPs.ClusterIPs = plan.ClaimAuto }},
		{"--vip-ping=false", func(c *Config) { c.Plan.VIPs.Ping = false }},
		{"--claim-external-ips=address", func(c *Config) { c.Plan.VIPs.ExternalIPs = plan.ClaimAddress }},
		{"--claim-external-ips=none", func(c *Config) { c.Plan.VIPs.ExternalIPs = plan.ClaimNone }},
		{"--feature-gates=AllAlpha=false,ContextualLogging=true", func(*Config) {}},
		{"--feature-gates=AllowServiceExternalIPs=false", func(c *Config) { c.Plan.VIPs.ExternalIPs = plan.ClaimNone }},
		{"--feature-gates=AllowServiceExternalIPs=true", func(*Config) {}},
		{"--feature-gates=TopologyAwareHints=true", func(c *Config) {
			c.Notices = append(c.Notices, "ignoring feature gates that kube-ipvs does not have: TopologyAwareHints")
		}},
		{"--iptables-localhost-nodeports=false", func(c *Config) { c.Plan.LocalhostNodePorts = false }},
		{"--iptables-sync-period=1m --localhost-nodeports", func(c *Config) {
			c.Notices = append([]string{
				"--iptables-sync-period has no effect: it is for another proxy mode or platform",
				"--localhost-nodeports has no effect: it is for another proxy mode or platform",
			}, c.Notices...)
		}},
	} {
		t.Run(tc.args, func(t *testing.T) {
			want := defaults()
			tc.want(&want)
			if diff := cmp.Diff(want, mustParse(t, strings.Split(tc.args, " ")...), compare); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestFlagErrors has an invalid value for each flag, and the part of the error that names
// the fix.
// flagsOfKubeProxy are the flags of kube-proxy v1.36.3: those of its --help
// (TestConformanceFlags compares them), and the deprecated ones, which --help hides.
func flagsOfKubeProxy(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "kube-proxy-flags.txt"))
	if err != nil {
		t.Fatal(err)
	}
	return append(strings.Fields(string(text)), "healthz-port", "metrics-port")
}

// A command line of kube-proxy is accepted unchanged.
func TestEveryFlagOfKubeProxyIsKnown(t *testing.T) {
	known := map[string]bool{"version": true} // added by the command
	for _, section := range NewOptions().Flags().FlagSets {
		section.VisitAll(func(f *pflag.Flag) { known[f.Name] = true })
	}
	for _, name := range flagsOfKubeProxy(t) {
		if !known[name] {
			t.Errorf("--%s is not known", name)
		}
	}
}

func TestFlagErrors(t *testing.T) {
	for _, tc := range []struct {
		args string
		want []string
	}{
		{"--hostname-override=a_b", []string{"--hostname-override: ", `"a_b"`}},
		{"--hostname-override=\t", []string{"--hostname-override: ", "must consist of"}},
		{"--cluster-cidr=10.0.0.0", []string{`--cluster-cidr: Invalid value: "10.0.0.0": must be a CIDR`}},
		{"--cluster-cidr=10.0.0.0/8,11.0.0.0/8", []string{"--cluster-cidr: ", "one of each family"}},
		{"--cluster-cidr=10.0.0.0/8,fd00::/8,fd01::/16", []string{"--cluster-cidr: ", "one of each family"}},
		{"--detect-local-mode=Guess", []string{`--detect-local-mode: Unsupported value: "Guess"`, "NodeCIDR"}},
		{"--detect-local-mode=BridgeInterface", []string{`--pod-bridge-interface: Invalid value: ""`, "1 to 15"}},
		{"--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=abcdefghijklmno", []string{"--pod-interface-name-prefix: ", "1 to 14"}},
		{"--ipvs-scheduler=random", []string{`--ipvs-scheduler: Unsupported value: "random"`, `"rr"`}},
		{"--drain-deadline=-1s", []string{`--drain-deadline: Invalid value: "-1s": must be more than 0`}},
		{"--ipvs-sync-period=0", []string{`--ipvs-sync-period: Invalid value: "0s": must be more than 0`}},
		{"--ipvs-min-sync-period=-1s", []string{`--ipvs-min-sync-period: Invalid value: "-1s"`, "negative"}},
		{"--ipvs-min-sync-period=1m", []string{"--ipvs-min-sync-period: ", "not be more than --ipvs-sync-period, which is 30s"}},
		{"--ipvs-sync-period=soon", []string{"--ipvs-sync-period", "soon"}},
		{"--ipvs-exclude-cidrs=10.0.0.0/8,x", []string{`--ipvs-exclude-cidrs[1]: Invalid value: "x"`}},
		{"--ipvs-tcp-timeout=500ms", []string{`--ipvs-tcp-timeout: Invalid value: "500ms": must be from 1s`}},
		{"--ipvs-tcpfin-timeout=-1s", []string{"--ipvs-tcpfin-timeout: "}},
		{"--ipvs-udp-timeout=1000000h", []string{"--ipvs-udp-timeout: ", "from 1s to 5965h13m56s"}},
		{"--iptables-masquerade-bit=32", []string{"--iptables-masquerade-bit: Invalid value: 32: must be from 0 to 31"}},
		{"--iptables-masquerade-bit=13 --reply-mark=0x2000", []string{`--reply-mark: Invalid value: "0x2000": must not have a bit of --iptables-masquerade-bit`}},
		{"--nodeport-addresses=primary,10.0.0.0/8", []string{"--nodeport-addresses: ", "primary alone or CIDRs"}},
		{"--nodeport-addresses=::ffff:10.0.0.0/90", []string{"--nodeport-addresses[0]: "}},
		{"--bind-address=fe80::1%eth0", []string{"--bind-address: "}},
		{"--bind-address=node", []string{`--bind-address: Invalid value: "node": must be an IP address`}},
		{"--proxy-mode=iptables", []string{`--proxy-mode: Unsupported value: "iptables": supported values: "ipvs"`}},
		{"--healthz-bind-address=0.0.0.0:0", []string{"--healthz-bind-address: ", "0.0.0.0:10256"}},
		{"--metrics-bind-address=10.0.0.0/40", []string{"--metrics-bind-address: ", "must be a CIDR and a port"}},
		{"--healthz-bind-address=10.0.0.0/8", []string{"--healthz-bind-address: "}},
		{"--metrics-bind-address=localhost:1", []string{"--metrics-bind-address: "}},
		{"--metrics-bind-address=::1 --metrics-port=70000", []string{"--metrics-bind-address: ", "70000"}},
		{"--show-hidden-metrics-for-version=v1", []string{"--show-hidden-metrics-for-version: ", "1.35"}},
		{"--conntrack-max-per-core=-1", []string{"--conntrack-max-per-core: Invalid value: -1"}},
		{"--conntrack-min=-1", []string{"--conntrack-min: Invalid value: -1"}},
		{"--conntrack-tcp-timeout-established=-1s", []string{"--conntrack-tcp-timeout-established: "}},
		{"--conntrack-tcp-timeout-close-wait=1ms", []string{"--conntrack-tcp-timeout-close-wait: "}},
		{"--conntrack-udp-timeout=-1s", []string{"--conntrack-udp-timeout: "}},
		{"--conntrack-udp-timeout-stream=-1s", []string{"--conntrack-udp-timeout-stream: "}},
		{"--kube-api-burst=-1", []string{"--kube-api-burst: Invalid value: -1"}},
		{"--kube-api-qps=NaN", []string{"--kube-api-qps: "}},
		{"--kube-api-content-type=text/html", []string{`--kube-api-content-type: Unsupported value: "text/html"`}},
		{"--config-sync-period=0", []string{"--config-sync-period: "}},
		{"--oom-score-adj=1001", []string{"--oom-score-adj: Invalid value: 1001: must be from -1000 to 1000"}},
		{"--feature-gates=ContextualLogging=maybe", []string{"--feature-gates"}},
		{"--logging-format=xml", []string{`--logging-format: Invalid value: "xml"`}},
		{"--master=ftp://x", []string{"--master: ", "https://"}},
		{"--master=10.0.0.1:port", []string{"--master: ", "https://"}},
		{"--manifests=/m --kubeconfig=/k", []string{"--manifests: ", "set only one", "--kubeconfig"}},
		{"--manifests=/m --master=https://x", []string{"--master: ", "set only one", "--manifests"}},
		{"--once --cleanup", []string{"--once: ", "--cleanup"}},
		{"--claim-load-balancers=all", []string{`--claim-load-balancers: Unsupported value: "all"`, `"port"`, `"address"`}},
		{"--claim-cluster-ips=port", []string{`--claim-cluster-ips: Unsupported value: "port"`, `"address"`, `"route"`}},
		{"--claim-external-ips=all", []string{`--claim-external-ips: Unsupported value: "all"`}},
		{"--claim-external-ips=off", []string{`--claim-external-ips: Unsupported value: "off"`}},
		{"--claim-load-balancers=none", []string{`--claim-load-balancers: Unsupported value: "none"`}},
		{"--claim-mark=0x4004", []string{`--claim-mark: Invalid value: "0x4004": must not have a bit of --iptables-masquerade-bit`}},
		{"--claim-mark=0x1000", []string{`--claim-mark: Invalid value: "0x1000": must not have a bit of --reply-mark`}},
		{"--claim-mark=0x8", []string{`--claim-mark: Invalid value: "0x8": must not have a bit of the value of --local-mark`}},
		{"--claim-table=254", []string{"--claim-table: Invalid value: 254: ", "253 to 255"}},
		{"--claim-table=-1", []string{"--claim-table: Invalid value: -1"}},
		{"--claim-rule-priority=480", []string{"--claim-rule-priority: Invalid value: 480: must be less than --reply-rule-priority, which is 480"}},
		{"--claim-rule-priority=40000", []string{"--claim-rule-priority: Invalid value: 40000"}},
		{"--service-metrics=-1", []string{"--service-metrics: Invalid value: -1: must be from 0 to"}},
		{"--dry-run", []string{"--dry-run: Forbidden: can only be used with --once"}},
		{"--cleanup --dry-run", []string{"--dry-run: Forbidden: can only be used with --once"}},
		{"--snat-mode=magic", []string{`--snat-mode: Unsupported value: "magic"`, "fwmark"}},
		{"--snat-mode=off --snat-source=eth0=10.0.0.1", []string{"--snat-source: Forbidden: --snat-mode is off"}},
		{"--snat-mode=off --reply-gateway=eth1=10.13.0.1", []string{"--reply-gateway: Forbidden: --snat-mode is off, which has no reply routing"}},
		{"--reply-gateway=eth1=10.13.0.1 --claim-table=252", []string{"--claim-table: ", "must be between 256 and"}},
		{"--reply-gateway=eth1", []string{`invalid argument "eth1" for "--reply-gateway" flag: "eth1" must be IFACE=GATEWAY`}},
		{"--reply-gateway=eth1=10.13.0.1,eth1=10.13.0.2", []string{"--reply-gateway[eth1]: ", "only address of its family"}},
		{"--snat-source=eth0=fe80::1", []string{"--snat-source[eth0]: ", "routable unicast address"}},
		{"--snat-source=eth0", []string{`invalid argument "eth0" for "--snat-source" flag: "eth0" must be IFACE=ADDRESS`}},
		{"--snat-source=eth0=here", []string{`--snat-source[eth0]: Invalid value: "here"`}},
		{"--snat-source=eth0=127.0.0.1", []string{"--snat-source[eth0]: "}},
		{"--snat-source=eth0=10.0.0.1,eth0=10.0.0.2", []string{"--snat-source[eth0]: ", "only address of its family"}},
		{"--snat-source=a/b=10.0.0.1", []string{"--snat-source[a/b]: ", "interface"}},
		{"--reply-mark=0xc000", []string{`--reply-mark: Invalid value: "0xc000": must not have a bit of --iptables-masquerade-bit`}},
		{"--state-dir=run", []string{`--state-dir: Invalid value: "run": must be an absolute path such as /run/kube-ipvs`}},
		{"--reply-mark=0x9000", []string{`--reply-mark: Invalid value: "0x9000": must not have a bit of kubelet's drop mark`}},
		{"--local-mark=1", []string{`--local-mark: Invalid value: "1": must be off or VALUE/MASK, such as 0x9/0x3fff`}},
		{"--local-mark=0x0/0xff", []string{"--local-mark: ", "not 0"}},
		{"--local-mark=0x100/0xff", []string{"--local-mark: ", "the value's bits"}},
		{"--local-mark=0x1/0x1", []string{"--local-mark: ", "at least one more"}},
		{"--local-mark=0x1/0x4001", []string{`--local-mark: Invalid value: "0x4001": must not have a bit of --iptables-masquerade-bit`}},
		{"--local-mark=0x1/0x8001", []string{"--local-mark: ", "kubelet's drop mark"}},
		{"--reply-mark=0x8", []string{`--local-mark: Invalid value: "0x9": must not have a bit of --reply-mark`}},
		{"--reply-mark=0", []string{"--reply-mark: "}},
		{"--reply-mark=bit", []string{"--reply-mark", "0x3060"}},
		{"--reply-rule-priority=0", []string{"--reply-rule-priority: Invalid value: 0: must be from 1 to 32765"}},
		{"--config=/does/not/exist", []string{"--config: ", "/does/not/exist"}},
		{"--proxy-mode=nftables --ipvs-scheduler=x --oom-score-adj=5000", []string{"--proxy-mode: ", "\n--ipvs-scheduler: ", "\n--oom-score-adj: "}},
	} {
		t.Run(tc.args, func(t *testing.T) {
			_, err := parse(t, strings.Split(tc.args, " ")...)
			checkError(t, err, tc.want)
		})
	}
}

func checkError(t *testing.T, err error, want []string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error lacks %q: %v", w, err)
		}
	}
}

func TestNoHostname(t *testing.T) {
	o := NewOptions()
	o.Hostname = func() (string, error) { return "", errors.New("no name") }
	_, err := o.Complete()
	checkError(t, err, []string{"--hostname-override: Required value", "no name"})
}

func TestKubeadmConfigMap(t *testing.T) {
	want := defaults()
	want.File = filepath.Join("testdata", "kubeadm.yaml")
	want.Source.Kubeconfig = "/var/lib/kube-proxy/kubeconfig.conf"
	want.MinSyncPeriod = 0
	want.Plan.LocalTraffic = plan.LocalTraffic{
		Mode:  plan.DetectClusterCIDR,
		CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")},
	}
	want.Notices = nil
	if diff := cmp.Diff(want, mustParse(t, "--config="+want.File), compare); diff != "" {
		t.Error(diff)
	}
}

func TestFile(t *testing.T) {
	cluster := "clusterCIDR: 10.0.0.0/8\n"
	for _, tc := range []struct {
		name, file, args string
		want             func(*Config)
	}{
		{"IPv6 bind address", proxyHead + cluster + "bindAddress: fd00::1\n", "", func(c *Config) {
			c.Plan.NodeAddress = netip.MustParseAddr("fd00::1")
			c.Healthz, c.Metrics = netip.MustParseAddrPort("[::]:10256"), netip.MustParseAddrPort("[::1]:10249")
		}},
		{"bare address", proxyHead + cluster + "healthzBindAddress: 10.0.0.1\n", "", func(c *Config) {
			c.Healthz = netip.MustParseAddrPort("10.0.0.1:10256")
		}},
		{"override wins, other flags do not", proxyHead + cluster + "hostnameOverride: X\n", "--hostname-override=Y --ipvs-scheduler=lc --cluster-cidr=nonsense", func(c *Config) {
			c.Plan.NodeName = "y"
			c.Notices = []string{"with --config the values of the file apply; ignoring --cluster-cidr, --ipvs-scheduler"}
		}},
		{"host name of the file", proxyHead + cluster + "hostnameOverride: ' X'\n", "", func(c *Config) { c.Plan.NodeName = "x" }},
		{"own document, hexadecimal number", proxyHead + cluster + ownHead + "snat: {mode: fwmark, mark: 0x100, priority: 7}\nmanifests: /m\n", "", func(c *Config) {
			c.Plan.SNAT = plan.SNAT{Mode: plan.SNATFWMark, Mark: 0x100, Priority: 7}
			c.Plan.VIPs.Priority = 6
			c.Source.Manifests = "/m"
		}},
		{"own document, string, own flags win", proxyHead + cluster + ownHead + "snat: {mark: '0x100', sources: {eth1: [10.0.0.1]}}\n", "--reply-mark=0x200 --snat-source=eth2=10.0.0.2", func(c *Config) {
			c.Plan.SNAT.Mark = 0x200
			c.Plan.SNAT.Sources = map[string][]netip.Addr{"eth2": {netip.MustParseAddr("10.0.0.2")}}
		}},
		{"own document, drain", proxyHead + cluster + ownHead + "udpDrain: true\ndrainDeadline: 1h\nresetLostNodeConnections: true\n", "--drain-deadline=2h", func(c *Config) {
			c.Plan.UDPDrain, c.DrainDeadline, c.ResetLostNodeConnections = true, 2*time.Hour, true
		}},
		{"own document, lost nodes, deprecated", proxyHead + cluster + ownHead + "drainLostNodes: false\n", "", func(c *Config) { c.ResetLostNodeConnections = true }},
		{"own document, lost nodes as by default", proxyHead + cluster + ownHead + "drainLostNodes: true\n", "", func(*Config) {}},
		{"own document, lost nodes, a flag wins", proxyHead + cluster + ownHead + "resetLostNodeConnections: true\n", "--drain-lost-nodes", func(*Config) {}},
		{"own document, lost nodes, the other flag wins", proxyHead + cluster + ownHead + "drainLostNodes: true\n", "--reset-lost-node-connections", func(c *Config) { c.ResetLostNodeConnections = true }},
		{"own document, VIPs", proxyHead + cluster + ownHead + "vips: {loadBalancers: address, mark: '0x10000'}\n", "--claim-table=7", func(c *Config) {
			c.Plan.VIPs.LoadBalancers, c.Plan.VIPs.Mark, c.Plan.VIPs.Table = plan.ClaimAddress, 0x10000, 7
		}},
		{"off without quotes", proxyHead + cluster + ownHead + "snat: {mode: off}\n", "", func(c *Config) { c.Plan.SNAT.Mode = plan.SNATOff }},
		{"no local mark, without quotes", proxyHead + cluster + ownHead + "localMark: off\n", "", func(c *Config) { c.Plan.LocalMark = plan.LocalMark{} }},
		{"a local mark", proxyHead + cluster + ownHead + "localMark: 0x1/0xf\n", "", func(c *Config) { c.Plan.LocalMark = plan.LocalMark{Value: 1, Mask: 15} }},
		{"own sources", proxyHead + cluster + ownHead + "snat: {sources: {eth1: [10.0.0.1]}}\n", "", func(c *Config) {
			c.Plan.SNAT.Sources = map[string][]netip.Addr{"eth1": {netip.MustParseAddr("10.0.0.1")}}
		}},
		{"own gateways", proxyHead + cluster + ownHead + "snat: {gateways: {eth1: [10.13.0.1]}}\n", "", func(c *Config) {
			c.Plan.SNAT.Gateways = map[string][]netip.Addr{"eth1": {netip.MustParseAddr("10.13.0.1")}}
		}},
		{"own document first", strings.TrimPrefix(ownHead, "---\n") + "---\n" + proxyHead + cluster, "", func(*Config) {}},
		{"unknown and repeated fields", proxyHead + cluster + "ipvs: {shceduler: lc}\nmode: ''\nmode: ipvs\n", "", func(c *Config) {
			c.Notices = []string{
				`FILE: document 1 (line 1): yaml: unmarshal errors: line 6: key "mode" already set in map: ignored`,
				`FILE: document 1 (line 1): unknown field "ipvs.shceduler": ignored`,
			}
		}},
		{"other modes", proxyHead + cluster + "iptables: {syncPeriod: 1s}\nnftables: {masqueradeAll: true}\nportRange: 1-2\n", "", func(c *Config) {
			c.Notices = []string{
				"FILE: iptables.syncPeriod has no effect: it is for another proxy mode or platform",
				"FILE: nftables has no effect: it is for another proxy mode or platform",
				"FILE: portRange has no effect: it is for another proxy mode or platform",
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			want := defaults()
			want.File, want.MinSyncPeriod, want.Notices = writeFile(t, tc.file), 0, nil
			want.Plan.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
			tc.want(&want)
			for i := range want.Notices {
				want.Notices[i] = strings.ReplaceAll(want.Notices[i], "FILE", want.File)
			}
			got := mustParse(t, append([]string{"--config=" + want.File}, strings.Fields(tc.args)...)...)
			if diff := cmp.Diff(want, got, compare); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestFileErrors(t *testing.T) {
	for _, tc := range []struct {
		name, file, args string
		want             []string
	}{
		{"empty", "# nothing\n", "", []string{"FILE: no document"}},
		{"mode", proxyHead + "mode: nftables\n", "", []string{`FILE: mode: Unsupported value: "nftables": supported values: "ipvs"`}},
		{"fields are named", proxyHead + "conntrack: {min: -1}\nipvs: {excludeCIDRs: [x], tcpTimeout: 1ms}\n", "", []string{"FILE: conntrack.min: ", "FILE: ipvs.excludeCIDRs[0]: ", "FILE: ipvs.tcpTimeout: "}},
		{"override is named as flag", proxyHead + "mode: ipvs\n", "--hostname-override=a_b", []string{"--hostname-override: "}},
		{"wrong type", proxyHead + "oomScoreAdj: low\n", "", []string{"FILE: document 1 (line 1): ", "oomScoreAdj"}},
		{"no YAML", proxyHead + ": [", "", []string{"FILE: document 1 (line 1): "}},
		{"other kind", "apiVersion: v1\nkind: Service\n", "", []string{"document 1", `kind "Service"`, "KubeProxyConfiguration"}},
		{"twice", proxyHead + "---\n" + proxyHead, "", []string{"document 2 (line 4): a second KubeProxyConfiguration"}},
		{"own document is strict", proxyHead + ownHead + "snat: {mod: off}\n", "", []string{"document 2", `unknown field "snat.mod"`}},
		{"own fields are named", proxyHead + ownHead + "snat: {mode: x, mark: 0x4001, sources: {eth0: [x]}}\nvips: {externalIPs: x}\n", "", []string{"FILE: vips.externalIPs: ", "FILE: snat.mode: ", "FILE: snat.mark: ", "FILE: snat.sources[eth0]: "}},
		{"mark", proxyHead + ownHead + "snat: {mark: many}\n", "", []string{"document 2", `"many" is not a 32-bit mark`}},
		{"logging", proxyHead + "logging: {format: xml}\n", "", []string{"FILE: logging.format: "}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			name := writeFile(t, tc.file)
			_, err := parse(t, append([]string{"--config=" + name}, strings.Fields(tc.args)...)...)
			for i := range tc.want {
				tc.want[i] = strings.ReplaceAll(tc.want[i], "FILE", name)
			}
			checkError(t, err, tc.want)
		})
	}
}

func TestLoggingFlagsWinOverFile(t *testing.T) {
	name := writeFile(t, proxyHead+"logging: {verbosity: 2, format: json}\n")
	c := mustParse(t, "--config="+name, "-v=6")
	if c.Logging.Verbosity != 6 || c.Logging.Format != "json" {
		t.Errorf("verbosity %d, format %q", c.Logging.Verbosity, c.Logging.Format)
	}
	name = writeFile(t, proxyHead+"logging: {vmodule: [{filePattern: a, verbosity: 1}, {filePattern: b, verbosity: 1}]}\n")
	c = mustParse(t, "--config="+name, "--vmodule=b=5")
	want := logsapi.VModuleConfiguration{{FilePattern: "b", Verbosity: 5}, {FilePattern: "a", Verbosity: 1}, {FilePattern: "b", Verbosity: 1}}
	if diff := cmp.Diff(want, c.Logging.VModule); diff != "" {
		t.Errorf("vmodule (-want +got):\n%s", diff)
	}
}

// TestWrite writes and reads a configuration.
func TestWrite(t *testing.T) {
	c := mustParse(t, "--cluster-cidr=10.0.0.0/8", "--ipvs-scheduler=sh", "--snat-source=eth1=10.0.0.1", "--reply-mark=0x100", "--proxy-mode=")
	name := filepath.Join(t.TempDir(), "written.yaml")
	if err := c.Write(name); err != nil {
		t.Fatal(err)
	}
	c.File = name
	read := mustParse(t, "--config="+name)
	if diff := cmp.Diff(c, read, compare); diff != "" {
		t.Error(diff)
	}
	off := mustParse(t, "--cluster-cidr=10.0.0.0/8", "--snat-mode=off")
	if err := off.Write(name); err != nil {
		t.Fatal(err)
	}
	if got := mustParse(t, "--config="+name).Plan.SNAT.Mode; got != plan.SNATOff {
		t.Errorf("mode off became %q", got)
	}
	if err := c.Write(t.TempDir()); err == nil {
		t.Error("a folder was written to")
	}
}

func FuzzFile(f *testing.F) {
	kubeadm, err := os.ReadFile(filepath.Join("testdata", "kubeadm.yaml"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(kubeadm)
	f.Add([]byte(proxyHead + ownHead + "snat: {mark: '0x1', sources: {a: [1.1.1.1]}}\n"))
	f.Add([]byte(proxyHead + "mode: ipvs\nfeatureGates: {AllAlpha: true}\nlogging: {vmodule: [{filePattern: a, verbosity: 1}]}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := parseFile(text, "")
		if err != nil {
			return
		}
		o := NewOptions()
		b := builder{path: o.path, proxy: &file.proxy, own: &file.own}
		c := b.config()
		if b.err() == nil {
			if _, err := c.marshal(); err != nil {
				t.Fatalf("accepted, but cannot be written: %v", err)
			}
		}
	})
}

// kube-proxy starts with every bit, so kube-ipvs must not refuse one because of its own defaults.
func TestEveryMasqueradeBit(t *testing.T) {
	for bit := range 32 {
		p := mustParse(t, fmt.Sprintf("--iptables-masquerade-bit=%d", bit)).Plan
		if p.LocalMark.Max() < 1000 || p.SNAT.Mark == 0 {
			t.Errorf("bit %d leaves %d fwmarks and the reply mark %#x", bit, p.LocalMark.Max(), p.SNAT.Mark)
		}
	}
}
