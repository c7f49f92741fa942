package config

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	logsapi "k8s.io/component-base/logs/api/v1"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Accepted values. The first content type is the default.
var (
	contentTypes     = []string{"application/vnd.kubernetes.protobuf", "application/json"}
	detectLocalModes = []plan.DetectLocalMode{plan.DetectClusterCIDR, plan.DetectNodeCIDR, plan.DetectBridgeInterface, plan.DetectInterfaceNamePrefix}
	wholeClaims      = []plan.ClaimMode{plan.ClaimAddress, plan.ClaimRoute}
	claims           = append([]plan.ClaimMode{plan.ClaimAuto, plan.ClaimPort}, wholeClaims...)
	snatModes        = []plan.SNATMode{plan.SNATAuto, plan.SNATSource, plan.SNATFWMark, plan.SNATOff}
	minorVersion     = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)
)

const (
	maxInterfaceName = 15
	// maxInterfacePrefix leaves room for the + that rules append.
	maxInterfacePrefix = maxInterfaceName - 1
	// maxRulePriority is the last priority before the rule of table main.
	maxRulePriority = routing.PriorityMain - 1
)

// builder turns documents with defaults into a Config and collects all errors.
type builder struct {
	path    func(flag string) *field.Path // see Options.path
	proxy   *proxyv1alpha1.KubeProxyConfiguration
	own     *KubeIPVSConfiguration
	errs    field.ErrorList
	notices []string
}

// err returns all errors, one per line, or nil.
func (b *builder) err() error {
	if len(b.errs) == 0 {
		return nil
	}
	lines := make([]string, len(b.errs))
	for i, err := range b.errs {
		lines[i] = err.Error()
	}
	if len(lines) == 1 {
		return errors.New("invalid configuration: " + lines[0])
	}
	return errors.New("invalid configuration:\n" + strings.Join(lines, "\n"))
}

func (b *builder) invalid(path *field.Path, value any, want string) {
	b.errs = append(b.errs, field.Invalid(path, value, want))
}

// config builds everything that follows from the two documents.
func (b *builder) config() Config {
	p := b.proxy
	if p.Mode != "" && p.Mode != modeIPVS {
		b.errs = append(b.errs, field.NotSupported(b.path("proxy-mode"), p.Mode, []string{modeIPVS}))
	}
	b.compat()
	c := Config{
		Plan:                        b.plan(),
		Healthz:                     b.addrPort(b.path("healthz-bind-address"), p.HealthzBindAddress),
		Probes:                      b.addrPort(b.path("probe-bind-address"), *b.own.ProbeBindAddress),
		BindAddressHardFail:         p.BindAddressHardFail,
		Profiling:                   p.EnableProfiling,
		ShowHiddenMetricsForVersion: p.ShowHiddenMetricsForVersion,
		ServiceMetrics:              b.own.ServiceMetrics,
		Source:                      b.source(),
		Conntrack:                   b.conntrack(),
		StateDir:                    b.absolute(b.path("state-dir"), b.own.StateDir),
		OOMScoreAdj:                 *p.OOMScoreAdj,
	}
	c.Metrics, c.MetricsIn = b.addrPortIn(b.path("metrics-bind-address"), p.MetricsBindAddress)
	c.SyncPeriod, c.MinSyncPeriod = b.syncPeriods()
	c.IPVSTimeouts = b.ipvsTimeouts()
	drain := b.own.DrainLostNodes
	c.ResetLostNodeConnections = b.own.ResetLostNodeConnections || drain != nil && !*drain
	if c.DrainDeadline = b.own.DrainDeadline.Duration; c.DrainDeadline <= 0 {
		b.invalid(b.path("drain-deadline"), c.DrainDeadline.String(), "must be more than 0")
	}
	if v := p.ShowHiddenMetricsForVersion; v != "" && !minorVersion.MatchString(v) {
		b.invalid(b.path("show-hidden-metrics-for-version"), v, "must be MAJOR.MINOR, such as 1.35")
	}
	b.inRange(b.path("service-metrics"), b.own.ServiceMetrics, 0, math.MaxInt32)
	b.inRange(b.path("oom-score-adj"), int(*p.OOMScoreAdj), -1000, 1000)
	b.logging(&c)
	if !c.Features.Enabled(allowExternalIPs) {
		b.own.VIPs.ExternalIPs, c.Plan.VIPs.ExternalIPs = plan.ClaimNone, plan.ClaimNone
	}
	c.Proxy, c.Own = *p, *b.own
	return c
}

