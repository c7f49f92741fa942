package config

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"k8s.io/apimachinery/pkg/util/validation/field"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // else --logging-format knows text only
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// Options holds the command line until it becomes a Config.
type Options struct {
	// Hostname names the machine where no override does.
	Hostname func() (string, error)

	configFile, writeConfigTo string
	action                    struct{ cleanup, initOnly, once, dryRun bool }
	master, hostnameOverride  string
	healthzPort, metricsPort  int32

	proxy   proxyv1alpha1.KubeProxyConfiguration // bound to flags
	own     KubeIPVSConfiguration                // bound to flags
	sources []string                             // --snat-source

	drainLostNodes bool // --drain-lost-nodes

	flags flagGroups
}

// flagGroups are the flags by what the configuration file does to them.
type flagGroups struct {
	general *pflag.FlagSet // count always
	own     *pflag.FlagSet // win over the file where they are set
	logging *pflag.FlagSet // likewise
	proxy   *pflag.FlagSet // have no effect beside a file
	foreign *pflag.FlagSet // have no effect at all
}

// NewOptions gives the defaults.
func NewOptions() *Options {
	o := &Options{Hostname: os.Hostname}
	setProxyDefaults(&o.proxy)
	setOwnDefaults(&o.own)
	o.proxy.IPVS.MinSyncPeriod.Duration = defaultFlagMinSyncPeriod
	o.flags = flagGroups{
		general: o.generalFlags(),
		own:     o.ownFlags(),
		logging: newFlagSet(),
		proxy:   o.proxyFlags(),
		foreign: foreignFlags(),
	}
	logsapi.AddFlags(&o.proxy.Logging, o.flags.logging)
	return o
}

// Flags gives the flags in named sections, for a command to add. Complete is
// called after they have been parsed.
func (o *Options) Flags() cliflag.NamedFlagSets {
	var sections cliflag.NamedFlagSets
	for _, s := range []struct {
		name  string
		flags *pflag.FlagSet
	}{
		{"general", o.flags.general},
		{"own", o.flags.own},
		{"kube-proxy", o.flags.proxy},
		{"logging", o.flags.logging},
		{"ignored", o.flags.foreign},
	} {
		sections.FlagSet(s.name).AddFlagSet(s.flags)
	}
	return sections
}

// WriteConfigTo is the file that the configuration is to be written to in
// place of anything else; "" for none.
func (o *Options) WriteConfigTo() string { return o.writeConfigTo }

// Complete reads the configuration file, applies defaults and checks all of
// it. The error lists everything that is wrong, each with flag or field, value
// and what would be right.
func (o *Options) Complete() (Config, error) {
	proxy, own, notices, err := o.documents()
	if err != nil {
		return Config{}, err
	}
	b := builder{path: o.path, proxy: proxy, own: own, notices: append(notices, o.foreignNotices()...)}
	if o.sourcesFromFlags() {
		own.SNAT.Sources = b.sourceFlags(o.sources)
	}
	c := b.config()
	c.Source.Master = b.master(o.master)
	c.Plan.NodeName = b.nodeName(o.Hostname)
	c.Action = b.action(o)
	c.File = o.configFile
	c.Flags = o.values()
	c.Notices = b.notices
	if err := b.err(); err != nil {
		return Config{}, err
	}
	return c, nil
}

// path names a setting as it was written: as a flag or as a field of the file.
func (o *Options) path(flag, fieldPath string) *field.Path {
	if o.configFile == "" || o.set(flag) && o.flags.proxy.Lookup(flag) == nil {
		return field.NewPath("--" + flag)
	}
	return field.NewPath(o.configFile + ": " + fieldPath)
}

func (o *Options) sourcesFromFlags() bool { return o.configFile == "" || o.set("snat-source") }

// documents gives both documents with defaults and with the flags that count.
func (o *Options) documents() (*proxyv1alpha1.KubeProxyConfiguration, *KubeIPVSConfiguration, []string, error) {
	proxy, own := o.proxyFromFlags(), o.ownFromFlags()
	o.applyPortFlags(proxy)
	var notices []string
	if o.configFile != "" {
		f, err := readFile(o.configFile, o.own.Compat)
		if err != nil {
			return nil, nil, nil, err
		}
		if err := copyChanged(o.flags.logging, loggingFlags(&f.proxy.Logging)); err != nil {
			return nil, nil, nil, err
		}
		proxy, notices = &f.proxy, append(f.notices, o.overriddenNotices()...)
		own = o.overOwn(&f.own)
	}
	if o.hostnameOverride != "" {
		proxy.HostnameOverride = o.hostnameOverride
	}
	return proxy, own, notices, nil
}

