package config

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// setting is a field of KubeIPVSConfiguration and its flag. To add one, add the field and an entry
// to settings. Everything else follows: the flag, the defaults, the profile of --compat, the field's
// name in errors and, with make docs, the references, the man pages and the chart's schema.
type setting interface {
	name() string                                   // of the flag
	pointer(*KubeIPVSConfiguration) any             // to the field; see fieldOf
	setDefault(*KubeIPVSConfiguration)              // if the field is not set
	setCompat(*KubeIPVSConfiguration)               // to the value of the profile, if that has one
	addFlag(*pflag.FlagSet, *KubeIPVSConfiguration) // the flag's default is the field's value
}

// Defaults that other settings depend on. Marks and priorities avoid those of kubelet, kube-proxy
// and the usual network plugins.
const (
	// DefaultReplyMark distinguishes 15 interfaces, in bits that Kubernetes (0x4000,
	// 0x8000), AWS and Cilium (0x80, 0xf00), Terway (0x10) and Calico (0xffff0000) do
	// not use.
	DefaultReplyMark Mark = 0x3060

	// DefaultClaimMark is one more such bit.
	DefaultClaimMark Mark = 0x4

	// DefaultClaimRulePriority precedes the rules of network plugins for pod traffic, except those of
	// branches (plan.Branch): the first are Cilium's at 110. It is not that of Calico's WireGuard rule
	// (99). An early rule is harmless: its table contains only VIPs.
	DefaultClaimRulePriority = 98

	// DefaultStateDir is below /run, which is emptied at boot, when kernel parameters
	// are reset too.
	DefaultStateDir = "/run/kube-ipvs"

	// DefaultLocalMark sets the same two bits in every fwmark; no other program is known to set both.
	// Its mask has room for 4095 fwmarks, below the bits of Kubernetes and Calico.
	DefaultLocalMark LocalMark = "0x9/0x3fff"
)

// compatDrainDeadline never expires in practice: kube-proxy keeps the TCP connections of a
// removed endpoint until they end, even if it does not answer any more.
const compatDrainDeadline = 10 * 365 * 24 * time.Hour