func (b *builder) plan() plan.Config {
	p := b.proxy
	scheduler := cmp.Or(p.IPVS.Scheduler, defaultScheduler)
	if !slices.Contains(ipvs.Schedulers, scheduler) {
		b.errs = append(b.errs, field.NotSupported(b.path("ipvs-scheduler"), scheduler, ipvs.Schedulers))
	}
	c := plan.Config{
		NodeAddress:   b.nodeAddress(),
		Families:      slices.Clone(ip.Families),
		Scheduler:     scheduler,
		MasqueradeAll: p.IPTables.MasqueradeAll,

		MasqueradeExternalLocal: b.own.MasqueradeExternalLocal,
		LeaveToInputPolicy:      !*b.own.AcceptServiceTraffic,

		LocalTraffic:      b.localTraffic(),
		NodePortAddresses: b.nodePortAddresses(),
		ExcludeCIDRs:      b.prefixes(b.path("ipvs-exclude-cidrs"), p.IPVS.ExcludeCIDRs),
		StrictARP:         p.IPVS.StrictARP,
		UDPDrain:          b.own.UDPDrain,
		RemoteFallback:    b.own.RemoteFallback,

		LocalhostNodePorts: *p.IPTables.LocalhostNodePorts,
	}
	bit := int(*p.IPTables.MasqueradeBit)
	if b.inRange(b.path("iptables-masquerade-bit"), bit, 0, 31) {
		c.MasqueradeMark = 1 << bit
	}
	c.SNAT = b.snat(c.MasqueradeMark)
	c.LocalMark = b.localMark(c.MasqueradeMark, c.SNAT.Mark)
	c.VIPs = b.vips(&c)
	return c
}

// nodeAddress reads the bind address. Nothing is bound to it. The unspecified address, which is
// the default, leaves the choice to the Node object. So does a loopback address, which some
// configurations have to hide the pages of kube-proxy: no client can reach a node there.
func (b *builder) nodeAddress() netip.Addr {
	a := b.addr(b.path("bind-address"), cmp.Or(b.proxy.BindAddress, "0.0.0.0"))
	if a.IsUnspecified() || a.IsLoopback() {
		return netip.Addr{}
	}
	return a
}

// localTraffic ignores settings that the mode does not use, valid or not, as kube-proxy
// does.
func (b *builder) localTraffic() plan.LocalTraffic {
	t := plan.LocalTraffic{Mode: cmp.Or(plan.DetectLocalMode(b.proxy.DetectLocalMode), plan.DetectClusterCIDR)}
	d := b.proxy.DetectLocal
	switch t.Mode {
	case plan.DetectClusterCIDR:
		return b.clusterCIDR()
	case plan.DetectNodeCIDR:
	case plan.DetectBridgeInterface:
		t.Interface = b.interfaceName(b.path("pod-bridge-interface"), d.BridgeInterface, maxInterfaceName)
	case plan.DetectInterfaceNamePrefix:
		t.Interface = b.interfaceName(b.path("pod-interface-name-prefix"), d.InterfaceNamePrefix, maxInterfacePrefix)
	default:
		b.errs = append(b.errs, field.NotSupported(b.path("detect-local-mode"), t.Mode, detectLocalModes))
	}
	return t
}

