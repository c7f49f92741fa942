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

// API version and kind of our own document.
const (
	OwnAPIVersion = "kube-ipvs.io/v1alpha1"
	OwnKind       = "KubeIPVSConfiguration"
)

// Defaults of our own settings. Marks and priorities avoid those of kubelet, kube-proxy
// and the usual network plugins.
const (
	// DefaultReplyMark distinguishes 15 interfaces, in bits that Kubernetes (0x4000,
	// 0x8000), AWS and Cilium (0x80, 0xf00), Terway (0x10) and Calico (0xffff0000) do
	// not use.
	DefaultReplyMark         Mark = 0x3060
	DefaultReplyRulePriority int  = 480

	// DefaultClaimMark is one more such bit. The priority precedes the rules of network
	// plugins for pod traffic (the first are Cilium's at 110) and is not that of
	// Calico's WireGuard rule (99). An early rule is harmless: its table contains only
	// VIPs.
	DefaultClaimMark         Mark = 0x4
	DefaultClaimTable        int  = 80080
	DefaultClaimRulePriority int  = 98

	// DefaultDrainDeadline is how long IPVS keeps an idle connection.
	DefaultDrainDeadline = 15 * time.Minute

	// DefaultProbeBindAddress is a port of our own: kube-proxy owns its ports while it
	// runs beside us.
	DefaultProbeBindAddress = "127.0.0.1:10266"

	// DefaultStateDir is below /run, which is emptied at boot, when kernel parameters
	// are reset too.
	DefaultStateDir = "/run/kube-ipvs"
	// DefaultLocalMark sets two bits in every mark which no other program is known to
	// set together, and has room for 4095 fwmarks below the marks of Kubernetes and
	// Calico.
	DefaultLocalMark LocalMark = "0x9/0x3fff"
)

// KubeIPVSConfiguration holds the settings that kube-proxy does not have. It is a
// document of its own beside the KubeProxyConfiguration, so that kube-proxy can still
// read the same file.
type KubeIPVSConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// Compat is a profile of defaults: empty, or kube-proxy for the behavior of
	// kube-proxy's IPVS mode. Fields that are set take precedence.
	Compat string `json:"compat,omitempty"`
	// SNAT configures how request and reply of masqueraded traffic stay on one interface.
	SNAT SNATConfiguration `json:"snat"`
	// VIPs configures how the addresses of Services are claimed.
	VIPs VIPConfiguration `json:"vips"`
	// MasqueradeExternalLocal also masquerades external traffic under
	// externalTrafficPolicy: Local, for pods whose replies would bypass the node.
	MasqueradeExternalLocal bool `json:"masqueradeExternalLocal,omitempty"`
	// AcceptServiceTraffic accepts Service traffic on a node whose firewall has a policy of
	// DROP in filter INPUT. kube-proxy leaves it to the policy. Default true.
	AcceptServiceTraffic *bool `json:"acceptServiceTraffic"`
	// LocalMark is VALUE/MASK of the fwmarks that route internal clients to all
	// endpoints under externalTrafficPolicy: Local: they have all bits of the value and
	// none outside the mask. If it is off, internal clients get only the node-local
	// endpoints, if there are any, as under kube-proxy. Default 0x9/0x3fff.
	LocalMark LocalMark `json:"localMark"`
	// RemoteFallback uses endpoints of other nodes where kube-proxy's IPVS mode does although
	// a traffic policy is Local and the node has none.
	RemoteFallback bool `json:"remoteFallback"`
	// UDPDrain keeps the UDP flows of an endpoint that is terminating and still
	// serving.
	UDPDrain bool `json:"udpDrain,omitempty"`
	// DrainDeadline is how long TCP connections to a removed endpoint are kept that it does
	// not answer any more. It does not apply to an endpoint that is still terminating.
	// Default 15m.
	DrainDeadline metav1.Duration `json:"drainDeadline"`
	// ResetLostNodeConnections resets TCP connections to endpoints on an unreachable
	// node if the Service has endpoints elsewhere, so that clients reconnect.
	// kube-proxy keeps the connections.
	ResetLostNodeConnections bool `json:"resetLostNodeConnections,omitempty"`
	// DrainLostNodes keeps TCP connections to endpoints on an unreachable node. Deprecated:
	// use resetLostNodeConnections, the opposite, which takes precedence if it is true.
	DrainLostNodes *bool `json:"drainLostNodes,omitempty"`
	// TimeoutsFromConntrack makes IPVS keep connections as long as connection tracking
	// does, unless IPVS's own timeouts are set.
	TimeoutsFromConntrack bool `json:"timeoutsFromConntrack,omitempty"`
	// Manifests is a folder of manifests to read instead of an API server.
	Manifests string `json:"manifests,omitempty"`
	// StateDir is a folder on this node that outlives the process but not a reboot. It
	// stores the earlier values of kernel parameters for --cleanup, and the last valid
	// content of invalid manifests. Default /run/kube-ipvs.
	StateDir string `json:"stateDir"`
	// ServiceMetrics is the maximum number of Service ports with metrics of their
	// connections, packets and bytes. Default 0: none.
	ServiceMetrics int `json:"serviceMetrics,omitempty"`
	// ProbeBindAddress serves /livez, /readyz and /status to the kubelet's probes and
	// to "kube-ipvs status". kube-proxy never uses this port, so it cannot answer in
	// our place. Empty disables it. Default 127.0.0.1:10266.
	ProbeBindAddress *string `json:"probeBindAddress"`
}

