// Package config turns the command line and the configuration file into a
// Config in which every value can work. Flags and file are kube-proxy's, with
// its names, defaults and meanings; what kube-proxy does not have is set by
// flags of our own and by a KubeIPVSConfiguration document in the same file.
package config

import (
	"net/netip"
	"time"

	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Config is all that the proxy is told at its start. It is checked.
type Config struct {
	Plan plan.Config

	// SyncPeriod is the time between full observations of the kernel, above
	// 0, and MinSyncPeriod the shortest between two syncs, from 0 to it.
	SyncPeriod, MinSyncPeriod time.Duration

	// DrainDeadline is for how long connections to an endpoint that is gone are
	// kept, above 0.
	DrainDeadline time.Duration
	// ResetLostNodeConnections resets connections to endpoints on an unreachable node.
	ResetLostNodeConnections bool

	IPVSTimeouts ipvs.Timeouts
	Conntrack    Conntrack

	// BindAddress is the Node's own address where it is told; the unspecified
	// address leaves it to the Node object. Nothing is bound to it.
	BindAddress netip.Addr
	// Healthz and Metrics are listened on. The zero AddrPort: not at all.
	Healthz, Metrics netip.AddrPort
	// MetricsIn says, if it is valid, that metrics are served on the node's address in
	// it: of Metrics only the port counts then.
	MetricsIn                   netip.Prefix
	Probes                      netip.AddrPort // for the kubelet and "kube-ipvs status"; likewise
	BindAddressHardFail         bool           // whether failing to listen ends the program
	Profiling                   bool           // pprof, on Metrics
	ShowHiddenMetricsForVersion string
	ServiceMetrics              int // ports of Services that have metrics of their own; 0: none

	Source Source

	// StateDir is a folder for what must outlive the process: the values of
	// kernel parameters before they were changed.
	StateDir string

	OOMScoreAdj int32 // -1000 to 1000
	Action      Action
	// File is the configuration file, "" without one.
	File string
	// Flags are all flags with their values, given or default.
	Flags map[string]string

	Features featuregate.FeatureGate
	Logging  logsapi.LoggingConfiguration

	// Proxy and Own are the same settings as documents, with the defaults.
	Proxy proxyv1alpha1.KubeProxyConfiguration
	Own   KubeIPVSConfiguration

	// Notices are for the administrator: what was given and has no effect.
	Notices []string
}

// Action is what the program is to do.
type Action string

// The actions.
const (
	Serve    Action = "serve"     // until it is told to end
	Once     Action = "once"      // program the kernel one time and exit
	DryRun   Action = "dry-run"   // print what Once would change and exit
	Cleanup  Action = "cleanup"   // take away what is ours and exit
	InitOnly Action = "init-only" // do what needs full privileges and exit
)

// Source says where Services come from: a folder if Manifests is set, else an
// API server.
type Source struct {
	Manifests string

	Kubeconfig string // "" with Master "": the Pod's service account
	Master     string // a URL that overrides Kubeconfig's, or ""

	ContentType       string
	AcceptContentType string // "" for the client's default
	QPS               float32
	Burst             int

	// ConfigSyncPeriod is how often everything known is delivered again,
	// above 0.
	ConfigSyncPeriod time.Duration
}

// Conntrack holds the kernel's connection tracking settings. Timeouts are in
// whole seconds; 0 leaves the kernel's.
type Conntrack struct {
	MaxPerCore, Min int32 // MaxPerCore 0 leaves the limit
	TCPEstablished  time.Duration
	TCPCloseWait    time.Duration
	TCPBeLiberal    bool // false leaves the kernel's
	UDP, UDPStream  time.Duration
}