// settings are all settings, in the order of the fields. The fields say what they mean.
var settings = []setting{
	value[string]{
		flag: "compat", at: func(c *KubeIPVSConfiguration) *string { return &c.Compat },
		compat: CompatKubeProxy,
		usage: "Profile of defaults. " + CompatKubeProxy + ": behave as kube-proxy's IPVS mode does, where kube-ipvs's own defaults differ. " +
			"Flags and fields that are set take precedence.",
	},
	value[string]{
		flag: "snat-mode", at: func(c *KubeIPVSConfiguration) *string { return (*string)(&c.SNAT.Mode) },
		byDefault: string(plan.SNATAuto), compat: string(plan.SNATOff),
		usage: "How request and reply of masqueraded traffic stay on one interface, on nodes that have several. snat: by the source address; fwmark: by reply routing, which marks connections; auto: snat where a source address is known, else fwmark; off: not at all, as under kube-proxy.",
	},
	addresses{
		flag: "snat-source", what: "ADDRESS", at: func(c *KubeIPVSConfiguration) *map[string][]string { return &c.SNAT.Sources },
		usage: "IFACE=ADDRESS: source address of masqueraded traffic that leaves by the interface, which is given by name or MAC address. Can be repeated.",
	},
	addresses{
		flag: "reply-gateway", what: "GATEWAY", at: func(c *KubeIPVSConfiguration) *map[string][]string { return &c.SNAT.Gateways },
		usage: "IFACE=GATEWAY: gateway of the network of an interface, which is given by name or MAC address. Replies to clients that enter by the interface leave by it. For nodes with several interfaces and no policy routes. Can be repeated.",
	},
	value[Mark]{
		flag: "reply-mark", at: func(c *KubeIPVSConfiguration) *Mark { return &c.SNAT.Mark },
		byDefault: DefaultReplyMark,
		usage:     "Mask of the bits that bind connections to interfaces for reply routing; n bits distinguish 2^n-1 interfaces.",
	},
	value[int]{
		flag: "reply-rule-priority", at: func(c *KubeIPVSConfiguration) *int { return &c.SNAT.Priority },
		byDefault: 480,
		usage:     "Priority of the policy rules of reply routing.",
	},
	value[string]{
		flag: "claim-cluster-ips", at: func(c *KubeIPVSConfiguration) *string { return (*string)(&c.VIPs.ClusterIPs) },
		byDefault: string(plan.ClaimAddress), compat: string(plan.ClaimAddress),
		usage: "How cluster IPs are claimed, so that their packets reach IPVS. address: as addresses of kube-ipvs0; route: by local routes; auto: address up to 1,000 Services, then route.",
	},
	value[string]{
		flag: "claim-load-balancers", at: func(c *KubeIPVSConfiguration) *string { return (*string)(&c.VIPs.LoadBalancers) },
		byDefault: string(plan.ClaimAuto), compat: string(plan.ClaimAddress),
		usage: "How LoadBalancer IPs are claimed. auto: the whole address, as under kube-proxy, except that pods and the node reach ports without a Service on the device that has the address; port: only the ports of Services; address: the whole address, on kube-ipvs0; route: the whole address, by local routes. The Service annotation " + service.AnnotationIPMode + ": Proxy leaves the IPs of one Service to the cloud.",
	},
	value[string]{
		flag: "claim-external-ips", at: func(c *KubeIPVSConfiguration) *string { return (*string)(&c.VIPs.ExternalIPs) },
		byDefault: string(plan.ClaimAuto), compat: string(plan.ClaimAddress),
		usage: "How external IPs are claimed: auto, port, address or route, as for --claim-load-balancers; none: not served.",
	},
	optional[bool]{
		flag: "vip-ping", at: func(c *KubeIPVSConfiguration) **bool { return &c.VIPs.Ping },
		byDefault: true, compat: ptr.To(false),
		usage: "Make VIPs answer ping. Otherwise ping is rejected, as ports without a Service are.",
	},
	value[Mark]{
		flag: "claim-mark", at: func(c *KubeIPVSConfiguration) *Mark { return &c.VIPs.Mark },
		byDefault: DefaultClaimMark,
		usage:     "Mark of packets to Service ports of VIPs that are claimed by port, and of packets to ports that are left to another device.",
	},
	value[int]{
		flag: "claim-table", at: func(c *KubeIPVSConfiguration) *int { return &c.VIPs.Table },
		byDefault: 80080,
		usage:     "Routing table of VIPs that are claimed by port.",
	},
	value[int]{
		flag: "claim-rule-priority", at: func(c *KubeIPVSConfiguration) *int { return &c.VIPs.Priority },
		byDefault: DefaultClaimRulePriority,
		usage:     "Priority of the policy rule that looks up --claim-table.",
	},
	value[bool]{
		flag: "masquerade-external-local", at: func(c *KubeIPVSConfiguration) *bool { return &c.MasqueradeExternalLocal },
		usage: "Also masquerade external traffic under externalTrafficPolicy: Local, for pods whose replies would bypass the node. The Service annotation " + service.AnnotationMasquerade + " does so for one Service.",
	},
	optional[bool]{
		flag: "accept-service-traffic", at: func(c *KubeIPVSConfiguration) **bool { return &c.AcceptServiceTraffic },
		byDefault: true, compat: ptr.To(false),
		usage: "Accept Service traffic on a node whose firewall has a policy of DROP in filter INPUT. kube-proxy leaves it to the policy.",
	},
	value[string]{
		flag: "local-mark", at: func(c *KubeIPVSConfiguration) *string { return (*string)(&c.LocalMark) },
		byDefault: string(DefaultLocalMark), compat: string(localMarkOff),
		usage: "VALUE/MASK of the fwmarks that route internal clients to all endpoints under externalTrafficPolicy: Local. off: internal clients get only the node-local endpoints, if there are any, as under kube-proxy.",
	},
	value[bool]{
		flag: "remote-fallback", at: func(c *KubeIPVSConfiguration) *bool { return &c.RemoteFallback },
		compat: true,
		usage:  "Use endpoints of other nodes where kube-proxy's IPVS mode does although a traffic policy is Local and the node has no endpoint: for external clients, instead of dropping them, and at cluster IPs of Services that are reachable from outside, instead of refusing connections.",
	},
	value[bool]{
		flag: "udp-drain", at: func(c *KubeIPVSConfiguration) *bool { return &c.UDPDrain },
		usage: "Keep established UDP flows of an endpoint that is terminating and still serving.",
	},
	value[time.Duration]{
		flag: "drain-deadline", at: func(c *KubeIPVSConfiguration) *time.Duration { return &c.DrainDeadline.Duration },
		byDefault: 15 * time.Minute, // as long as IPVS keeps an idle connection
		compat:    compatDrainDeadline,
		usage:     "How long TCP connections to a removed endpoint are kept that it does not answer any more. Does not apply while the endpoint is terminating.",
	},
	value[bool]{
		flag: "reset-lost-node-connections", at: func(c *KubeIPVSConfiguration) *bool { return &c.ResetLostNodeConnections },
		usage: "Reset TCP connections to endpoints on unreachable nodes if the Service has endpoints elsewhere. kube-proxy keeps them.",
	},
	value[bool]{
		flag: "timeouts-from-conntrack", at: func(c *KubeIPVSConfiguration) *bool { return &c.TimeoutsFromConntrack },
		usage: "Make IPVS keep connections as long as connection tracking does, unless --ipvs-tcp-timeout or --ipvs-udp-timeout is set.",
	},
	value[string]{
		flag: "manifests", at: func(c *KubeIPVSConfiguration) *string { return &c.Manifests },
		usage: "Folder of YAML and JSON manifests (Service, EndpointSlice, Node) to read and watch instead of an API server.",
	},
	value[string]{
		flag: "state-dir", at: func(c *KubeIPVSConfiguration) *string { return &c.StateDir },
		byDefault: DefaultStateDir,
		usage:     "Folder on this node that stores the earlier values of kernel parameters for --cleanup, and the last valid content of invalid manifests.",
	},
	value[int]{
		flag: "service-metrics", at: func(c *KubeIPVSConfiguration) *int { return &c.ServiceMetrics },
		usage: "Maximum number of Service ports, in order of namespace and name, with metrics of their connections, packets and bytes. 0: none.",
	},
	optional[string]{
		flag: "probe-bind-address", at: func(c *KubeIPVSConfiguration) **string { return &c.ProbeBindAddress },
		byDefault: "127.0.0.1:10266", // a port of our own: kube-proxy owns its ports while it runs beside us
		usage:     "IP address and port that serve /livez and /readyz for the kubelet's probes, and /status for \"kube-ipvs status\". Differs from kube-proxy's ports, so that kube-proxy cannot answer. Empty: disabled.",
	},
}