func (b *builder) clusterCIDR() plan.LocalTraffic {
	path, value := b.path("cluster-cidr"), b.proxy.ClusterCIDR
	if value == "" {
		b.notices = append(b.notices, path.String()+" is not set: Pods cannot be distinguished from other clients, so traffic to cluster IPs is not masqueraded")
		return plan.LocalTraffic{Mode: plan.DetectNone}
	}
	t := plan.LocalTraffic{Mode: plan.DetectClusterCIDR}
	for _, s := range strings.Split(value, ",") {
		if p, ok := b.prefix(path, s); ok {
			t.CIDRs = append(t.CIDRs, p)
		}
	}
	if n := strings.Count(value, ","); n > 1 || len(t.CIDRs) == 2 && ip.Of(t.CIDRs[0].Addr()) == ip.Of(t.CIDRs[1].Addr()) {
		b.invalid(path, value, "must be one CIDR, or one of each family separated by a comma, such as 10.244.0.0/16,fd00:10:244::/56")
	}
	return t
}

func (b *builder) nodePortAddresses() plan.NodePortAddresses {
	const primary = "primary"
	path, values := b.path("nodeport-addresses"), b.proxy.NodePortAddresses
	if !slices.Contains(values, primary) {
		return plan.NodePortAddresses{Prefixes: b.prefixes(path, values)}
	}
	if len(values) > 1 {
		b.invalid(path, strings.Join(values, ","), "must be either primary alone or CIDRs")
	}
	return plan.NodePortAddresses{Primary: true}
}

func (b *builder) syncPeriods() (period, least time.Duration) {
	c := b.proxy.IPVS
	period, least = c.SyncPeriod.Duration, c.MinSyncPeriod.Duration
	path := b.path("ipvs-sync-period")
	leastPath := b.path("ipvs-min-sync-period")
	switch {
	case period <= 0:
		b.invalid(path, period.String(), "must be more than 0")
	case least < 0:
		b.invalid(leastPath, least.String(), "must not be negative")
	case least > period:
		b.invalid(leastPath, least.String(), fmt.Sprintf("must not be more than %s, which is %s", path, period))
	}
	return period, least
}

func (b *builder) ipvsTimeouts() ipvs.Timeouts {
	c := b.proxy.IPVS
	seconds := func(flag string, d metav1.Duration) uint32 {
		return uint32(b.seconds(b.path(flag), d.Duration) / time.Second)
	}
	t := ipvs.Timeouts{
		TCP:    seconds("ipvs-tcp-timeout", c.TCPTimeout),
		TCPFin: seconds("ipvs-tcpfin-timeout", c.TCPFinTimeout),
		UDP:    seconds("ipvs-udp-timeout", c.UDPTimeout),
	}
	if b.own.TimeoutsFromConntrack {
		tracked := b.proxy.Conntrack
		t.TCP = cmp.Or(t.TCP, wholeSeconds(tracked.TCPEstablishedTimeout.Duration))
		t.UDP = cmp.Or(t.UDP, wholeSeconds(tracked.UDPStreamTimeout.Duration), wholeSeconds(tracked.UDPTimeout.Duration))
	}
	return t
}

// wholeSeconds converts a validated conntrack timeout for IPVS.
func wholeSeconds(d time.Duration) uint32 { return uint32(d / time.Second) }

func (b *builder) conntrack() Conntrack {
	c := b.proxy.Conntrack
	seconds := func(flag string, d metav1.Duration) time.Duration {
		return b.seconds(b.path(flag), d.Duration)
	}
	b.inRange(b.path("conntrack-max-per-core"), int(*c.MaxPerCore), 0, math.MaxInt32)
	b.inRange(b.path("conntrack-min"), int(*c.Min), 0, math.MaxInt32)
	return Conntrack{
		MaxPerCore:     *c.MaxPerCore,
		Min:            *c.Min,
		TCPEstablished: seconds("conntrack-tcp-timeout-established", *c.TCPEstablishedTimeout),
		TCPCloseWait:   seconds("conntrack-tcp-timeout-close-wait", *c.TCPCloseWaitTimeout),
		TCPBeLiberal:   c.TCPBeLiberal,
		UDP:            seconds("conntrack-udp-timeout", c.UDPTimeout),
		UDPStream:      seconds("conntrack-udp-timeout-stream", c.UDPStreamTimeout),
	}
}

