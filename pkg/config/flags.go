package config

import (
	"github.com/spf13/pflag"

	cliflag "k8s.io/component-base/cli/flag"
)

func newFlagSet() *pflag.FlagSet { return pflag.NewFlagSet("", pflag.ContinueOnError) }

// generalFlags say what to do and with which files.
func (o *Options) generalFlags() *pflag.FlagSet {
	fs := newFlagSet()
	fs.StringVar(&o.configFile, "config", "",
		"File with a KubeProxyConfiguration, and beside it a KubeIPVSConfiguration document if there is one.")
	fs.StringVar(&o.writeConfigTo, "write-config-to", "",
		"Write the configuration, with the defaults filled in, to this file and exit.")
	fs.BoolVar(&o.action.cleanup, "cleanup", false,
		"Take away everything that this proxy has put into the kernel, and exit.")
	fs.BoolVar(&o.action.initOnly, "init-only", false,
		"Do only what needs full root privileges and exit. Afterwards CAP_NET_ADMIN is enough.")
	fs.StringVar(&o.master, "master", "",
		"Address of the API server, in place of the one in the kubeconfig.")
	fs.StringVar(&o.hostnameOverride, "hostname-override", "",
		"Name of this machine's Node, where it is not the host name. Wins over the file.")
	return fs
}

// ownFlags set what kube-proxy does not have.
func (o *Options) ownFlags() *pflag.FlagSet {
	fs := newFlagSet()
	fs.StringVar(&o.own.Compat, "compat", "", compatUsage)
	fs.StringVar(&o.own.Manifests, "manifests", "",
		"Folder of YAML and JSON manifests (Service, EndpointSlice, Node) that is read and watched in place of an API server.")
	fs.StringVar(&o.own.StateDir, "state-dir", o.own.StateDir,
		"Folder, this node's own, in which kernel parameters' earlier values are kept for --cleanup.")
	fs.IntVar(&o.own.ServiceMetrics, "service-metrics", 0,
		"Serve metrics of connections, packets and bytes for this many ports of Services at most, the first by namespace and name. 0: none.")
	fs.StringVar(o.own.ProbeBindAddress, "probe-bind-address", *o.own.ProbeBindAddress,
		"IP address and port to serve /livez and /readyz on for the kubelet's probes, and /status for \"kube-ipvs status\". Not kube-proxy's ports, so that kube-proxy cannot answer. Empty: not at all.")
	fs.BoolVar(&o.action.once, "once", false,
		"Program the kernel one time and exit; not with 0 if anything could not be programmed.")
	fs.BoolVar(&o.action.dryRun, "dry-run", false,
		"With --once: print what would be changed in the kernel, and change nothing.")
	fs.StringVar((*string)(&o.own.SNAT.Mode), "snat-mode", string(o.own.SNAT.Mode),
		"How masqueraded traffic gets the same path both ways: auto, snat (by its source address), fwmark (by reply routing) or off.")
	fs.StringSliceVar(&o.sources, "snat-source", nil,
		"IFACE=ADDRESS: source address of masqueraded traffic that leaves by the interface. Can be repeated.")
	fs.BoolVar(&o.own.MasqueradeExternalLocal, "masquerade-external-local", false,
		"Masquerade external traffic under externalTrafficPolicy Local too, for pods that would answer past the node. The Service annotation kube-ipvs.io/masquerade does it for one Service.")
	fs.StringVar((*string)(&o.own.LocalMark), "local-mark", string(o.own.LocalMark),
		"VALUE/MASK of the marks by which IPVS tells who comes from outside under externalTrafficPolicy Local; off: a node with endpoints serves its pods and itself by these alone.")
	fs.BoolVar(&o.own.UDPDrain, "udp-drain", false,
		"Let an endpoint that terminates and still serves keep the UDP flows that it has.")
	fs.DurationVar(&o.own.DrainDeadline.Duration, "drain-deadline", o.own.DrainDeadline.Duration,
		"How long TCP connections to an endpoint that is gone, and not just terminating, are kept.")
	fs.BoolVar(&o.own.ResetLostNodeConnections, "reset-lost-node-connections", false,
		"Reset TCP connections to endpoints on an unreachable node, where the Service has other endpoints. kube-proxy keeps them.")
	fs.BoolVar(&o.drainLostNodes, "drain-lost-nodes", true, "The contrary of --reset-lost-node-connections.")
	deprecate(fs, "drain-lost-nodes", "use --reset-lost-node-connections")
	fs.BoolVar(&o.own.TimeoutsFromConntrack, "timeouts-from-conntrack", false,
		"Have IPVS keep connections for as long as connection tracking does, where --ipvs-tcp-timeout and --ipvs-udp-timeout are not set.")
	fs.Var(&o.own.SNAT.Mark, "reply-mark", "The bits that bind connections to interfaces for reply routing; n bits tell 2^n-1 interfaces apart.")
	fs.IntVar(&o.own.SNAT.Priority, "reply-rule-priority", o.own.SNAT.Priority,
		"Priority of the policy rules of reply routing.")
	c := &o.own.VIPs
	fs.StringVar((*string)(&c.ClusterIPs), "claim-cluster-ips", string(c.ClusterIPs),
		"How cluster IPs are claimed. address: on kube-ipvs0; route: by a local route each; auto: address up to 1,000 Services, then route.")
	fs.StringVar((*string)(&c.LoadBalancers), "claim-load-balancers", string(c.LoadBalancers),
		"How load balancers' IPs are claimed. auto: local, as under kube-proxy, but pods and the node reach ports without a Service elsewhere; port: only Services' ports; address: as addresses of kube-ipvs0; route: by local routes. The Service annotation kube-ipvs.io/ip-mode: Proxy leaves those of one Service to the cloud.")
	fs.StringVar((*string)(&c.ExternalIPs), "claim-external-ips", string(c.ExternalIPs), "How external IPs are claimed: as load balancers' IPs; or none, not at all.")
	fs.BoolVar(c.Ping, "vip-ping", *c.Ping, "Have VIPs answer to ping. Otherwise it is refused, as a port without a Service is.")
	fs.Var(&c.Mark, "claim-mark", "Mark of packets for a port that is claimed by port, or left to another device.")
	fs.IntVar(&c.Table, "claim-table", c.Table, "Routing table of the VIPs that are claimed by port.")
	fs.IntVar(&c.Priority, "claim-rule-priority", c.Priority, "Priority of the policy rule that leads there.")
	return fs
}

