package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Observe reads the node of a proxy with the given configuration and address for
// probes. Failures are facts, too.
func Observe(ctx context.Context, cfg *plan.Config, probes netip.AddrPort) *Facts {
	f := ObserveProxies(ctx)
	f.Config = *cfg
	if report, err := health.Ask(ctx, probes); err == nil {
		f.Serving, f.Unready = true, report.Why
	}
	f.readNodes()
	f.readOthers()
	f.readTables()
	f.Lacking = map[ip.Family][]string{}
	for _, n := range f.Nodes {
		f.Lacking[n.Family] = lacking(n.Family)
	}
	f.LackingTypes = lackingTypes()
	f.LacksConntrack = lacksConntrack()
	f.Connections = number("/proc/sys/net/netfilter/nf_conntrack_count")
	f.Most = number("/proc/sys/net/netfilter/nf_conntrack_max")
	return f
}

// ObserveProxies reads only the processes and ports of service proxies.
func ObserveProxies(ctx context.Context) *Facts {
	return &Facts{Proxies: processes("/proc", os.Getpid()), Hidden: hidden("/proc"), Answers: answers(ctx, proxyPorts)}
}

func (f *Facts) readNodes() {
	kernel, err := trace.Read()
	if err != nil {
		f.Unread = append(f.Unread, err)
		return
	}
	for _, family := range ip.Families {
		node, err := kernel.Node(family)
		if err != nil {
			f.Unread = append(f.Unread, fmt.Errorf("cannot read %s: %w", family, err))
			continue
		}
		f.Nodes = append(f.Nodes, node)
	}
}

// readTables reads the names of nftables' tables. Without nft there is nothing to read
// them with, and on a kernel without nf_tables there are none.
func (f *Facts) readTables() {
	tables, err := nft.Tables()
	if err != nil && !errors.Is(err, exec.ErrNotFound) && generation.Supported() == nil {
		f.Unread = append(f.Unread, err)
	}
	f.Tables = tables
}

// number reads a number from a file. A missing file counts as 0.
func number(file string) int {
	text, _ := os.ReadFile(file)
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n
}

// processes returns the processes of service proxies, except our own.
func processes(proc string, self int) map[string][]int {
	out := map[string][]int{}
	files, _ := filepath.Glob(filepath.Join(proc, "[0-9]*", "comm"))
	for _, file := range files {
		text, err := os.ReadFile(file)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		name := strings.TrimSpace(string(text))
		if err == nil && pid != self && sameNetwork(proc, pid) && (name == "kube-proxy" || name == "kube-ipvs") {
			out[name] = append(out[name], pid)
		}
	}
	return out
}

// sameNetwork reports whether a process is in our network namespace, as far as visible.
// That of a node in a container (kind) is not.
func sameNetwork(proc string, pid int) bool {
	here, _ := os.Readlink(filepath.Join(proc, "self/ns/net"))
	there, err := os.Readlink(filepath.Join(proc, strconv.Itoa(pid), "ns/net"))
	return err != nil || here == there
}

// initialPIDNamespace is PROC_PID_INIT_INO of include/linux/proc_ns.h.
const initialPIDNamespace = "pid:[4026531836]"

// hidden reports whether the node may have invisible processes.
func hidden(proc string) bool {
	link, err := os.Readlink(filepath.Join(proc, "self/ns/pid"))
	return err == nil && link != initialPIDNamespace
}

// proxyPorts are kube-proxy's default ports for metrics and health checks.
var proxyPorts = []int{config.MetricsPort, config.HealthzPort}

// UnknownMode is the mode of a kube-proxy that has not said which one it has.
const UnknownMode = "unknown"

// KubeProxyMode returns the mode of the kube-proxy that runs on this node, or "" if there
// is none. It is UnknownMode while a port of kube-proxy does not answer in time, or while
// none of them answers and its process is visible.
func KubeProxyMode(ctx context.Context) string {
	return modeOf(ctx, proxyPorts, processes("/proc", os.Getpid())["kube-proxy"])
}

func modeOf(ctx context.Context, ports, pids []int) (mode string) {
	if len(pids) > 0 {
		mode = UnknownMode
	}
	for _, port := range ports {
		var late interface{ Timeout() bool }
		a, err := ask(ctx, port)
		switch {
		case err == nil && a != nil && a.Mode != "":
			return a.Mode
		case errors.As(err, &late) && late.Timeout():
			mode = UnknownMode
		}
	}
	return mode
}

// answers returns the programs on kube-proxy's ports, except kube-ipvs.
func answers(ctx context.Context, ports []int) []Answer {
	var out []Answer
	for _, port := range ports {
		if a, err := ask(ctx, port); err == nil && a != nil {
			out = append(out, *a)
		}
	}
	return out
}

// askLimit is for a port of this node.
const askLimit = time.Second

// ask returns what the program on a port answers, or nil if it is kube-ipvs, which
// identifies itself.
func ask(ctx context.Context, port int) (*Answer, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/proxyMode", port), nil)
	if err != nil {
		return nil, err
	}
	client := http.Client{Timeout: askLimit}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.Header.Get("Server") == health.ServerName {
		return nil, nil
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, 64))
	if response.StatusCode != http.StatusOK {
		return &Answer{Port: port}, nil
	}
	return &Answer{Port: port, Mode: strings.TrimSpace(string(text))}, err
}
