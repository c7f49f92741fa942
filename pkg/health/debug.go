package health

import (
	"context"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/component-base/configz"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/slis"
)

// mode is what /proxyMode says, by which other programs know kube-proxy's
// mode.
const mode = "ipvs"

// MetricsServer serves what is for the administrator: the metrics of
// legacyregistry and the service level indicators, the configuration as given
// to package configz, the proxy's mode, and what its Pages say.
type MetricsServer struct {
	pages  Pages
	listen listenFunc
}

// Pages are those that can be turned off.
type Pages struct {
	// Profiling serves Go's profiles, which cost time and tell much.
	Profiling bool
	// Flags are shown on /flagz, by name; without any there is no such page.
	Flags map[string]string
	// Status has a page /statusz.
	Status bool
}

// NewMetricsServer makes a server.
func NewMetricsServer(pages Pages) *MetricsServer {
	return &MetricsServer{pages: pages, listen: net.Listen}
}

// Run is like Server's.
func (s *MetricsServer) Run(ctx context.Context, address netip.AddrPort, hardFail bool) error {
	return runAt(ctx, s.listen, address, hardFail, "metrics", s.Handler())
}

// Handler answers all of the server's paths. Its /healthz says no more than
// that the program runs.
func (s *MetricsServer) Handler() http.Handler {
	mux := &listedMux{ServeMux: http.NewServeMux()}
	mux.Handle("/metrics", legacyregistry.Handler())
	slis.SLIMetrics{}.Install(mux)
	configz.InstallHandler(mux)
	mux.Handle("/healthz", answerText("ok"))
	mux.Handle("/proxyMode", answerText(mode))
	if s.pages.Profiling {
		mux.Handle("/debug/pprof/", http.HandlerFunc(pprof.Index))
		mux.Handle("/debug/pprof/cmdline", http.HandlerFunc(pprof.Cmdline))
		mux.Handle("/debug/pprof/profile", http.HandlerFunc(pprof.Profile))
		mux.Handle("/debug/pprof/symbol", http.HandlerFunc(pprof.Symbol))
		mux.Handle("/debug/pprof/trace", http.HandlerFunc(pprof.Trace))
	}
	if len(s.pages.Flags) > 0 {
		mux.Handle("/flagz", flagz(s.pages.Flags))
	}
	if s.pages.Status {
		mux.Handle("/statusz", statusz(mux.folders()))
	}
	return mux
}

// listedMux remembers what it serves.
type listedMux struct {
	*http.ServeMux
	paths []string
}

func (m *listedMux) Handle(path string, handler http.Handler) {
	m.paths = append(m.paths, path)
	m.ServeMux.Handle(path, handler)
}

// folders lists the first part of each path, once.
func (m *listedMux) folders() []string {
	var out []string
	for _, path := range m.paths {
		first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
		out = append(out, "/"+first)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// answerText writes an answer of plain text.
func answerText(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write([]byte(text)) // no more can be done for the client
	}
}
