package inspect

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Row is a row of a table. The cells of the last columns are shown on request.
type Row interface {
	Cells() []string
}

// VirtualServer is an IPVS virtual server.
type VirtualServer struct {
	Service     string `json:"service,omitempty"` // NAMESPACE/NAME:PORT; "" if unknown
	Protocol    string `json:"protocol"`
	Address     string `json:"address"`
	Scheduler   string `json:"scheduler"`
	RealServers int    `json:"realServers"`
	Draining    int    `json:"draining"` // of these
	Affinity    uint32 `json:"affinitySeconds,omitempty"`
	Flags       uint32 `json:"flags,omitempty"` // IP_VS_SVC_F_*
}

// VirtualServerColumns are the headings; the last one is for wide output.
var VirtualServerColumns = []string{"SERVICE", "PROTOCOL", "ADDRESS", "SCHEDULER", "REALSERVERS", "AFFINITY", "FLAGS"}

// Cells returns the cells in the order of the columns.
func (v VirtualServer) Cells() []string {
	servers := strconv.Itoa(v.RealServers)
	if v.Draining > 0 {
		servers += fmt.Sprintf(" (%d draining)", v.Draining)
	}
	affinity := ""
	if v.Affinity > 0 {
		affinity = fmt.Sprintf("%ds", v.Affinity)
	}
	return []string{v.Service, v.Protocol, v.Address, v.Scheduler, servers, affinity, fmt.Sprintf("%#x", v.Flags)}
}

// VirtualServers returns virtual servers sorted by Service.
func VirtualServers(state ipvs.State, names *Names) []VirtualServer {
	var out []VirtualServer
	for _, key := range slices.SortedFunc(maps.Keys(state), ipvs.Key.Compare) {
		s := state[key]
		v := VirtualServer{
			Service: names.Service(key), Protocol: names.protocol(key), Address: names.Address(key),
			Scheduler: s.Scheduler, RealServers: len(s.RealServers), Affinity: s.Timeout, Flags: uint32(s.Flags),
		}
		for _, r := range s.RealServers {
			if r.Weight == 0 {
				v.Draining++
			}
		}
		out = append(out, v)
	}
	slices.SortStableFunc(out, func(a, b VirtualServer) int { return cmp.Compare(a.Service, b.Service) })
	return out
}

// Endpoint is a real server of a virtual server.
type Endpoint struct {
	Service  string `json:"service,omitempty"`
	Address  string `json:"address"` // of the virtual server
	Endpoint string `json:"endpoint"`
	Weight   int    `json:"weight"`
	Active   int    `json:"active"`
	Inactive int    `json:"inactive"`
	Pod      string `json:"pod,omitempty"`
	Node     string `json:"node,omitempty"`
}

// EndpointColumns are the headings; the last two are for wide output.
var EndpointColumns = []string{"SERVICE", "ADDRESS", "ENDPOINT", "WEIGHT", "ACTIVE", "INACTIVE", "POD", "NODE"}

// Cells returns the cells in the order of the columns.
func (e Endpoint) Cells() []string {
	weight := strconv.Itoa(e.Weight)
	if e.Weight == 0 {
		weight += " (draining)"
	}
	return []string{e.Service, e.Address, e.Endpoint, weight, strconv.Itoa(e.Active), strconv.Itoa(e.Inactive), e.Pod, e.Node}
}

// Endpoints returns real servers sorted by Service. connections counts those of a
// virtual server.
func Endpoints(state ipvs.State, names *Names, connections func(ipvs.Key) (map[netip.AddrPort]ipvs.Connections, error)) ([]Endpoint, error) {
	var out []Endpoint
	for _, key := range slices.SortedFunc(maps.Keys(state), ipvs.Key.Compare) {
		counts, err := connections(key)
		if err != nil {
			return nil, err
		}
		servers := state[key].RealServers
		for _, a := range slices.SortedFunc(maps.Keys(servers), netip.AddrPort.Compare) {
			pod := names.podAt(a)
			out = append(out, Endpoint{
				Service: names.Service(key), Address: names.Address(key), Endpoint: a.String(), Weight: servers[a].Weight,
				Active: counts[a].Active, Inactive: counts[a].Inactive, Pod: pod.Name, Node: pod.Node,
			})
		}
	}
	slices.SortStableFunc(out, func(a, b Endpoint) int { return cmp.Compare(a.Service, b.Service) })
	return out, nil
}

// Set is an IP set.
type Set struct {
	Name    string   `json:"name"`
	Type    string   `json:"type"`
	Count   int      `json:"count"`
	Members []Member `json:"members,omitempty"`
}

// Member is a member of a set.
type Member struct {
	Entry   string `json:"entry"`
	Mark    uint32 `json:"mark,omitempty"`
	Service string `json:"service,omitempty"`
}

// SetColumns and MemberColumns are the headings.
var (
	SetColumns    = []string{"NAME", "TYPE", "MEMBERS"}
	MemberColumns = []string{"ENTRY", "MARK", "SERVICE"}
)