func (b *builder) source() Source {
	c := b.proxy.ClientConnection
	s := Source{
		Manifests:         b.own.Manifests,
		Kubeconfig:        c.Kubeconfig,
		ContentType:       cmp.Or(c.ContentType, contentTypes[0]),
		AcceptContentType: c.AcceptContentTypes,
		QPS:               c.QPS,
		Burst:             int(c.Burst),
		ConfigSyncPeriod:  b.proxy.ConfigSyncPeriod.Duration,
	}
	manifests := b.path("manifests")
	if s.Manifests != "" && s.Kubeconfig != "" {
		b.invalid(manifests, s.Manifests, fmt.Sprintf("Services come either from manifests or from an API server: set only one of this and %s", b.path("kubeconfig")))
	}
	if !slices.Contains(contentTypes, s.ContentType) {
		b.errs = append(b.errs, field.NotSupported(b.path("kube-api-content-type"), s.ContentType, contentTypes))
	}
	b.inRange(b.path("kube-api-burst"), s.Burst, 0, math.MaxInt32)
	if math.IsNaN(float64(s.QPS)) || math.IsInf(float64(s.QPS), 0) {
		b.invalid(b.path("kube-api-qps"), fmt.Sprint(s.QPS), "must be a finite number; negative for no limit")
	}
	if s.ConfigSyncPeriod <= 0 {
		b.invalid(b.path("config-sync-period"), s.ConfigSyncPeriod.String(), "must be more than 0")
	}
	return s
}

// master validates --master, which has no field in the file.
func (b *builder) master(value string) string {
	path := b.path("master")
	if value == "" {
		return ""
	}
	if b.own.Manifests != "" {
		b.invalid(path, value, fmt.Sprintf("Services come either from manifests or from an API server: set only one of this and %s", b.path("manifests")))
	}
	address := value
	if !strings.Contains(value, "://") {
		address = "https://" + value // client-go adds a scheme too
	}
	if u, err := url.Parse(address); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		b.invalid(path, value, "must be a URL such as https://10.0.0.1:6443, or a host and a port")
	}
	return value
}

// nodeName returns the override or the host name, in the form in which the kubelet
// registers it.
func (b *builder) nodeName(hostname func() (string, error)) string {
	path := b.path("hostname-override")
	if override := b.proxy.HostnameOverride; override != "" {
		name := strings.ToLower(strings.TrimSpace(override))
		for _, want := range validation.IsDNS1123Subdomain(name) {
			b.invalid(path, override, want)
		}
		return name
	}
	name, err := hostname()
	name = strings.ToLower(strings.TrimSpace(name))
	if err != nil || name == "" {
		b.errs = append(b.errs, field.Required(path, fmt.Sprintf("the host name cannot be read (%v)", err)))
	}
	return name
}

// action returns what to do; the flags that select it exclude each other.
func (b *builder) action(o *Options) Action {
	action, flag := Serve, ""
	for _, a := range []struct {
		set    bool
		action Action
	}{{o.action.cleanup, Cleanup}, {o.action.initOnly, InitOnly}, {o.action.once, Once}} {
		switch name := "--" + string(a.action); {
		case !a.set:
		case flag != "":
			b.invalid(field.NewPath(name), true, "cannot be combined with "+flag)
		default:
			action, flag = a.action, name
		}
	}
	if o.action.dryRun && action != Once {
		b.errs = append(b.errs, field.Forbidden(field.NewPath("--dry-run"), "can only be used with --once"))
	} else if o.action.dryRun {
		action = DryRun
	}
	return action
}

// logging validates feature gates and logging together, because some formats are behind
// gates.
func (b *builder) logging(c *Config) {
	gates, unknown, err := featureGates(b.proxy.FeatureGates)
	if err != nil {
		b.invalid(b.path("feature-gates"), fmt.Sprint(b.proxy.FeatureGates), err.Error())
	}
	if len(unknown) > 0 {
		b.notices = append(b.notices, "ignoring feature gates that kube-ipvs does not have: "+strings.Join(unknown, ", "))
	}
	c.Features, c.Logging = gates, b.proxy.Logging
	for _, err := range logsapi.Validate(&c.Logging, gates, b.path("logging")) {
		b.errs = append(b.errs, loggingFlagError(err))
	}
}