// proxyFlags are kube-proxy's own way to set what the file can set.
func (o *Options) proxyFlags() *pflag.FlagSet {
	fs := newFlagSet()
	o.addTrafficFlags(fs)
	o.addIPVSFlags(fs)
	o.addConntrackFlags(fs)
	o.addProcessFlags(fs)
	o.addClientFlags(fs)
	return fs
}

// addTrafficFlags adds those about traffic and addresses.
func (o *Options) addTrafficFlags(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.StringVar((*string)(&c.Mode), "proxy-mode", string(c.Mode), "Only ipvs.")
	fs.StringVar(&c.ClusterCIDR, "cluster-cidr", c.ClusterCIDR,
		"CIDR of the cluster's Pods, or a pair of both families separated by a comma. Sources outside are masqueraded, if --detect-local-mode is ClusterCIDR.")
	fs.StringVar((*string)(&c.DetectLocalMode), "detect-local-mode", string(c.DetectLocalMode),
		"How traffic of Pods on this node is recognised: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix.")
	fs.StringVar(&c.DetectLocal.BridgeInterface, "pod-bridge-interface", c.DetectLocal.BridgeInterface,
		"With BridgeInterface: the bridge that Pods' traffic comes from.")
	fs.StringVar(&c.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", c.DetectLocal.InterfaceNamePrefix,
		"With InterfaceNamePrefix: what the names of Pods' interfaces begin with.")
	fs.BoolVar(&c.IPTables.MasqueradeAll, "masquerade-all", c.IPTables.MasqueradeAll,
		"Masquerade all traffic to cluster IPs.")
	fs.Int32Var(c.IPTables.MasqueradeBit, "iptables-masquerade-bit", *c.IPTables.MasqueradeBit,
		"Bit of the firewall mark, 0 to 31, that says that a packet must be masqueraded.")
	fs.StringSliceVar(&c.NodePortAddresses, "nodeport-addresses", c.NodePortAddresses,
		"CIDRs of the node's addresses that serve node ports, or primary for the Node's own. Default: all.")
	fs.BoolVar(c.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", *c.IPTables.LocalhostNodePorts,
		"Serve node ports on the loopback address, for the node itself alone. Needs the program nft.")
	fs.StringVar(&c.BindAddress, "bind-address", c.BindAddress,
		"The node's own IP address, in place of the Node's. Nothing is bound to it.")
}

// addIPVSFlags adds those of the mode.
func (o *Options) addIPVSFlags(fs *pflag.FlagSet) {
	c := &o.proxy.IPVS
	fs.StringVar(&c.Scheduler, "ipvs-scheduler", c.Scheduler, "IPVS scheduler. Empty: rr.")
	fs.DurationVar(&c.SyncPeriod.Duration, "ipvs-sync-period", c.SyncPeriod.Duration,
		"Time between full comparisons with the kernel; more than 0.")
	fs.DurationVar(&c.MinSyncPeriod.Duration, "ipvs-min-sync-period", c.MinSyncPeriod.Duration,
		"Least time between two syncs; 0 for a sync with each change.")
	fs.StringSliceVar(&c.ExcludeCIDRs, "ipvs-exclude-cidrs", c.ExcludeCIDRs,
		"CIDRs in which virtual servers are never touched.")
	fs.BoolVar(&c.StrictARP, "ipvs-strict-arp", c.StrictARP,
		"Set arp_ignore to 1 and arp_announce to 2, so that no other interface answers for a Service's address.")
	fs.DurationVar(&c.TCPTimeout.Duration, "ipvs-tcp-timeout", c.TCPTimeout.Duration,
		"Idle time after which IPVS forgets a TCP connection. 0 leaves it.")
	fs.DurationVar(&c.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", c.TCPFinTimeout.Duration,
		"The same after a FIN. 0 leaves it.")
	fs.DurationVar(&c.UDPTimeout.Duration, "ipvs-udp-timeout", c.UDPTimeout.Duration,
		"The same for UDP. 0 leaves it.")
}

