package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// The identity of our own document.
const (
	OwnAPIVersion = "kube-ipvs.io/v1alpha1"
	OwnKind       = "KubeIPVSConfiguration"
)

// Defaults of our own settings. The mark and the priority are chosen clear of
// those of kubelet, kube-proxy and the usual network plugins.
const (
	// DefaultReplyMark has room for 15 interfaces in bits that Kubernetes
	// (0x4000, 0x8000), AWS and Cilium (0x80, 0xf00), Terway (0x10) and Calico
	// (0xffff0000) leave alone.
	DefaultReplyMark         Mark = 0x3060
	DefaultReplyRulePriority int  = 480

	// DefaultClaimMark is one more such bit. The priority is before those of
	// network plugins' rules for pods' traffic (Cilium's 110 are the first) and
	// is not Calico's for WireGuard (99). It does no harm there: nothing but VIPs
	// is found in the table.
	DefaultClaimMark         Mark = 0x4
	DefaultClaimTable        int  = 80080
	DefaultClaimRulePriority int  = 98

	// DefaultDrainDeadline is for how long IPVS keeps a connection on which
	// nothing is sent.
	DefaultDrainDeadline = 15 * time.Minute

	// DefaultProbeBindAddress is a port of our own: those of kube-proxy are
	// kube-proxy's for as long as it runs beside us.
	DefaultProbeBindAddress = "127.0.0.1:10266"

	// DefaultStateDir is below /run, which is empty after a boot, as are the
	// kernel's parameters.
	DefaultStateDir = "/run/kube-ipvs"
	// DefaultLocalMark has two bits in every mark that nobody is known to set
	// together, and room for 4095 numbers below those of Kubernetes and Calico.
	DefaultLocalMark LocalMark = "0x9/0x3fff"
)

// KubeIPVSConfiguration holds the settings that kube-proxy does not have. It
// is a document of its own beside the KubeProxyConfiguration, so that
// kube-proxy can go on reading the same file.
type KubeIPVSConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// Compat is a profile of defaults: empty, or kube-proxy for the behaviour of
	// kube-proxy's IPVS mode. Fields that are set win over it.
	Compat string `json:"compat,omitempty"`
	// SNAT says how masqueraded traffic gets a path that is the same both ways.
	SNAT SNATConfiguration `json:"snat"`
	// VIPs says how Services' addresses are claimed.
	VIPs VIPConfiguration `json:"vips"`
	// MasqueradeExternalLocal masquerades external traffic under
	// externalTrafficPolicy Local too, for pods that would answer past the
	// node.
	MasqueradeExternalLocal bool `json:"masqueradeExternalLocal,omitempty"`
	// LocalMark is VALUE/MASK: the fwmarks that lead internal clients to all
	// endpoints under externalTrafficPolicy Local have all bits of the value and
	// none outside the mask. With off, a node with endpoints serves its pods and
	// itself by these alone, as kube-proxy does. Default 0x9/0x3fff.
	LocalMark LocalMark `json:"localMark"`
	// UDPDrain lets an endpoint that terminates and still serves keep the UDP
	// flows that it has.
	UDPDrain bool `json:"udpDrain,omitempty"`
	// DrainDeadline is for how long TCP connections to an endpoint that is gone,
	// and not just terminating, are kept. Default 15m.
	DrainDeadline metav1.Duration `json:"drainDeadline"`
	// ResetLostNodeConnections resets TCP connections to endpoints on an unreachable
	// node, where the Service has other endpoints, so that clients connect to these.
	// kube-proxy keeps them.
	ResetLostNodeConnections bool `json:"resetLostNodeConnections,omitempty"`
	// DrainLostNodes is the contrary. Deprecated: use resetLostNodeConnections, which
	// takes precedence if it is true.
	DrainLostNodes *bool `json:"drainLostNodes,omitempty"`
	// TimeoutsFromConntrack has IPVS keep connections for as long as connection
	// tracking does, where IPVS's own time-outs are not set.
	TimeoutsFromConntrack bool `json:"timeoutsFromConntrack,omitempty"`
	// Manifests is a folder of manifests that is read in place of an API
	// server.
	Manifests string `json:"manifests,omitempty"`
	// StateDir is a folder, this node's own, that outlives the process and not
	// the machine's next boot. Kernel parameters' earlier values are kept there
	// for --cleanup. Default /run/kube-ipvs.
	StateDir string `json:"stateDir"`
	// ServiceMetrics is for how many ports of Services there are metrics of
	// connections, packets and bytes. Default 0: none.
	ServiceMetrics int `json:"serviceMetrics,omitempty"`
	// ProbeBindAddress serves /livez, /readyz and /status to the kubelet's probes and
	// to "kube-ipvs status". kube-proxy never has this port, so that it cannot answer
	// in our place. Empty: not at all. Default 127.0.0.1:10266.
	ProbeBindAddress *string `json:"probeBindAddress"`
}

