package config

import (
	"github.com/spf13/pflag"

	cliflag "k8s.io/component-base/cli/flag"
)

func newFlagSet() *pflag.FlagSet { return pflag.NewFlagSet("", pflag.ContinueOnError) }

// generalFlags select what to do, and with which files.
func (o *Options) generalFlags() *pflag.FlagSet {
	fs := newFlagSet()
	fs.StringVar(&o.configFile, "config", "",
		"File with a KubeProxyConfiguration and, optionally, a KubeIPVSConfiguration document.")
	fs.StringVar(&o.writeConfigTo, "write-config-to", "",
		"Write the configuration with all defaults to this file and exit.")
	fs.BoolVar(&o.action.cleanup, "cleanup", false,
		"Remove the kernel state of kube-ipvs, and what a kube-proxy that no longer runs has left, and exit.")
	fs.BoolVar(&o.action.initOnly, "init-only", false,
		"Perform only the initialization that needs full root privileges and exit. Afterwards CAP_NET_ADMIN and, for iptables-legacy, CAP_NET_RAW suffice.")
	fs.StringVar(&o.master, "master", "",
		"Address of the API server; overrides the kubeconfig.")
	fs.StringVar(&o.hostnameOverride, "hostname-override", "",
		"Name of this machine's Node, if it is not the host name. Takes precedence over the file.")
	return fs
}

// ownFlags set what kube-proxy does not have: the flags of settings, and those without a field in the
// document. --drain-lost-nodes is the opposite of another flag, so it sets that one's field; see overOwn.
func (o *Options) ownFlags() *pflag.FlagSet {
	fs := newFlagSet()
	fs.AddFlagSet(o.flags.document)
	fs.BoolVar(&o.action.once, "once", false,
		"Sync once and exit; exit non-zero if anything could not be programmed.")
	fs.BoolVar(&o.action.dryRun, "dry-run", false,
		"With --once: print the changes to the kernel without making them.")
	fs.BoolVar(&o.drainLostNodes, "drain-lost-nodes", true, "The opposite of --reset-lost-node-connections.")
	deprecate(fs, "drain-lost-nodes", "use --reset-lost-node-connections")
	return fs
}

// proxyFlags are kube-proxy's own flags, which set fields of the file.
func (o *Options) proxyFlags() *pflag.FlagSet {
	fs := newFlagSet()
	o.addTrafficFlags(fs)
	o.addIPVSFlags(fs)
	o.addConntrackFlags(fs)
	o.addProcessFlags(fs)
	o.addClientFlags(fs)
	return fs
}

// addTrafficFlags adds the flags about traffic and addresses.
func (o *Options) addTrafficFlags(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.StringVar((*string)(&c.Mode), "proxy-mode", string(c.Mode), "Proxy mode. Must be ipvs.")
	fs.StringVar(&c.ClusterCIDR, "cluster-cidr", c.ClusterCIDR,
		"CIDR of the cluster's Pods, or one per family, separated by a comma. With --detect-local-mode=ClusterCIDR, traffic to cluster IPs from other sources is masqueraded.")
	fs.StringVar((*string)(&c.DetectLocalMode), "detect-local-mode", string(c.DetectLocalMode),
		"How traffic from Pods on this node is recognized: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix.")
	fs.StringVar(&c.DetectLocal.BridgeInterface, "pod-bridge-interface", c.DetectLocal.BridgeInterface,
		"With --detect-local-mode=BridgeInterface: the bridge of the Pods.")
	fs.StringVar(&c.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", c.DetectLocal.InterfaceNamePrefix,
		"With --detect-local-mode=InterfaceNamePrefix: the prefix of the names of Pod interfaces.")
	fs.BoolVar(&c.IPTables.MasqueradeAll, "masquerade-all", c.IPTables.MasqueradeAll,
		"Masquerade all traffic to cluster IPs.")
	fs.Int32Var(c.IPTables.MasqueradeBit, "iptables-masquerade-bit", *c.IPTables.MasqueradeBit,
		"Bit of the packet mark, 0 to 31, that requests masquerading of a packet.")
	fs.StringSliceVar(&c.NodePortAddresses, "nodeport-addresses", c.NodePortAddresses,
		"CIDRs of the node addresses that serve node ports, or primary for the addresses of the Node object. Default: all.")
	fs.BoolVar(c.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", *c.IPTables.LocalhostNodePorts,
		"Serve node ports on the loopback address to processes of the node. Needs the program nft.")
	fs.StringVar(&c.BindAddress, "bind-address", c.BindAddress,
		"IP address of the node; overrides the Node object. Nothing is bound to it.")
}

