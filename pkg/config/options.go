package config

import (
	"fmt"
	"os"
	"reflect"
	"strings"

	"github.com/spf13/pflag"

	"k8s.io/apimachinery/pkg/util/validation/field"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // registers the JSON format
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// Options holds the command line until Complete turns it into a Config.
type Options struct {
	// Hostname returns the host name, the default of the Node's name.
	Hostname func() (string, error)

	configFile, writeConfigTo string
	action                    struct{ cleanup, initOnly, once, dryRun bool }
	master, hostnameOverride  string
	healthzPort, metricsPort  int32

	proxy proxyv1alpha1.KubeProxyConfiguration // bound to flags
	own   KubeIPVSConfiguration                // bound to flags

	drainLostNodes bool // --drain-lost-nodes

	flags  flagGroups
	fields map[string]string // paths of the fields that flags set, by flag
}

// flagGroups sorts the flags by how the configuration file affects them.
type flagGroups struct {
	general  *pflag.FlagSet // always apply
	own      *pflag.FlagSet // take precedence over the file if they are set
	document *pflag.FlagSet // those of own that have a field in the file
	logging  *pflag.FlagSet // likewise take precedence over the file
	proxy    *pflag.FlagSet // have no effect with a file
	ignored  *pflag.FlagSet // never have an effect
}

// NewOptions returns options with defaults.
func NewOptions() *Options {
	o := &Options{Hostname: os.Hostname}
	setProxyDefaults(&o.proxy)
	setOwnDefaults(&o.own)
	o.proxy.IPVS.MinSyncPeriod.Duration = defaultFlagMinSyncPeriod
	o.flags = flagGroups{
		general:  o.generalFlags(),
		document: documentFlags(&o.own),
		logging:  newFlagSet(),
		proxy:    o.proxyFlags(),
		ignored:  ignoredFlags(),
	}
	o.flags.own = o.ownFlags()
	logsapi.AddFlags(&o.proxy.Logging, o.flags.logging)
	o.fields = o.flagFields()
	return o
}

// Flags returns the flags in named sections. Call Complete after they are parsed.
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
		{"ignored", o.flags.ignored},
	} {
		sections.FlagSet(s.name).AddFlagSet(s.flags)
	}
	return sections
}

// WriteConfigTo returns the file to which the configuration is written instead of
// running, or "".
func (o *Options) WriteConfigTo() string { return o.writeConfigTo }