// overOwn lays our flags that are set over the file's document.
func (o *Options) overOwn(file *KubeIPVSConfiguration) *KubeIPVSConfiguration {
	own := &o.own
	overlay(o, "compat", &file.Compat, own.Compat)
	overlay(o, "manifests", &file.Manifests, own.Manifests)
	overlay(o, "state-dir", &file.StateDir, own.StateDir)
	overlay(o, "service-metrics", &file.ServiceMetrics, own.ServiceMetrics)
	overlay(o, "probe-bind-address", &file.ProbeBindAddress, own.ProbeBindAddress)
	overlay(o, "masquerade-external-local", &file.MasqueradeExternalLocal, own.MasqueradeExternalLocal)
	overlay(o, "local-mark", &file.LocalMark, own.LocalMark)
	overlay(o, "udp-drain", &file.UDPDrain, own.UDPDrain)
	overlay(o, "drain-deadline", &file.DrainDeadline, own.DrainDeadline)
	if o.set("drain-lost-nodes") {
		file.ResetLostNodeConnections, file.DrainLostNodes = !o.drainLostNodes, nil
	}
	if o.set("reset-lost-node-connections") {
		file.ResetLostNodeConnections, file.DrainLostNodes = own.ResetLostNodeConnections, nil
	}
	overlay(o, "timeouts-from-conntrack", &file.TimeoutsFromConntrack, own.TimeoutsFromConntrack)
	overlay(o, "snat-mode", &file.SNAT.Mode, own.SNAT.Mode)
	overlay(o, "reply-mark", &file.SNAT.Mark, own.SNAT.Mark)
	overlay(o, "reply-rule-priority", &file.SNAT.Priority, own.SNAT.Priority)
	overlay(o, "claim-cluster-ips", &file.VIPs.ClusterIPs, own.VIPs.ClusterIPs)
	overlay(o, "claim-load-balancers", &file.VIPs.LoadBalancers, own.VIPs.LoadBalancers)
	overlay(o, "claim-external-ips", &file.VIPs.ExternalIPs, own.VIPs.ExternalIPs)
	overlay(o, "vip-ping", &file.VIPs.Ping, own.VIPs.Ping)
	overlay(o, "claim-mark", &file.VIPs.Mark, own.VIPs.Mark)
	overlay(o, "claim-table", &file.VIPs.Table, own.VIPs.Table)
	overlay(o, "claim-rule-priority", &file.VIPs.Priority, own.VIPs.Priority)
	return file
}

// overlay takes a flag's value if it is set.
func overlay[T any](o *Options, flag string, file *T, value T) {
	if o.set(flag) {
		*file = value
	}
}

// applyPortFlags does what the deprecated flags for ports alone ask for: 0
// ends listening, anything else counts where no address is given.
func (o *Options) applyPortFlags(c *proxyv1alpha1.KubeProxyConfiguration) {
	for _, f := range []struct {
		address *string
		name    string
		port    int32
		bare    string
	}{
		{&c.HealthzBindAddress, "healthz", o.healthzPort, "0.0.0.0"},
		{&c.MetricsBindAddress, "metrics", o.metricsPort, "127.0.0.1"},
	} {
		switch {
		case f.port == 0:
			*f.address = ""
		case !o.set(f.name + "-bind-address"):
			*f.address = withPort(f.bare, int(f.port))
		default:
			*f.address = withPort(*f.address, int(f.port))
		}
	}
}

// set says whether a flag was given.
func (o *Options) set(name string) bool {
	for _, group := range []*pflag.FlagSet{o.flags.general, o.flags.own, o.flags.proxy} {
		if f := group.Lookup(name); f != nil {
			return f.Changed
		}
	}
	return false
}

// values gives every flag's, by name.
func (o *Options) values() map[string]string {
	out := map[string]string{}
	for _, group := range o.Flags().FlagSets {
		group.VisitAll(func(f *pflag.Flag) { out[f.Name] = f.Value.String() })
	}
	return out
}

// overriddenNotices names the flags that have no effect beside the file.
func (o *Options) overriddenNotices() []string {
	names := changed(o.flags.proxy)
	if len(names) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("with --config the file's values count, not those of %s", strings.Join(names, ", "))}
}

// foreignNotices names, one by one, the flags of other modes.
func (o *Options) foreignNotices() []string {
	var notices []string
	for _, name := range changed(o.flags.foreign) {
		notices = append(notices, name+" has no effect: it is for another proxy mode or platform")
	}
	return notices
}

// changed lists the flags of a group that were given, as they are written.
func changed(group *pflag.FlagSet) []string {
	var names []string
	group.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			names = append(names, "--"+f.Name)
		}
	})
	return names
}

// loggingFlags gives flags that set a logging configuration.
func loggingFlags(c *logsapi.LoggingConfiguration) *pflag.FlagSet {
	fs := newFlagSet()
	logsapi.AddFlags(c, fs)
	return fs
}

// copyChanged sets the flags that were given in one group in another.
func copyChanged(from, to *pflag.FlagSet) error {
	var err error
	from.VisitAll(func(f *pflag.Flag) {
		if f.Changed && err == nil {
			err = to.Set(f.Name, f.Value.String())
		}
	})
	return err
}
