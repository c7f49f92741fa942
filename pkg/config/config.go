// Package config turns the command line and the configuration file into a validated
// Config. Flags and file are kube-proxy's, with its names, defaults and meanings. What
// kube-proxy does not have is set by flags of our own, or by a KubeIPVSConfiguration
// document in the same file.
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

// Config is the validated configuration of the proxy.
type Config struct {
	Plan plan.Config

	// SyncPeriod is the base period of comparisons with the kernel, above 0; see reconcile.Periods.
	// MinSyncPeriod is the shortest time between two syncs, between 0 and SyncPeriod.
	SyncPeriod, MinSyncPeriod time.Duration

	// DrainDeadline is how long connections to a removed endpoint are kept that it does not
	// answer any more, above 0.
	DrainDeadline time.Duration
	// ResetLostNodeConnections resets connections to endpoints on an unreachable node.
	ResetLostNodeConnections bool

	IPVSTimeouts ipvs.Timeouts
	Conntrack    Conntrack

	// Healthz and Metrics are listening addresses. The zero AddrPort disables the
	// listener.
	Healthz, Metrics netip.AddrPort
	// MetricsIn, if it is valid, selects the node address that serves metrics. Only the
	// port of Metrics counts then.
	MetricsIn                   netip.Prefix
	Probes                      netip.AddrPort // for the kubelet and "kube-ipvs status"; the zero AddrPort disables it
	BindAddressHardFail         bool           // whether the process exits if it cannot listen
	Profiling                   bool           // pprof, on Metrics
	ShowHiddenMetricsForVersion string
	ServiceMetrics              int // number of Service ports with metrics of their own; 0: none

	Source Source

	// StateDir is a folder for state that must outlive the process: the values that
	// kernel parameters had before, and the last valid content of invalid manifests.
	StateDir string

	OOMScoreAdj int32 // -1000 to 1000
	Action      Action
	// File is the configuration file, or "".
	File string
	// Flags holds the values of all flags, given or default.
	Flags map[string]string

	Features featuregate.FeatureGate
	Logging  logsapi.LoggingConfiguration

	// Proxy and Own are the same settings as documents, with the defaults.
	Proxy proxyv1alpha1.KubeProxyConfiguration
	Own   KubeIPVSConfiguration

	// Notices tell the administrator which settings have no effect, or an unexpected one.
	Notices []string
}

// Action is what the program does.
type Action string

// The actions.
const (
	Serve    Action = "serve"     // run until terminated
	Once     Action = "once"      // sync once and exit
	DryRun   Action = "dry-run"   // print what Once would change and exit
	Cleanup  Action = "cleanup"   // remove everything that is ours and exit
	InitOnly Action = "init-only" // do what needs full privileges and exit
)

// Source selects where Services come from: the folder Manifests if it is set, else an
// API server.
type Source struct {
	Manifests string

	Kubeconfig string // "" with Master "": the Pod's service account
	Master     string // a URL that overrides Kubeconfig's, or ""

	ContentType       string
	AcceptContentType string // "" for the client's default
	QPS               float32
	Burst             int

	// ConfigSyncPeriod is the resync period of the reflectors, above 0. It has no effect.
	ConfigSyncPeriod time.Duration
}

// Conntrack holds the settings of the kernel's connection tracking. Timeouts are whole
// seconds; 0 keeps the kernel's value.
type Conntrack struct {
	MaxPerCore, Min int32 // MaxPerCore 0 keeps the limit
	TCPEstablished  time.Duration
	TCPCloseWait    time.Duration
	TCPBeLiberal    bool // false keeps the kernel's value
	UDP, UDPStream  time.Duration
}
