package health

import (
	"context"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"

	"k8s.io/component-base/configz"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/slis"
)

// mode is what /proxyMode says, by which other programs know kube-proxy's
// mode.
const mode = "ipvs"

// MetricsServer serves what is for the administrator: the metrics of
// legacyregistry and the service level indicators, the configuration as given
// to package configz, the proxy's mode, and the Go profiles.
type MetricsServer struct {
	profiling bool
	listen    listenFunc
}

// NewMetricsServer makes a server, which serves profiles only if it is told
// to, as they cost time and tell much.
func NewMetricsServer(profiling bool) *MetricsServer {
	return &MetricsServer{profiling: profiling, listen: net.Listen}
}

// Run is like Server's.
func (s *MetricsServer) Run(ctx context.Context, address netip.AddrPort, hardFail bool) error {
	return runAt(ctx, s.listen, address, hardFail, "metrics", s.Handler())
}

// Handler answers all of the server's paths. Its /healthz says no more than
// that the program runs.
func (s *MetricsServer) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", legacyregistry.Handler())
	slis.SLIMetrics{}.Install(mux)
	configz.InstallHandler(mux)
	mux.Handle("/healthz", answerText("ok"))
	mux.Handle("/proxyMode", answerText(mode))
	if s.profiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// answerText writes an answer of plain text.
func answerText(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write([]byte(text)) // no more can be done for the client
	}
}
