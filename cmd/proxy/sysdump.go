package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/version"
	"sigs.k8s.io/yaml"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
	"github.com/kube-ipvs/kube-ipvs/pkg/redact"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

func newSysdumpCommand() *cobra.Command {
	var o settingsFlags
	var output string
	cmd := &cobra.Command{
		Use:   "sysdump",
		Short: "Write an archive with everything that a bug report needs",
		Long:  "sysdump writes a tar.gz with everything that a bug report needs: the configuration, the\nstate and metrics of the proxy, the state of the kernel (IPVS, IP sets, iptables,\nnftables, routes, policy rules, parameters), the Services and EndpointSlices, and the\noutput of doctor and diff. Nothing is changed.\n\nSecrets are left out: no kubeconfig, token or environment is read, and of the\nannotations of objects, only kube-ipvs's own are included. The archive contains addresses\nand names of Services and pods. errors.txt lists what could not be collected.",
		Example: "  kube-ipvs sysdump\n" +
			"  kubectl -n kube-system exec POD -- kube-ipvs sysdump -o - > node.tar.gz",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := o.found(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return writeSysdump(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), output, &s)
		},
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().StringVarP(&output, "output", "o", "", "file to write; -: standard output; default: kube-ipvs-NODE-TIME.tar.gz")
	return cmd
}

func writeSysdump(ctx context.Context, stdout, stderr io.Writer, output string, s *settings) error {
	now := time.Now().UTC()
	folder := fmt.Sprintf("kube-ipvs-%s-%s", s.Plan.NodeName, now.Format("20060102T150405Z"))
	if output == "" {
		output = folder + ".tar.gz"
	}
	var archive bytes.Buffer
	d := newDump(&archive, folder, now)
	d.gather(ctx, s)
	if err := d.close(); err != nil {
		return err
	}
	if output == "-" {
		_, err := stdout.Write(archive.Bytes())
		return err
	}
	if err := os.WriteFile(output, archive.Bytes(), 0o600); err != nil {
		return err
	}
	fmt.Fprintf(stderr, "%s: %d files, %d kB\n", output, d.files, archive.Len()/1000)
	return nil
}

// dump is an archive being written.
type dump struct {
	gzip   *gzip.Writer
	tar    *tar.Writer
	folder string
	now    time.Time
	files  int
	failed strings.Builder // what could not be collected
	err    error           // the first error of writing
}

func newDump(w io.Writer, folder string, now time.Time) *dump {
	z := gzip.NewWriter(w)
	return &dump{gzip: z, tar: tar.NewWriter(z), folder: folder, now: now}
}

// add writes a file unless it is empty.
func (d *dump) add(name string, text []byte, err error) {
	if err != nil {
		fmt.Fprintf(&d.failed, "%s: %v\n", name, err)
	}
	if len(text) == 0 {
		return
	}
	text = redact.Secrets(text)
	d.files++
	header := &tar.Header{Name: d.folder + "/" + name, Mode: 0o644, Size: int64(len(text)), ModTime: d.now}
	if d.err == nil {
		d.err = d.tar.WriteHeader(header)
	}
	if d.err == nil {
		_, d.err = d.tar.Write(text)
	}
}

func (d *dump) close() error {
	if d.failed.Len() > 0 {
		d.add("errors.txt", []byte(d.failed.String()), nil)
	}
	return errors.Join(d.err, d.tar.Close(), d.gzip.Close())
}

func (d *dump) json(name string, value any, err error) {
	if err != nil {
		d.add(name, nil, err)
		return
	}
	text, err := json.MarshalIndent(value, "", "  ")
	d.add(name, text, err)
}

func (d *dump) gather(ctx context.Context, s *settings) {
	v := version.Get()
	d.add("version.txt", fmt.Appendf(nil, "kube-ipvs %s, %s, %s\nLinux %s\n%s\nconfiguration of %s\n", v.GitVersion, v.GoVersion, v.Platform, doctor.Release(), d.now.Format(time.RFC3339), s.Origin), nil)
	d.configuration(s)
	d.proxy(ctx, s)
	d.node(ctx, s)
	d.kernel()
	d.objects(ctx, s)
}