// Complete reads the configuration file, applies defaults and validates everything. The
// error lists all invalid settings with their flag or field, their value, and what
// would be valid.
func (o *Options) Complete() (Config, error) {
	proxy, own, notices, err := o.documents()
	if err != nil {
		return Config{}, err
	}
	b := builder{path: o.path, proxy: proxy, own: own, notices: append(notices, o.ignoredNotices()...)}
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

// path names a setting as it was written: as a flag, or as a field of the file. It takes the name
// of the flag.
func (o *Options) path(flag string) *field.Path {
	if o.configFile == "" || o.set(flag) && o.flags.proxy.Lookup(flag) == nil {
		return field.NewPath("--" + flag)
	}
	return field.NewPath(o.configFile + ": " + o.fields[flag])
}

// flagFields returns the paths of the fields that flags set, by flag.
func (o *Options) flagFields() map[string]string {
	// The values of these flags do not show which field they set.
	out := map[string]string{
		"nodeport-addresses": "nodePortAddresses",
		"ipvs-exclude-cidrs": "ipvs.excludeCIDRs",
		"feature-gates":      "featureGates",
		"hostname-override":  "hostnameOverride",
		"logging":            "logging", // all flags of logging
	}
	own := fieldPaths(&o.own)
	for _, s := range settings {
		out[s.name()] = own[fieldOf(s, &o.own)]
	}
	proxy := fieldPaths(&o.proxy)
	o.flags.proxy.VisitAll(func(f *pflag.Flag) {
		if path, ok := proxy[reflect.ValueOf(f.Value).Pointer()]; ok {
			out[f.Name] = path
		}
	})
	return out
}

// documents returns both documents with defaults and with the flags that apply.
func (o *Options) documents() (*proxyv1alpha1.KubeProxyConfiguration, *KubeIPVSConfiguration, []string, error) {
	proxy := o.proxyFromFlags()
	own, err := o.ownFromFlags()
	if err != nil {
		return nil, nil, nil, err
	}
	notices := o.applyPortFlags(proxy)
	if o.configFile != "" {
		f, err := readFile(o.configFile, o.own.Compat)
		if err != nil {
			return nil, nil, nil, err
		}
		if err := o.overLogging(&f.proxy.Logging); err != nil {
			return nil, nil, nil, err
		}
		proxy, notices = &f.proxy, append(f.notices, o.overriddenNotices()...)
		own = &f.own
		if err := o.overOwn(own); err != nil {
			return nil, nil, nil, err
		}
	}
	if o.hostnameOverride != "" {
		proxy.HostnameOverride = o.hostnameOverride
	}
	return proxy, own, notices, nil
}

// overLogging overrides fields of the file by logging flags that are set. The patterns of --vmodule
// precede those of the file, because the first one that matches applies.
func (o *Options) overLogging(file *logsapi.LoggingConfiguration) error {
	patterns := file.VModule
	file.VModule = nil
	err := copyChanged(o.flags.logging, loggingFlags(file))
	file.VModule = append(file.VModule, patterns...)
	return err
}

// overOwn overrides fields of the file's document by flags that are set.
func (o *Options) overOwn(file *KubeIPVSConfiguration) error {
	if o.set("drain-lost-nodes") {
		file.ResetLostNodeConnections, file.DrainLostNodes = !o.drainLostNodes, nil
	}
	if o.set("reset-lost-node-connections") {
		file.DrainLostNodes = nil
	}
	return copyChanged(o.flags.document, documentFlags(file))
}

// applyPortFlags applies the deprecated port flags as kube-proxy does: 0 disables the listener, and any
// other port applies to an address without a port, which the default is not. An empty address is the
// default. It returns a notice for each port without effect.
func (o *Options) applyPortFlags(c *proxyv1alpha1.KubeProxyConfiguration) []string {
	var notices []string
	for _, f := range []struct {
		address *string
		name    string
		port    int32
	}{
		{&c.HealthzBindAddress, "healthz", o.healthzPort},
		{&c.MetricsBindAddress, "metrics", o.metricsPort},
	} {
		address := f.name + "-bind-address"
		if *f.address == "" {
			*f.address = o.flags.proxy.Lookup(address).DefValue
		}
		with := withPort(*f.address, int(f.port))
		switch {
		case f.port == 0:
			*f.address = ""
			continue
		case o.set(f.name+"-port") && with == *f.address && !strings.HasSuffix(with, fmt.Sprintf(":%d", f.port)):
			notices = append(notices, fmt.Sprintf("--%s-port has no effect, as in kube-proxy: --%s is %s", f.name, address, with))
		}
		*f.address = with
	}
	return notices
}

// set reports whether a flag was given.
func (o *Options) set(name string) bool {
	for _, group := range []*pflag.FlagSet{o.flags.general, o.flags.own, o.flags.proxy} {
		if f := group.Lookup(name); f != nil {
			return f.Changed
		}
	}
	return false
}

// values returns the values of all flags by name.
func (o *Options) values() map[string]string {
	out := map[string]string{}
	for _, group := range o.Flags().FlagSets {
		group.VisitAll(func(f *pflag.Flag) { out[f.Name] = f.Value.String() })
	}
	return out
}

// overriddenNotices returns a notice about flags that have no effect because of the
// file.
func (o *Options) overriddenNotices() []string {
	names := changed(o.flags.proxy)
	if len(names) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("with --config the values of the file apply; ignoring %s", strings.Join(names, ", "))}
}

// ignoredNotices returns a notice for each given flag of another mode.
func (o *Options) ignoredNotices() []string {
	var notices []string
	for _, name := range changed(o.flags.ignored) {
		notices = append(notices, name+" has no effect: it is for another proxy mode or platform")
	}
	return notices
}

// changed returns the names of the given flags of a group, with dashes.
func changed(group *pflag.FlagSet) []string {
	var names []string
	group.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			names = append(names, "--"+f.Name)
		}
	})
	return names
}

// loggingFlags returns flags that set a logging configuration.
func loggingFlags(c *logsapi.LoggingConfiguration) *pflag.FlagSet {
	fs := newFlagSet()
	logsapi.AddFlags(c, fs)
	return fs
}

// copyChanged copies the given flags of one group to another.
func copyChanged(from, to *pflag.FlagSet) error {
	var err error
	from.VisitAll(func(f *pflag.Flag) {
		if f.Changed && err == nil {
			err = to.Set(f.Name, f.Value.String())
		}
	})
	return err
}