// value is a setting whose zero value means that it is not set.
type value[T comparable] struct {
	flag      string
	at        func(*KubeIPVSConfiguration) *T
	byDefault T
	compat    T // the default under --compat=kube-proxy; the zero value: the same
	usage     string
}

func (v value[T]) name() string                         { return v.flag }
func (v value[T]) pointer(c *KubeIPVSConfiguration) any { return v.at(c) }
func (v value[T]) setDefault(c *KubeIPVSConfiguration)  { *v.at(c) = cmp.Or(*v.at(c), v.byDefault) }
func (v value[T]) setCompat(c *KubeIPVSConfiguration)   { *v.at(c) = cmp.Or(v.compat, *v.at(c)) }
func (v value[T]) addFlag(fs *pflag.FlagSet, c *KubeIPVSConfiguration) {
	addFlag(fs, v.flag, v.at(c), v.usage)
}

// optional is a setting whose zero value can be set. nil means that it is not set.
type optional[T any] struct {
	flag      string
	at        func(*KubeIPVSConfiguration) **T
	byDefault T
	compat    *T // the default under --compat=kube-proxy; nil: the same
	usage     string
}

func (o optional[T]) name() string                         { return o.flag }
func (o optional[T]) pointer(c *KubeIPVSConfiguration) any { return o.at(c) }
func (o optional[T]) setDefault(c *KubeIPVSConfiguration)  { setDefault(o.at(c), o.byDefault) }
func (o optional[T]) setCompat(c *KubeIPVSConfiguration) {
	if o.compat != nil {
		*o.at(c) = ptr.To(*o.compat)
	}
}

func (o optional[T]) addFlag(fs *pflag.FlagSet, c *KubeIPVSConfiguration) {
	addFlag(fs, o.flag, *o.at(c), o.usage)
}

// addFlag adds a flag that sets a value.
func addFlag(fs *pflag.FlagSet, name string, to any, usage string) {
	switch to := to.(type) {
	case *bool:
		fs.BoolVar(to, name, *to, usage)
	case *int:
		fs.IntVar(to, name, *to, usage)
	case *string:
		fs.StringVar(to, name, *to, usage)
	case *time.Duration:
		fs.DurationVar(to, name, *to, usage)
	case pflag.Value:
		fs.Var(to, name, usage)
	default:
		panic("no flag has the type of --" + name)
	}
}