func (d *dump) configuration(s *settings) {
	for name, document := range map[string]any{"config/kubeproxy.yaml": s.Proxy, "config/kubeipvs.yaml": s.Own} {
		text, err := yaml.Marshal(document)
		d.add(name, text, err)
	}
	d.add("config/args.txt", []byte(strings.Join(s.Args, "\n")+"\n"), nil)
}

// proxy queries the running proxy.
func (d *dump) proxy(ctx context.Context, s *settings) {
	report, err := health.Ask(ctx, s.Probes)
	d.json("proxy/status.json", report, err)
	at, _ := metricsAddress(&s.Config) // fetch reports the missing address
	for _, path := range []string{"metrics", "configz", "flagz", "statusz", "debug/pprof/goroutine?debug=1"} {
		text, err := fetch(ctx, at, path)
		d.add("proxy/"+strings.NewReplacer("/", "-", "?debug=1", "").Replace(path)+".txt", text, err)
	}
	text, err := fetch(ctx, s.Healthz, "healthz")
	d.add("proxy/healthz.txt", text, err)
	for _, file := range []string{"status", "limits"} {
		if s.PID != 0 {
			d.file(fmt.Sprintf("proxy/process-%s.txt", file), fmt.Sprintf("/proc/%d/%s", s.PID, file))
		}
	}
}

// fetchLimit limits the size of a response: metrics of a large cluster are some hundred
// kilobytes.
const fetchLimit = 32 << 20

// fetch reads a page of a server on this node. It uses the loopback address for a
// server that listens on all addresses.
func fetch(ctx context.Context, at netip.AddrPort, path string) ([]byte, error) {
	if !at.IsValid() {
		return nil, errors.New("is disabled by the configuration")
	}
	if at.Addr().IsUnspecified() {
		at = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
	}
	ctx, cancel := context.WithTimeout(ctx, namesLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+"/"+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, fetchLimit))
	if response.StatusCode != http.StatusOK {
		err = errors.Join(err, errors.New(response.Status))
	}
	return text, err
}

// node writes the output of the other commands.
func (d *dump) node(ctx context.Context, s *settings) {
	findings := doctor.Examine(doctor.Observe(ctx, &s.Plan, s.Probes))
	var text bytes.Buffer
	err := doctor.Write(&text, findings)
	d.add("node/doctor.txt", text.Bytes(), err)
	result, err := dryRun(ctx, s.Config)
	if err != nil {
		d.add("node/diff.txt", nil, err)
	} else {
		text = bytes.Buffer{}
		result.note(&text)
		err = printChanges(&text, "table", result.changes)
		d.add("node/diff.txt", text.Bytes(), err)
		d.json("node/warnings.json", result.warnings, nil)
	}
	names := s.names(ctx, &d.failed)
	state, err := observeIPVS(names)
	if err != nil {
		d.add("node/virtualservers.txt", nil, err)
	} else {
		d.table("node/virtualservers.txt", func(w io.Writer) error {
			return inspect.Print(w, "wide", inspect.VirtualServerColumns, 0, inspect.VirtualServers(state.servers, names))
		})
		d.table("node/endpoints.txt", func(w io.Writer) error {
			return inspect.Print(w, "wide", inspect.EndpointColumns, 0, state.endpoints)
		})
	}
	sets, err := trace.Sets()
	d.json("node/sets.json", inspect.Sets(sets, names), err)
}

func (d *dump) table(name string, write func(io.Writer) error) {
	var text bytes.Buffer
	err := write(&text)
	d.add(name, text.Bytes(), err)
}

type ipvsState struct {
	servers   ipvs.State
	endpoints []inspect.Endpoint
}

func observeIPVS(names *inspect.Names) (*ipvsState, error) {
	sets, err := trace.Sets()
	if err != nil {
		return nil, err
	}
	names.Marks(sets)
	k, err := ipvs.New()
	if err != nil {
		return nil, err
	}
	defer k.Close()
	state, err := k.Observe()
	if err != nil {
		return nil, err
	}
	endpoints, err := inspect.Endpoints(state, names, k.Connections)
	return &ipvsState{state, endpoints}, err
}