// loggingFlagError replaces the name of a field, the only one that the library knows,
// by the name of the flag.
func loggingFlagError(err *field.Error) *field.Error {
	flags := map[string]string{
		"--logging.format":                      "--logging-format",
		"--logging.flushFrequency":              "--log-flush-frequency",
		"--logging.verbosity":                   "--v",
		"--logging.vmodule":                     "--vmodule",
		"--logging.options.text.splitStream":    "--log-text-split-stream",
		"--logging.options.text.infoBufferSize": "--log-text-info-buffer-size",
		"--logging.options.json.splitStream":    "--log-json-split-stream",
		"--logging.options.json.infoBufferSize": "--log-json-info-buffer-size",
	}
	if flag, ok := flags[err.Field]; ok {
		err.Field = flag
	}
	return err
}

// kubeletDropMark is the bit of KUBE-MARK-DROP. Kubelets before 1.28 drop every packet
// that carries it.
const kubeletDropMark = 0x8000

// spareBit replaces a bit of our default marks that is --iptables-masquerade-bit: with any of
// these bits kube-proxy starts, so kube-ipvs must. The default marks do not need it otherwise.
const spareBit = 0x2

// markBits are the bits of the mark that a setting uses.
type markBits struct {
	setting string
	bits    uint32
}

// apart rejects each setting that shares a bit with one before it. Kubernetes allows
// its own two marks to be equal.
func (b *builder) apart(marks ...markBits) {
	for i, m := range marks {
		for _, other := range marks[:i] {
			if m.bits&other.bits != 0 && m.bits != kubeletDropMark {
				b.invalid(field.NewPath(m.setting), Mark(m.bits).String(), "must not have a bit of "+other.setting)
			}
		}
	}
}

// localMark keeps the fwmarks clear of the masquerade mark, and ensures that none of
// them contains a reply mark.
func (b *builder) localMark(masquerade, reply uint32) plan.LocalMark {
	path, text := b.path("local-mark"), b.own.LocalMark
	if text == localMarkOff {
		return plan.LocalMark{}
	}
	value, mask, _ := strings.Cut(string(text), "/")
	var m plan.LocalMark
	for _, part := range []struct {
		text string
		to   *uint32
	}{{value, &m.Value}, {mask, &m.Mask}} {
		v, err := ParseMark(part.text)
		if err != nil {
			b.invalid(path, text, fmt.Sprintf("must be off or VALUE/MASK, such as %s", DefaultLocalMark))
			return plan.LocalMark{}
		}
		*part.to = uint32(v)
	}
	if text == DefaultLocalMark {
		if m.Value&masquerade != 0 {
			m.Value = m.Value&^masquerade | spareBit
		}
		m.Mask &^= masquerade // the remaining bits suffice
	}
	if m.Value == 0 || m.Value&^m.Mask != 0 || m.Max() == 0 {
		b.invalid(path, text, "must have a value that is not 0, and a mask with the value's bits and at least one more")
	}
	b.apart(
		markBits{b.path("iptables-masquerade-bit").String(), masquerade},
		markBits{"kubelet's drop mark", kubeletDropMark},
		markBits{path.String(), m.Mask})
	b.apart(markBits{b.path("reply-mark").String(), reply}, markBits{path.String(), m.Value})
	return m
}