// SNATConfiguration configures how request and reply of masqueraded traffic stay on one
// interface.
type SNATConfiguration struct {
	// Mode is auto, snat, fwmark or off. Default auto.
	Mode SNATMode `json:"mode"`
	// Sources maps interfaces, by name or MAC address, to source addresses, at most one
	// per family, of masqueraded traffic that leaves by the interface.
	Sources map[string][]string `json:"sources,omitempty"`
	// Gateways maps interfaces, by name or MAC address, to the gateways of their networks, at
	// most one per family, on nodes without policy routes. Replies to clients that enter by the
	// interface leave by it, through the gateway.
	Gateways map[string][]string `json:"gateways,omitempty"`
	// Mark is the mask of the bits that bind connections to interfaces for reply
	// routing: n bits distinguish 2^n-1 interfaces. Default 0x3060.
	Mark Mark `json:"mark"`
	// Priority is the priority of the policy rules of reply routing. Default 480.
	Priority int `json:"priority"`
}

// VIPConfiguration configures how VIPs are claimed. address and route claim the whole address.
// port claims only the ports of Services. auto for cluster IPs is address up to 1,000 Services,
// then route. auto for other VIPs claims the whole address, but pods and the node reach its other
// ports on the device that has it. It claims an address of another node by port.
type VIPConfiguration struct {
	ClusterIPs    plan.ClaimMode `json:"clusterIPs"`    // address, route or auto; default address
	LoadBalancers plan.ClaimMode `json:"loadBalancers"` // default auto
	ExternalIPs   plan.ClaimMode `json:"externalIPs"`   // default auto; none: not claimed
	// Ping makes VIPs answer ping. Default true.
	Ping *bool `json:"ping"`
	// Mark is the mask of the bits that packets for a claimed port carry. Default 0x4.
	Mark Mark `json:"mark"`
	// Table is the routing table in which VIPs are local. Default 80080.
	Table int `json:"table"`
	// Priority is the priority of the policy rule that looks up Table. Default 98.
	Priority int `json:"priority"`
}

// SNATMode is a plan.SNATMode. In a document, off needs no quotes.
type SNATMode plan.SNATMode

// UnmarshalJSON reads a string, or false, which is how YAML reads off.
func (m *SNATMode) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(offInQuotes(text), (*string)(m))
}

// LocalMark is a plan.LocalMark as VALUE/MASK, or off, which needs no quotes in a
// document.
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

// Mark is a packet mark, or a mask of its bits. In a document it is a number, or a string in any base that
// Go supports ("0x2000"); it is written as a hexadecimal string.
type Mark uint32

// ParseMark reads a 32-bit mark in any base that Go supports, such as 12 or 0x2000.
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

// setOwnDefaults fills in unset fields.
func setOwnDefaults(c *KubeIPVSConfiguration) {
	c.TypeMeta = metav1.TypeMeta{APIVersion: OwnAPIVersion, Kind: OwnKind}
	c.StateDir = cmp.Or(c.StateDir, DefaultStateDir)
	setDefault(&c.ProbeBindAddress, DefaultProbeBindAddress)
	setDefault(&c.AcceptServiceTraffic, true)
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