func (o *Options) addConntrackFlags(fs *pflag.FlagSet) {
	c := &o.proxy.Conntrack
	fs.Int32Var(c.MaxPerCore, "conntrack-max-per-core", *c.MaxPerCore,
		"Connections to track for each CPU. 0 leaves the limit, whatever --conntrack-min says.")
	fs.Int32Var(c.Min, "conntrack-min", *c.Min, "Connections to track at the least.")
	fs.DurationVar(&c.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", c.TCPEstablishedTimeout.Duration,
		"Idle time after which an established TCP connection is forgotten. 0 leaves it.")
	fs.DurationVar(&c.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", c.TCPCloseWaitTimeout.Duration,
		"The same for a TCP connection that one side has closed. 0 leaves it.")
	fs.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", c.TCPBeLiberal,
		"Do not take TCP packets outside the window for invalid.")
	fs.DurationVar(&c.UDPTimeout.Duration, "conntrack-udp-timeout", c.UDPTimeout.Duration,
		"Idle time after which UDP without an answer is forgotten. 0 leaves it.")
	fs.DurationVar(&c.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", c.UDPStreamTimeout.Duration,
		"The same for UDP with answers. 0 leaves it.")
}

// addProcessFlags adds those about the program itself.
func (o *Options) addProcessFlags(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.StringVar(&c.HealthzBindAddress, "healthz-bind-address", c.HealthzBindAddress,
		"IP address, with or without port, to serve health checks on. Empty: not at all.")
	fs.StringVar(&c.MetricsBindAddress, "metrics-bind-address", c.MetricsBindAddress,
		"IP address, or CIDR in which the node has one, with or without port, to serve metrics on. Empty: not at all.")
	fs.BoolVar(&c.BindAddressHardFail, "bind-address-hard-fail", c.BindAddressHardFail,
		"End the program if it cannot listen.")
	fs.Int32Var(&o.healthzPort, "healthz-port", healthzPort, "Port for health checks. 0: none.")
	fs.Int32Var(&o.metricsPort, "metrics-port", metricsPort, "Port for metrics. 0: none.")
	deprecate(fs, "healthz-port", "use --healthz-bind-address")
	deprecate(fs, "metrics-port", "use --metrics-bind-address")
	fs.BoolVar(&c.EnableProfiling, "profiling", c.EnableProfiling, "Serve /debug/pprof with the metrics.")
	fs.StringVar(&c.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", c.ShowHiddenMetricsForVersion,
		"Kubernetes version (such as 1.35) whose hidden metrics are shown.")
	fs.Int32Var(c.OOMScoreAdj, "oom-score-adj", *c.OOMScoreAdj, "The process's oom_score_adj, -1000 to 1000.")
	fs.Var(cliflag.NewMapStringBool(&c.FeatureGates), "feature-gates",
		"NAME=true or NAME=false, separated by commas. Those of Kubernetes that mean nothing here are ignored.")
}

func (o *Options) addClientFlags(fs *pflag.FlagSet) {
	c := &o.proxy.ClientConnection
	fs.StringVar(&c.Kubeconfig, "kubeconfig", c.Kubeconfig,
		"File that says how to reach the API server. Without it: the Pod's service account.")
	fs.StringVar(&c.ContentType, "kube-api-content-type", c.ContentType, "Content type of requests to the API server.")
	fs.Float32Var(&c.QPS, "kube-api-qps", c.QPS, "Requests to the API server in a second.")
	fs.Int32Var(&c.Burst, "kube-api-burst", c.Burst, "Requests to the API server at once.")
	fs.DurationVar(&o.proxy.ConfigSyncPeriod.Duration, "config-sync-period", o.proxy.ConfigSyncPeriod.Duration,
		"How often everything known from the API server is gone through again; more than 0. Has no effect: what has not changed is programmed already.")
}

// foreignFlags are kube-proxy's, now or once, for other modes and platforms. They
// are accepted so that a command line need not be changed.
func foreignFlags() *pflag.FlagSet {
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

// deprecate marks a flag. That fails only for a flag that does not exist.
func deprecate(fs *pflag.FlagSet, name, instead string) { _ = fs.MarkDeprecated(name, instead) }
