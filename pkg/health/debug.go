package health

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/component-base/configz"
	"k8s.io/component-base/logs"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/slis"
)

// mode is the response of /proxyMode, by which other programs detect kube-proxy's mode.
const mode = "ipvs"

// MetricsServer serves the administrator's pages: metrics and service level indicators,
// the configuration as passed to package configz, the proxy's mode, and the enabled
// Pages.
type MetricsServer struct {
	pages  Pages
	listen listenFunc
}

// Pages are the optional pages.
type Pages struct {
	// Profiling serves pprof, which costs time and exposes internals, and /debug/flags/v, which
	// sets the verbosity of the log.
	Profiling bool
	// Flags are the flags by name for /flagz. Without flags the page is disabled.
	Flags map[string]string
	// Status enables /statusz.
	Status bool
}

// NewMetricsServer creates a server.
func NewMetricsServer(pages Pages) *MetricsServer {
	return &MetricsServer{pages: pages, listen: net.Listen}
}

// Run is like Server's.
func (s *MetricsServer) Run(ctx context.Context, address netip.AddrPort, hardFail bool) error {
	return runAt(ctx, s.listen, address, hardFail, "metrics", s.Handler())
}

// Handler serves all paths. /healthz only reports that the process runs.
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
		mux.Handle("/debug/flags/v", http.HandlerFunc(setVerbosity))
	}
	if len(s.pages.Flags) > 0 {
		mux.Handle("/flagz", flagz(s.pages.Flags))
	}
	if s.pages.Status {
		mux.Handle("/statusz", statusz(mux.folders()))
	}
	return mux
}

// listedMux records the paths it serves.
type listedMux struct {
	*http.ServeMux
	paths []string
}

func (m *listedMux) Handle(path string, handler http.Handler) {
	m.paths = append(m.paths, path)
	m.ServeMux.Handle(path, handler)
}

// folders returns the first element of each path, without duplicates.
func (m *listedMux) folders() []string {
	var out []string
	for _, path := range m.paths {
		first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
		out = append(out, "/"+first)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// maxVerbosity is more than the length of any number that is a verbosity.
const maxVerbosity = 32

// setVerbosity sets --v until the process ends, by a PUT of the number. Its responses are kube-proxy's.
func setVerbosity(w http.ResponseWriter, r *http.Request) {
	code, text := http.StatusNotAcceptable, "unsupported http method"
	if r.Method == http.MethodPut {
		code = http.StatusOK
		number, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxVerbosity))
		if err == nil {
			text, err = logs.GlogSetter(string(number))
		}
		if err != nil {
			code, text = http.StatusBadRequest, err.Error()
		}
	}
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, text) // fails only if the client is gone
}

// answerText writes a plain-text response.
func answerText(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write([]byte(text)) // the client is gone
	}
}
