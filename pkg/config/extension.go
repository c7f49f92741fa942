package config

import (
	"encoding/json"
	"fmt"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// API version and kind of our own document.
const (
	OwnAPIVersion = "kube-ipvs.io/v1alpha1"
	OwnKind       = "KubeIPVSConfiguration"
)

// KubeIPVSConfiguration holds the settings that kube-proxy does not have. It is a
// document of its own beside the KubeProxyConfiguration, so that kube-proxy can still
// read the same file. Each field has an entry in settings, with its flag and default.
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
	// DROP in filter INPUT. kube-proxy leaves it to the policy.
	AcceptServiceTraffic *bool `json:"acceptServiceTraffic"`
	// LocalMark is VALUE/MASK of the fwmarks that route internal clients to all
	// endpoints under externalTrafficPolicy: Local: they have all bits of the value and
	// none outside the mask. If it is off, internal clients get only the node-local
	// endpoints, if there are any, as under kube-proxy.
	LocalMark LocalMark `json:"localMark"`
	// RemoteFallback uses endpoints of other nodes where kube-proxy's IPVS mode does although
	// a traffic policy is Local and the node has none.
	RemoteFallback bool `json:"remoteFallback"`
	// UDPDrain keeps the UDP flows of an endpoint that is terminating and still
	// serving.
	UDPDrain bool `json:"udpDrain,omitempty"`
	// DrainDeadline is how long TCP connections to a removed endpoint are kept that it does
	// not answer any more. It does not apply to an endpoint that is still terminating.
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
	// content of invalid manifests.
	StateDir string `json:"stateDir"`
	// ServiceMetrics is the maximum number of Service ports with metrics of their
	// connections, packets and bytes. 0: none.
	ServiceMetrics int `json:"serviceMetrics,omitempty"`
	// ProbeBindAddress serves /livez, /readyz and /status to the kubelet's probes and
	// to "kube-ipvs status". kube-proxy never uses this port, so it cannot answer in
	// our place. Empty disables it.
	ProbeBindAddress *string `json:"probeBindAddress"`
}

// SNATConfiguration configures how request and reply of masqueraded traffic stay on one
// interface.
type SNATConfiguration struct {
	// Mode is auto, snat, fwmark or off.
	Mode SNATMode `json:"mode"`
	// Sources maps interfaces, by name or MAC address, to source addresses, at most one
	// per family, of masqueraded traffic that leaves by the interface.
	Sources map[string][]string `json:"sources,omitempty"`
	// Gateways maps interfaces, by name or MAC address, to the gateways of their networks, at
	// most one per family, on nodes without policy routes. Replies to clients that enter by the
	// interface leave by it, through the gateway.
	Gateways map[string][]string `json:"gateways,omitempty"`
	// Mark is the mask of the bits that bind connections to interfaces for reply
	// routing: n bits distinguish 2^n-1 interfaces.
	Mark Mark `json:"mark"`
	// Priority is the priority of the policy rules of reply routing.
	Priority int `json:"priority"`
}

// VIPConfiguration configures how VIPs are claimed. address and route claim the whole address.
// port claims only the ports of Services. auto for cluster IPs is address up to 1,000 Services,
// then route. auto for other VIPs claims the whole address, but pods and the node reach its other
// ports on the device that has it. It claims an address of another node by port.
type VIPConfiguration struct {
	ClusterIPs    plan.ClaimMode `json:"clusterIPs"`    // address, route or auto
	LoadBalancers plan.ClaimMode `json:"loadBalancers"` // auto, port, address or route
	ExternalIPs   plan.ClaimMode `json:"externalIPs"`   // likewise, or none: not claimed
	// Ping makes VIPs answer ping.
	Ping *bool `json:"ping"`
	// Mark is the mask of the bits that packets for a claimed port carry.
	Mark Mark `json:"mark"`
	// Table is the routing table in which VIPs are local.
	Table int `json:"table"`
	// Priority is the priority of the policy rule that looks up Table.
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