// SNATConfiguration is the part about symmetric paths.
type SNATConfiguration struct {
	// Mode is auto, snat, fwmark or off. Default auto.
	Mode SNATMode `json:"mode"`
	// Sources maps interfaces' names to the addresses, at most one of each
	// family, that masqueraded traffic leaving by them is to carry.
	Sources map[string][]string `json:"sources,omitempty"`
	// Mark is the bits that bind connections to interfaces for reply routing:
	// n bits tell 2^n-1 interfaces apart. Default 0x3060.
	Mark Mark `json:"mark"`
	// Priority is that of the policy rules of reply routing. Default 480.
	Priority int `json:"priority"`
}

// VIPConfiguration is the part about how VIPs are claimed: address or route, the
// whole of it; port, the ports of Services alone; or auto, the whole of it, but
// for pods and the node the ports without a Service stay another device's.
type VIPConfiguration struct {
	ClusterIPs    plan.Claim `json:"clusterIPs"`    // address, route or auto; default address
	LoadBalancers plan.Claim `json:"loadBalancers"` // default auto
	ExternalIPs   plan.Claim `json:"externalIPs"`   // default auto; none: not at all
	// Ping says whether VIPs answer to ping. Default true.
	Ping *bool `json:"ping"`
	// Mark is the bits that packets for a claimed port carry. Default 0x4.
	Mark Mark `json:"mark"`
	// Table is the routing table in which the VIPs are local. Default 80080.
	Table int `json:"table"`
	// Priority is that of the policy rule which leads there. Default 99.
	Priority int `json:"priority"`
}

// SNATMode is a plan.SNATMode. In a document, off may stand without quotes.
type SNATMode plan.SNATMode

// UnmarshalJSON reads a string, or false: that is what off is in YAML.
func (m *SNATMode) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(offInQuotes(text), (*string)(m))
}

// LocalMark is a plan.LocalMark as VALUE/MASK, or off, which may stand without
// quotes in a document.
type LocalMark string

const localMarkOff LocalMark = "off"

// UnmarshalJSON reads a string, or false.
func (m *LocalMark) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(offInQuotes(text), (*string)(m))
}

func offInQuotes(text []byte) []byte {
	if string(text) == "false" {
		return []byte(`"off"`)
	}
	return text
}

// Mark is a firewall mark. In a document it is a number, or a string in any
// base that Go knows ("0x2000"); it is written as a hexadecimal string.
type Mark uint32

// ParseMark reads a mark: decimal, or hexadecimal after 0x.
func ParseMark(s string) (Mark, error) {
	v, err := strconv.ParseUint(s, 0, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is not a 32-bit mark such as %s", s, DefaultReplyMark)
	}
	return Mark(v), nil
}

func (m Mark) String() string { return fmt.Sprintf("%#x", uint32(m)) }

// Set is ParseMark for a flag.
func (m *Mark) Set(s string) (err error) {
	*m, err = ParseMark(s)
	return err
}

// Type names the flag's type in the help text.
func (m *Mark) Type() string { return "mark" }

// MarshalJSON writes "0x2000".
func (m Mark) MarshalJSON() ([]byte, error) { return json.Marshal(m.String()) }

// UnmarshalJSON reads a number or a string.
func (m *Mark) UnmarshalJSON(text []byte) error {
	s := string(text)
	if len(text) > 0 && text[0] == '"' {
		if err := json.Unmarshal(text, &s); err != nil {
			return err
		}
	}
	return m.Set(s)
}

// setOwnDefaults fills in what is not set.
func setOwnDefaults(c *KubeIPVSConfiguration) {
	c.TypeMeta = metav1.TypeMeta{APIVersion: OwnAPIVersion, Kind: OwnKind}
	c.StateDir = cmp.Or(c.StateDir, DefaultStateDir)
	setDefault(&c.ProbeBindAddress, DefaultProbeBindAddress)
	c.DrainDeadline.Duration = cmp.Or(c.DrainDeadline.Duration, DefaultDrainDeadline)
	c.SNAT.Mode = cmp.Or(c.SNAT.Mode, SNATMode(plan.SNATAuto))
	c.SNAT.Mark = cmp.Or(c.SNAT.Mark, DefaultReplyMark)
	c.LocalMark = cmp.Or(c.LocalMark, DefaultLocalMark)
	c.SNAT.Priority = cmp.Or(c.SNAT.Priority, DefaultReplyRulePriority)
	c.VIPs.ClusterIPs = cmp.Or(c.VIPs.ClusterIPs, plan.ClaimAddress)
	c.VIPs.LoadBalancers = cmp.Or(c.VIPs.LoadBalancers, plan.ClaimAuto)
	c.VIPs.ExternalIPs = cmp.Or(c.VIPs.ExternalIPs, plan.ClaimAuto)
	setDefault(&c.VIPs.Ping, true)
	c.VIPs.Mark = cmp.Or(c.VIPs.Mark, DefaultClaimMark)
	c.VIPs.Table = cmp.Or(c.VIPs.Table, DefaultClaimTable)
	c.VIPs.Priority = cmp.Or(c.VIPs.Priority, DefaultClaimRulePriority)
}