// addIPVSFlags adds the flags of IPVS mode.
func (o *Options) addIPVSFlags(fs *pflag.FlagSet) {
	c := &o.proxy.IPVS
	fs.StringVar(&c.Scheduler, "ipvs-scheduler", c.Scheduler, "IPVS scheduler. Empty: rr.")
	fs.DurationVar(&c.SyncPeriod.Duration, "ipvs-sync-period", c.SyncPeriod.Duration,
		"Time between comparisons with the kernel; more than 0. While there are many virtual servers and set members, these are compared less often.")
	fs.DurationVar(&c.MinSyncPeriod.Duration, "ipvs-min-sync-period", c.MinSyncPeriod.Duration,
		"Minimum time between two syncs; 0: each change triggers a sync.")
	fs.StringSliceVar(&c.ExcludeCIDRs, "ipvs-exclude-cidrs", c.ExcludeCIDRs,
		"CIDRs whose virtual servers are kept unless a Service uses their address and port.")
	fs.BoolVar(&c.StrictARP, "ipvs-strict-arp", c.StrictARP,
		"Set arp_ignore to 1 and arp_announce to 2, so that no other interface answers ARP for a Service address.")
	fs.DurationVar(&c.TCPTimeout.Duration, "ipvs-tcp-timeout", c.TCPTimeout.Duration,
		"Idle time after which IPVS drops a TCP connection. 0 keeps the kernel's value.")
	fs.DurationVar(&c.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", c.TCPFinTimeout.Duration,
		"Idle time after which IPVS drops a TCP connection after a FIN. 0 keeps the kernel's value.")
	fs.DurationVar(&c.UDPTimeout.Duration, "ipvs-udp-timeout", c.UDPTimeout.Duration,
		"Idle time after which IPVS drops a UDP flow. 0 keeps the kernel's value.")
}

func (o *Options) addConntrackFlags(fs *pflag.FlagSet) {
	c := &o.proxy.Conntrack
	fs.Int32Var(c.MaxPerCore, "conntrack-max-per-core", *c.MaxPerCore,
		"Size of the conntrack table per CPU core. 0 keeps the limit and ignores --conntrack-min.")
	fs.Int32Var(c.Min, "conntrack-min", *c.Min, "Minimum size of the conntrack table.")
	fs.DurationVar(&c.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", c.TCPEstablishedTimeout.Duration,
		"Idle time after which conntrack drops an established TCP connection. 0 keeps the kernel's value.")
	fs.DurationVar(&c.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", c.TCPCloseWaitTimeout.Duration,
		"Idle time after which conntrack drops a TCP connection in CLOSE_WAIT. 0 keeps the kernel's value.")
	fs.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", c.TCPBeLiberal,
		"Do not treat TCP packets outside the window as invalid.")
	fs.DurationVar(&c.UDPTimeout.Duration, "conntrack-udp-timeout", c.UDPTimeout.Duration,
		"Idle time after which conntrack drops a UDP flow without replies. 0 keeps the kernel's value.")
	fs.DurationVar(&c.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", c.UDPStreamTimeout.Duration,
		"Idle time after which conntrack drops a UDP flow with replies. 0 keeps the kernel's value.")
}