// snat builds the settings of SNAT by interface and of reply routing.
func (b *builder) snat(masquerade uint32) plan.SNAT {
	c := b.own.SNAT
	path := b.path("snat-mode")
	mode := plan.SNATMode(c.Mode)
	if !slices.Contains(snatModes, mode) {
		b.errs = append(b.errs, field.NotSupported(path, mode, snatModes))
	}
	sources := b.path("snat-source")
	if len(c.Sources) > 0 && (mode == plan.SNATFWMark || mode == plan.SNATOff) {
		b.errs = append(b.errs, field.Forbidden(sources, fmt.Sprintf("%s is %s, which uses no source address; must be auto or snat", path, mode)))
	}
	gateways := b.path("reply-gateway")
	if len(c.Gateways) > 0 && (mode == plan.SNATSource || mode == plan.SNATOff) {
		b.errs = append(b.errs, field.Forbidden(gateways, fmt.Sprintf("%s is %s, which has no reply routing; must be auto or fwmark", path, mode)))
	}
	mark := b.path("reply-mark")
	if c.Mark == DefaultReplyMark {
		c.Mark &^= Mark(masquerade) // the remaining bits suffice
	}
	if c.Mark == 0 {
		b.invalid(mark, c.Mark.String(), fmt.Sprintf("must have at least one bit set, such as %s", DefaultReplyMark))
	}
	b.apart(
		markBits{b.path("iptables-masquerade-bit").String(), masquerade},
		markBits{"kubelet's drop mark", kubeletDropMark},
		markBits{mark.String(), uint32(c.Mark)})
	b.inRange(b.path("reply-rule-priority"), c.Priority, 1, maxRulePriority)
	return plan.SNAT{
		Mode: mode, Sources: b.byInterface(sources, c.Sources, false), Gateways: b.byInterface(gateways, c.Gateways, true),
		Mark: uint32(c.Mark), Priority: c.Priority,
	}
}

// maxGatewayTable leaves room for the indexes of interfaces.
const maxGatewayTable = math.MaxInt32 - 1<<20

// vips builds the settings of how VIPs are claimed.
func (b *builder) vips(p *plan.Config) plan.VIPs {
	c := b.own.VIPs
	b.claim(b.path("claim-cluster-ips"), c.ClusterIPs, append([]plan.ClaimMode{plan.ClaimAuto}, wholeClaims...))
	b.claim(b.path("claim-load-balancers"), c.LoadBalancers, claims)
	b.claim(b.path("claim-external-ips"), c.ExternalIPs, append([]plan.ClaimMode{plan.ClaimNone}, claims...))
	mark := b.path("claim-mark")
	if c.Mark == DefaultClaimMark && uint32(c.Mark) == p.MasqueradeMark {
		c.Mark = spareBit
	}
	for _, other := range []markBits{
		{b.path("iptables-masquerade-bit").String(), p.MasqueradeMark},
		{"kubelet's drop mark", kubeletDropMark},
		{b.path("reply-mark").String(), p.SNAT.Mark},
		{"the value of " + b.path("local-mark").String(), p.LocalMark.Value},
	} {
		b.apart(other, markBits{mark.String(), uint32(c.Mark)})
	}
	table := b.path("claim-table")
	if b.inRange(table, c.Table, 1, math.MaxInt32) && c.Table >= routing.TableDefault && c.Table <= routing.TableLocal {
		b.invalid(table, c.Table, "must be a table of its own: 253 to 255 are the default, main and local tables")
	}
	if len(b.own.SNAT.Gateways) > 0 && (c.Table <= routing.TableLocal || c.Table > maxGatewayTable) {
		b.invalid(table, c.Table, fmt.Sprintf("must be between 256 and %d with %s: the tables of gateways follow it", maxGatewayTable, b.path("reply-gateway")))
	}
	priority := b.path("claim-rule-priority")
	if c.Priority == DefaultClaimRulePriority {
		c.Priority = min(c.Priority, p.SNAT.Priority-1)
	}
	if b.inRange(priority, c.Priority, 1, maxRulePriority) && c.Priority >= p.SNAT.Priority {
		b.invalid(priority, c.Priority, fmt.Sprintf("must be less than %s, which is %d", b.path("reply-rule-priority"), p.SNAT.Priority))
	}
	return plan.VIPs{
		ClusterIPs: c.ClusterIPs, LoadBalancers: c.LoadBalancers, ExternalIPs: c.ExternalIPs, Ping: *c.Ping,
		Mark: uint32(c.Mark), Table: c.Table, Priority: c.Priority,
	}
}

func (b *builder) claim(path *field.Path, c plan.ClaimMode, supported []plan.ClaimMode) {
	if !slices.Contains(supported, c) {
		b.errs = append(b.errs, field.NotSupported(path, c, supported))
	}
}