// kernel writes the state of the kernel, read by programs and from files that may be
// missing.
func (d *dump) kernel() {
	k, err := trace.Read()
	if err != nil {
		d.add("kernel/routes.json", nil, err)
	} else {
		for _, family := range ip.Families {
			n, err := k.Node(family)
			if err != nil {
				d.add("kernel/"+family.String()+".json", nil, err)
				continue
			}
			d.json("kernel/"+family.String()+".json", map[string]any{"links": n.Links, "rules": n.Rules, "routes": n.Routes, "sysctls": n.Sysctls}, nil)
		}
	}
	for name, command := range map[string][]string{
		"iptables-nft-save": {"iptables-nft-save", "-c"}, "ip6tables-nft-save": {"ip6tables-nft-save", "-c"},
		"iptables-legacy-save": {"iptables-legacy-save", "-c"}, "ip6tables-legacy-save": {"ip6tables-legacy-save", "-c"},
		"iptables-version": {"iptables-nft", "--version"}, "nft": {"nft", "list", "ruleset"},
	} {
		out, stderr, err := program.Run(command[0], "", command[1:]...)
		if err != nil {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr))
		}
		d.add("kernel/"+name+".txt", []byte(out), err)
	}
	files := []string{
		"/proc/net/ip_vs", "/proc/net/ip_vs_stats", "/proc/modules", "/proc/meminfo", "/proc/loadavg", "/proc/version", "/etc/os-release",
		"/proc/net/stat/nf_conntrack", "/proc/net/dev", "/proc/net/snmp", "/proc/net/netstat", "/proc/net/softnet_stat",
	}
	for _, pattern := range []string{"/proc/sys/net/ipv4/vs/*", "/proc/sys/net/netfilter/nf_conntrack_*", "/proc/sys/net/bridge/*"} {
		found, _ := filepath.Glob(pattern)
		var values strings.Builder
		for _, file := range found {
			if text, err := os.ReadFile(file); err == nil {
				fmt.Fprintf(&values, "%s = %s\n", file, strings.TrimSpace(string(text)))
			}
		}
		d.add("kernel/"+filepath.Base(filepath.Dir(pattern))+"-parameters.txt", []byte(values.String()), nil)
	}
	for _, file := range files {
		d.file("kernel/"+strings.TrimPrefix(strings.ReplaceAll(file, "/", "-"), "-")+".txt", file)
	}
}

func (d *dump) file(name, from string) {
	text, err := os.ReadFile(from)
	d.add(name, text, err)
}

// objects writes the proxy's input, trimmed as by the proxy: annotations of others may
// contain anything.
func (d *dump) objects(ctx context.Context, s *settings) {
	from, err := s.source()
	if from == nil {
		d.add("objects.json", nil, err)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, namesLimit)
	defer cancel()
	var all objectSink
	err = from.Load(ctx, &all)
	text, marshalled := json.MarshalIndent(&all, "", " ")
	d.add("objects.json", text, errors.Join(err, marshalled))
}

// objectSink collects what a source delivers.
type objectSink struct {
	Nodes    []*corev1.Node               `json:"nodes"`
	Services []*corev1.Service            `json:"services"`
	Slices   []*discoveryv1.EndpointSlice `json:"endpointSlices"`
}

func (o *objectSink) SetService(s *corev1.Service) {
	source.Trim(s)
	o.Services = append(o.Services, s)
}

func (o *objectSink) SetEndpointSlice(s *discoveryv1.EndpointSlice) {
	source.Trim(s)
	o.Slices = append(o.Slices, s)
}

func (o *objectSink) SetNode(n *corev1.Node) {
	source.Trim(n)
	o.Nodes = append(o.Nodes, n)
}

func (*objectSink) DeleteService(types.NamespacedName)       {}
func (*objectSink) DeleteEndpointSlice(types.NamespacedName) {}
func (*objectSink) DeleteNode()                              {}
func (*objectSink) SetUnreachableNodes([]string)             {}
func (*objectSink) Begun()                                   {}
func (*objectSink) Synced()                                  {}
