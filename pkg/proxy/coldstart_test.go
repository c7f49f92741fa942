package proxy

import (
	"context"
	"encoding/binary"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/apiserver"
	"github.com/kube-ipvs/kube-ipvs/test/heap"
)

// The kernel of BenchmarkColdStart accepts every change and keeps nothing.
type (
	forgetfulIPVS    struct{ reconcile.IPVS }
	forgetfulIPSet   struct{ reconcile.IPSet }
	forgetfulRouting struct{ reconcile.Routing }
)

func (forgetfulIPVS) Apply([]ipvs.Change) []ipvs.Failure          { return nil }
func (forgetfulIPSet) Apply([]ipset.Change) []ipset.Failure       { return nil }
func (forgetfulRouting) Apply([]routing.Change) []routing.Failure { return nil }

// listServer is an API server that answers lists from files, in protocol buffers, and whose watches
// deliver nothing.
type listServer struct{ folder string }

func (l listServer) RoundTrip(r *http.Request) (*http.Response, error) {
	answer := &http.Response{
		StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r, Body: http.NoBody,
		Header: http.Header{"Content-Type": {k8sruntime.ContentTypeProtobuf}},
	}
	if r.URL.Query().Get("watch") != "" {
		body, writer := io.Pipe()
		context.AfterFunc(r.Context(), func() { _ = writer.CloseWithError(r.Context().Err()) })
		answer.Body = body
		return answer, nil
	}
	name := filepath.Base(r.URL.Path)
	if strings.Contains(r.URL.Path, "/namespaces/") {
		name = "no-" + name
	}
	var err error
	answer.Body, err = os.Open(filepath.Join(l.folder, name))
	return answer, err
}

// write writes the list of a kind with n objects.
func (l listServer) write(t testing.TB, resource, apiVersion, kind string, n int, object func(int) interface{ Marshal() ([]byte, error) }) {
	t.Helper()
	envelope, err := (&k8sruntime.Unknown{TypeMeta: k8sruntime.TypeMeta{APIVersion: apiVersion, Kind: kind + "List"}}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	meta, err := (&metav1.ListMeta{ResourceVersion: "1"}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	list := append(binary.AppendUvarint([]byte{1<<3 | 2}, uint64(len(meta))), meta...)
	for i := range n {
		item, err := object(i).Marshal()
		if err != nil {
			t.Fatal(err)
		}
		list = append(binary.AppendUvarint(append(list, 2<<3|2), uint64(len(item))), item...)
	}
	typeMeta := envelope[:2+int(envelope[1])]
	out := append([]byte("k8s\x00"), typeMeta...)
	out = append(binary.AppendUvarint(append(out, 2<<3|2), uint64(len(list))), list...)
	if err := os.WriteFile(filepath.Join(l.folder, resource), out, 0o600); err != nil {
		t.Fatal(err)
	}
}

// newLists returns an API server with n Services of a cluster.
func newLists(t testing.TB, n int) listServer {
	t.Helper()
	l := listServer{t.TempDir()}
	type object = interface{ Marshal() ([]byte, error) }
	none := func(int) object { return nil }
	l.write(t, "nodes", "v1", "Node", 0, none)
	l.write(t, "no-services", "v1", "Service", 0, none)
	l.write(t, "no-endpointslices", "discovery.k8s.io/v1", "EndpointSlice", 0, none)
	l.write(t, "services", "v1", "Service", n, func(i int) object { return clusterService(i) })
	l.write(t, "endpointslices", "discovery.k8s.io/v1", "EndpointSlice", n, func(i int) object { return clusterSlice(i) })
	return l
}

// coldStart runs a proxy from the first request to the API server until everything is
// programmed, and returns what keeps its memory in use.
func coldStart(t testing.TB, l listServer) (p *Proxy, src *apiserver.Source, stop func()) {
	t.Helper()
	client, err := apiclient.NewTrimming(&rest.Config{Host: "http://localhost", Transport: l, QPS: -1},
		apiclient.Trim{Label: service.HasLabel, Annotation: source.HasAnnotation})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	w.cfg.Families = []ip.Family{ip.IPv4}
	o := w.options()
	o.Kernel.IPVS, o.Kernel.IPSet, o.Kernel.Routing = forgetfulIPVS{w.node.IPVS}, forgetfulIPSet{w.node.IPSet}, forgetfulRouting{w.node.Routing}
	p = New(o)
	src = apiserver.New(client, apiserver.Options{Node: "node1", UnreachableNodes: true})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = src.Run(ctx, p.inbox) }()
	<-p.inbox.begun
	if !p.prepare(ctx) {
		t.Fatal("the kernel cannot be read")
	}
	<-p.inbox.synced
	p.start(ctx)
	return p, src, func() { cancel(); <-ended }
}

// held is in use until the end of the process, for the profile of -memprofile.
var held []any

// BenchmarkColdStart measures a cold start of a large cluster, without the kernel's part.
// bytes/Service is what the process keeps of a Service, from the source to the Reconciler.
// peak/resident is the maximum of resident memory in that after the start.
//
// Run it with -benchtime 1x: the memory of an earlier start would count as resident.
func BenchmarkColdStart(b *testing.B) {
	const n = 44_125
	l := newLists(b, n)
	for b.Loop() {
		b.StopTimer()
		before := heap.InUse()
		debug.FreeOSMemory()
		resident := memory(b, "VmRSS:")
		if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // resets VmHWM
			b.Fatal(err)
		}
		allocated, cpu := memStats(), cpuTime(b)
		b.StartTimer()
		p, src, stop := coldStart(b, l)
		b.StopTimer()
		used, now := cpuTime(b)-cpu, memStats()
		debug.FreeOSMemory() // as the start does, in the background
		after, peak := memory(b, "VmRSS:"), memory(b, "VmHWM:")
		b.ReportMetric(float64(used.Nanoseconds())/n, "cpu-ns/Service")
		b.ReportMetric(float64(now.Mallocs-allocated.Mallocs)/n, "allocs/Service")
		b.ReportMetric(float64(now.TotalAlloc-allocated.TotalAlloc)/n, "allocated-B/Service")
		b.ReportMetric(float64(now.NumGC-allocated.NumGC), "GCs")
		b.ReportMetric((after-resident)/n, "resident-B/Service")
		b.ReportMetric(peak/after, "peak/resident")
		b.ReportMetric(float64(heap.InUse()-before)/n, "bytes/Service")
		held = []any{p, src}
		stop()
		b.StartTimer()
	}
}

func memStats() runtime.MemStats {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m
}

// cpuTime returns the CPU time that the process has used.
func cpuTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// memory returns a line of the process's status in bytes.
func memory(t testing.TB, key string) float64 {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			kB, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return float64(kB) * 1024
		}
	}
	t.Fatalf("no %s", key)
	return 0
}