// addresses is a setting with addresses of interfaces. It has no default.
type addresses struct {
	flag  string
	what  string // ADDRESS or GATEWAY, as in the usage
	at    func(*KubeIPVSConfiguration) *map[string][]string
	usage string
}

func (a addresses) name() string                         { return a.flag }
func (a addresses) pointer(c *KubeIPVSConfiguration) any { return a.at(c) }
func (a addresses) setDefault(*KubeIPVSConfiguration)    {}
func (a addresses) setCompat(*KubeIPVSConfiguration)     {}
func (a addresses) addFlag(fs *pflag.FlagSet, c *KubeIPVSConfiguration) {
	fs.Var(&addressesFlag{what: a.what, to: a.at(c)}, a.flag, a.usage)
}

// setOwnDefaults fills in unset fields.
func setOwnDefaults(c *KubeIPVSConfiguration) {
	c.TypeMeta = metav1.TypeMeta{APIVersion: OwnAPIVersion, Kind: OwnKind}
	for _, s := range settings {
		s.setDefault(c)
	}
}

// documentFlags returns the flags that set fields of a document. The defaults are the fields'
// values, which stay as they are.
func documentFlags(c *KubeIPVSConfiguration) *pflag.FlagSet {
	fs := newFlagSet()
	for _, s := range settings {
		s.addFlag(fs, c)
	}
	return fs
}

// addressesFlag is the value of a flag that lists pairs of an interface and an address.
type addressesFlag struct {
	what string
	to   *map[string][]string
	set  bool // to holds pairs of the flag, not of a file
}

// Set adds pairs such as eth1=10.0.0.1, separated by commas. The first call replaces what a file lists.
func (f *addressesFlag) Set(list string) error {
	out := map[string][]string{}
	if f.set {
		out = *f.to
	}
	for _, s := range strings.FieldsFunc(list, func(r rune) bool { return r == ',' }) {
		link, address, ok := strings.Cut(s, "=")
		if !ok || link == "" || address == "" {
			return fmt.Errorf("%q must be IFACE=%s, such as eth1=10.0.0.1", s, f.what)
		}
		out[link] = append(out[link], address)
	}
	*f.to, f.set = out, true
	return nil
}

// Type makes the help text call the value "strings", and shells complete the flag repeatedly.
func (f *addressesFlag) Type() string { return "stringSlice" }

// String returns the pairs as Set reads them, sorted by interface.
func (f *addressesFlag) String() string {
	var pairs []string
	if f.to != nil { // pflag calls it on a zero value
		for _, link := range slices.Sorted(maps.Keys(*f.to)) {
			for _, address := range (*f.to)[link] {
				pairs = append(pairs, link+"="+address)
			}
		}
	}
	return strings.Join(pairs, ",")
}

// eachField calls visit with each field of a document and its path, such as snat.mode.
func eachField(document any, visit func(path string, v reflect.Value)) {
	var inStruct func(of reflect.Value, prefix string)
	inStruct = func(of reflect.Value, prefix string) {
		for i := range of.NumField() {
			v := of.Field(i)
			name, _, _ := strings.Cut(of.Type().Field(i).Tag.Get("json"), ",")
			switch {
			case name == "": // apiVersion and kind
			case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[metav1.Duration]():
				inStruct(v, prefix+name+".")
			default:
				visit(prefix+name, v)
			}
		}
	}
	inStruct(reflect.ValueOf(document).Elem(), "")
}

// fieldPaths returns the paths of a document's fields, by addressOf.
func fieldPaths(document any) map[uintptr]string {
	out := map[uintptr]string{}
	eachField(document, func(path string, v reflect.Value) { out[addressOf(v)] = path })
	return out
}

// addressOf returns the address of a field, or of what it points to.
func addressOf(v reflect.Value) uintptr {
	if v.Kind() == reflect.Pointer && !v.IsNil() {
		return v.Pointer()
	}
	return v.Addr().Pointer()
}

// fieldOf returns the address of a setting's field; see fieldPaths.
func fieldOf(s setting, c *KubeIPVSConfiguration) uintptr {
	return addressOf(reflect.ValueOf(s.pointer(c)).Elem())
}