// Cells returns the cells in the order of the columns.
func (s Set) Cells() []string { return []string{s.Name, s.Type, strconv.Itoa(s.Count)} }

// Cells returns the cells in the order of the columns.
func (m Member) Cells() []string {
	mark := ""
	if m.Mark != 0 {
		mark = fmt.Sprintf("%#x", m.Mark)
	}
	return []string{m.Entry, mark, m.Service}
}

// Sets returns all sets with their members.
func Sets(state ipset.State, names *Names) []Set {
	var out []Set
	for _, name := range slices.Sorted(maps.Keys(state)) {
		contents := state[name]
		set := Set{Name: name, Type: string(contents.Type), Count: len(contents.Entries)}
		for _, e := range slices.SortedFunc(maps.Keys(contents.Entries), ipset.Entry.Compare) {
			set.Members = append(set.Members, Member{e.String(), contents.Entries[e], names.Entry(e)})
		}
		out = append(out, set)
	}
	return out
}

// Component is a part of the proxy, or something it depends on.
type Component struct {
	Status string `json:"status"` // OK, warning or error
	Name   string `json:"component"`
	What   string `json:"what"`
}

// ComponentColumns are the headings.
var ComponentColumns = []string{"STATUS", "COMPONENT", "WHAT"}

// Cells returns the cells in the order of the columns.
func (c Component) Cells() []string { return []string{c.Status, c.Name, c.What} }

// Results of a connection test.
const (
	Answered = "OK"
	Failed   = "failed"
	Skipped  = "not tested"
)

// Connection is a test of one address and port of a Service.
type Connection struct {
	Result   string `json:"result"`
	Service  string `json:"service"`
	Protocol string `json:"protocol"`
	Address  string `json:"address"`
	Why      string `json:"why,omitempty"` // of a failed or skipped test
}

// ConnectionColumns are the headings.
var ConnectionColumns = []string{"RESULT", "SERVICE", "PROTOCOL", "ADDRESS", "WHY"}

// Cells returns the cells in the order of the columns.
func (c Connection) Cells() []string {
	return []string{c.Result, c.Service, c.Protocol, c.Address, c.Why}
}

// Change is a change that would bring the kernel to the desired state.
type Change struct {
	Part      string `json:"part"` // of the kernel: ipvs, ipset, iptables, nftables, routing or sysctl
	Operation string `json:"operation"`
	What      string `json:"change"`
}

// ChangeColumns are the headings.
var ChangeColumns = []string{"PART", "CHANGE"}

// Cells returns the cells in the order of the columns.
func (c Change) Cells() []string { return []string{c.Part, c.What} }

// SNAT is the source of masqueraded traffic on an uplink.
type SNAT struct {
	Interface string `json:"interface"`
	Family    string `json:"family"`
	Source    string `json:"source,omitempty"`
	How       string `json:"how"`
	Table     int    `json:"table"` // of its default route
}

// SNATColumns are the headings.
var SNATColumns = []string{"INTERFACE", "FAMILY", "SOURCE", "HOW", "TABLE"}

// Cells returns the cells in the order of the columns.
func (s SNAT) Cells() []string {
	return []string{s.Interface, s.Family, s.Source, s.How, strconv.Itoa(s.Table)}
}

// SNATs lists the uplinks. priority is that of reply routing's policy rules.
func SNATs(n *trace.Node, priority int) []SNAT {
	var out []SNAT
	for _, r := range n.Routes {
		if r.Dst.Bits() != 0 || r.Local || slices.ContainsFunc(out, func(s SNAT) bool { return s.Interface == r.Link }) {
			continue
		}
		s := SNAT{Interface: r.Link, Family: n.Family.String(), Table: r.Table}
		s.Source, s.How = sourceOf(n, r)
		if mark := replyMark(n, r.Table, priority); mark != "" {
			s.How += ", reply routing by mark " + mark
		}
		out = append(out, s)
	}
	slices.SortStableFunc(out, func(a, b SNAT) int { return cmp.Compare(a.Interface, b.Interface) })
	return out
}

// sourceOf returns the SNAT source of an interface and how it is chosen.
func sourceOf(n *trace.Node, r routing.Route) (address, how string) {
	if to := n.SNATTo(plan.ChainPostrouting, r.Link); to != "" {
		return to, "SNAT"
	}
	a := n.SourceOn(r.Link, r.Via)
	switch link := n.LinkOf(a); {
	case !a.IsValid():
		return "", "MASQUERADE, without an address"
	case link != r.Link:
		return a.String(), "MASQUERADE, with " + link + "'s address"
	}
	return a.String(), "MASQUERADE"
}

// replyMark returns the mark of our policy rule that looks up a table.
func replyMark(n *trace.Node, table, priority int) string {
	for _, r := range n.Rules {
		if r.Table == table && r.Mask != 0 && r.Priority == priority {
			return fmt.Sprintf("%#x/%#x", r.Mark, r.Mask)
		}
	}
	return ""
}