// addProcessFlags adds the flags about the process itself.
func (o *Options) addProcessFlags(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.StringVar(&c.HealthzBindAddress, "healthz-bind-address", c.HealthzBindAddress,
		"IP address, with or without port, that serves health checks. Empty: the default. --healthz-port=0 disables it.")
	fs.StringVar(&c.MetricsBindAddress, "metrics-bind-address", c.MetricsBindAddress,
		"IP address, or CIDR that contains a node address, with or without port, that serves metrics. Empty: the default. --metrics-port=0 disables it.")
	fs.BoolVar(&c.BindAddressHardFail, "bind-address-hard-fail", c.BindAddressHardFail,
		"Exit if a listening address cannot be bound.")
	fs.Int32Var(&o.healthzPort, "healthz-port", HealthzPort, "0: no health checks. Another port applies if --healthz-bind-address has none.")
	fs.Int32Var(&o.metricsPort, "metrics-port", MetricsPort, "0: no metrics. Another port applies if --metrics-bind-address has none.")
	deprecate(fs, "healthz-port", "use --healthz-bind-address")
	deprecate(fs, "metrics-port", "use --metrics-bind-address")
	fs.BoolVar(&c.EnableProfiling, "profiling", c.EnableProfiling, "Serve /debug/pprof, and /debug/flags/v to set the verbosity of the log, on the address of metrics.")
	fs.StringVar(&c.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", c.ShowHiddenMetricsForVersion,
		"Kubernetes version, such as 1.35, whose hidden metrics are shown.")
	fs.Int32Var(c.OOMScoreAdj, "oom-score-adj", *c.OOMScoreAdj, "The process's oom_score_adj, -1000 to 1000.")
	fs.Var(cliflag.NewMapStringBool(&c.FeatureGates), "feature-gates",
		"NAME=true or NAME=false, separated by commas. Gates of Kubernetes that kube-ipvs does not have are ignored.")
}

func (o *Options) addClientFlags(fs *pflag.FlagSet) {
	c := &o.proxy.ClientConnection
	fs.StringVar(&c.Kubeconfig, "kubeconfig", c.Kubeconfig,
		"Kubeconfig of the API server. Empty: the Pod's service account.")
	fs.StringVar(&c.ContentType, "kube-api-content-type", c.ContentType, "Content type of requests to the API server.")
	fs.Float32Var(&c.QPS, "kube-api-qps", c.QPS, "Requests per second to the API server.")
	fs.Int32Var(&c.Burst, "kube-api-burst", c.Burst, "Burst of requests to the API server.")
	fs.DurationVar(&o.proxy.ConfigSyncPeriod.Duration, "config-sync-period", o.proxy.ConfigSyncPeriod.Duration,
		"Accepted for compatibility, must be more than 0. Has no effect: known objects are not processed again, and the comparison with the kernel repairs drift.")
}

// ignoredFlags are kube-proxy's current and former flags for other modes and platforms.
// They are accepted so that command lines need not be changed.
func ignoredFlags() *pflag.FlagSet {
	fs := newFlagSet()
	for _, name := range []string{
		"iptables-sync-period", "iptables-min-sync-period",
		"nftables-sync-period", "nftables-min-sync-period", "nftables-masquerade-bit",
		"proxy-port-range", "udp-timeout", "source-vip", "network-name", "root-hnsendpoint-name",
		"boot-id-file", "machine-id-file",
	} {
		fs.String(name, "", "Has no effect.")
	}
	for _, name := range []string{
		"localhost-nodeports", "nftables-masquerade-all", "cleanup-ipvs",
		"enable-dsr", "forward-healthcheck-vip", "windows-service",
	} {
		fs.Bool(name, false, "Has no effect.")
	}
	return fs
}

// deprecate marks a flag as deprecated. MarkDeprecated fails only for unknown flags.
func deprecate(fs *pflag.FlagSet, name, instead string) { _ = fs.MarkDeprecated(name, instead) }
