package neighbours

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/template"
	"time"
)

// pageText is docs/neighbours.md.
const pageText = `# Beside other programs

<!-- Written by "make neighbours". Do not edit. -->

Other programs write a node's network too: CNI plugins, policy engines, firewalls, network
managers. This page shows what kube-proxy {{.Version}} in IPVS mode and kube-ipvs do beside them, with
default settings, as seen by clients and endpoints in the kernel lab.

Each set-up has two nodes that are alike, one for each program. Every client asks every kind of address of two
Services, one for each ` + "`externalTrafficPolicy`" + `, with TCP and UDP over IPv4 and IPv6. A Service has endpoints on
the node ("here") and on another ("there"). An answer tells which endpoint gave it and which source address it
saw: the client's, or one of the node's. Clients are pods of the node, the node itself, "lan" in the node's subnet
and "outside" in another network.

| in the tables | meaning |
|---|---|
| **worse** | kube-proxy does what the API says, or keeps the client's address, and kube-ipvs does not |
| **missing** | both fail, and kube-ipvs is to work |
| better | kube-ipvs does what the API says, and kube-proxy does not |

Rows join protocols and families that gave the same. "any" stands for endpoints here and there. Cells that are the
same under both programs and as the API says are counted, not listed.

## Summary

| set-up | cells | same | better | worse | missing | run |
|---|---|---|---|---|---|---|
{{range .Results}}| [{{.Title}}](#{{anchor .Title}}) | {{.Cells}} | {{.Same}} | {{.Better}} | {{.Worse}} | {{.Lacking}} | {{run .}} |
{{end}}
The kernel is Debian's 6.1. The last column says when a set-up ran, and with which build of kube-ipvs. "better", "worse"
and "missing" count the questions beside the matrix too.

Not here: other combinations of these programs on one node, and DHCP on the uplink.
{{with notRun .Results}}
Not run for this page: {{range $i, $title := .}}{{if $i}}; {{end}}{{$title}}{{end}}.
{{end}}{{with .Kernels}}
## On other kernels

| set-up | kernel | cells | same | better | worse | missing | run |
|---|---|---|---|---|---|---|---|
{{range .}}| {{.Title}} | {{.Kernel}} | {{.Cells}} | {{.Same}} | {{.Better}} | {{.Worse}} | {{.Lacking}} | {{run .}} |
{{end}}{{end}}{{range .Results}}
## {{.Title}}

What ran: {{.What}}
{{if .Missing}}
Not covered: {{.Missing}}
{{end}}
{{- with .Rows}}
| client | destination | policy | protocols | kube-proxy | kube-ipvs | |
|---|---|---|---|---|---|---|
{{range .}}| {{.Client}} | {{.Destination}} | {{.Policy}} | {{.Protocols}} | {{.KubeProxy}} | {{.KubeIPVS}} | {{.Verdict}} |
{{end}}{{end}}
| also asked | kube-proxy | kube-ipvs | |
|---|---|---|---|
{{range .Checks}}| {{.Name}} | {{.KubeProxy}} | {{.KubeIPVS}} | {{mark .Verdict}} |
{{end}}{{end}}`

// WritePage writes the page. version is kube-proxy's.
func WritePage(w io.Writer, version string, results []Summary) error {
	page, err := template.New("page").Funcs(template.FuncMap{"mark": mark, "anchor": anchor, "run": ranBy, "notRun": notRun}).Parse(pageText)
	if err != nil {
		return err
	}
	usual := func(s Summary) bool { return s.Kernel == "" }
	other := func(s Summary) bool { return s.Kernel != "" }
	return page.Execute(w, map[string]any{
		"Version": version, "Results": slices.DeleteFunc(slices.Clone(results), other), "Kernels": slices.DeleteFunc(slices.Clone(results), usual),
	})
}

// titles are those of all set-ups.
var titles = []string{
	"No neighbour",
	"AWS VPC CNI", "AWS VPC CNI, security groups for pods, standard", "AWS VPC CNI, security groups for pods, strict", "AWS VPC CNI with Calico (Felix) for policies",
	"Calico (Felix), iptables, insert mode", "Calico (Felix), iptables, append mode", "Calico (Felix), nftables", "Calico (Felix), iptables, insert mode, claims by port",
	"flannel (VXLAN)", "flannel (VXLAN), load balancer IPs that are nodes' addresses, pods", "flannel (VXLAN), load balancer IPs that are nodes' addresses, host network",
	"MetalLB, layer 2", "systemd-networkd", "keepalived", "firewalld, default deny", "ufw, default deny",
	"kube-proxy's leftovers, iptables mode, iptables-legacy", "kube-proxy's leftovers, ipvs mode, iptables-legacy", "kube-proxy's leftovers, iptables mode, iptables-nft", "kube-proxy's leftovers, ipvs mode, iptables-nft",
}

// notRun are the titles of set-ups without a result.
func notRun(results []Summary) []string {
	var out []string
	for _, title := range titles {
		if !slices.ContainsFunc(results, func(s Summary) bool { return s.Title == title }) {
			out = append(out, title)
		}
	}
	return out
}

// ranBy says when a set-up ran, and which build.
func ranBy(s Summary) string {
	return s.Time.Format(time.DateOnly) + ", " + strings.Trim("kube-ipvs "+s.Version, " ")
}

func mark(v Verdict) string {
	if v == Worse || v == Missing {
		return "**" + string(v) + "**"
	}
	return string(v)
}

// anchor is the name by which a heading is linked.
func anchor(title string) string {
	keep := func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-', r == '_', r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		}
		return -1
	}
	return strings.Map(keep, strings.ToLower(title))
}

// joinProtocols names all of them in one word.
func joinProtocols(names []string) string {
	slices.Sort(names)
	for _, all := range []struct{ word, names string }{
		{"all", "TCP/IPv4 TCP/IPv6 UDP/IPv4 UDP/IPv6"},
		{"IPv4", "TCP/IPv4 UDP/IPv4"}, {"IPv6", "TCP/IPv6 UDP/IPv6"},
		{"TCP", "TCP/IPv4 TCP/IPv6"}, {"UDP", "UDP/IPv4 UDP/IPv6"},
	} {
		if strings.Join(names, " ") == all.names {
			return all.word
		}
	}
	return strings.Join(names, ", ")
}

// where says on which side the endpoints are that answered.
func where(endpoints []string) string {
	isHere := func(e string) bool { return strings.HasPrefix(e, "here") }
	switch here, there := slices.ContainsFunc(endpoints, isHere), slices.Contains(endpoints, "there"); {
	case here && there:
		return "any"
	case here:
		return "here"
	}
	return fmt.Sprint(strings.Join(endpoints, ", "))
}
