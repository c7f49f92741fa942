package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"time"

	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/version"
)

// Report is the proxy's state as shown by /status and /readyz.
type Report struct {
	Version string    `json:"version"`
	PID     int       `json:"pid"`
	Node    string    `json:"node,omitempty"`
	Started time.Time `json:"started"`
	Now     time.Time `json:"now"`

	Live  bool     `json:"live"`
	Ready bool     `json:"ready"`
	Why   []string `json:"why,omitempty"` // the reasons for not being live or ready
	// Eligible reports whether load balancers should use the node, according to its
	// Node object.
	Eligible bool `json:"nodeEligible"`

	Syncs       int       `json:"syncs"` // 0: the first one is not finished
	LastSync    time.Time `json:"lastSync,omitzero"`
	SyncSeconds float64   `json:"lastSyncSeconds"`

	NodeRefused     bool `json:"nodeRefused"` // some of the node's own state is refused or cannot be read
	ServicesRefused int  `json:"servicesRefused"`
	Services        int  `json:"services"`

	LastComparison  time.Time `json:"lastComparison,omitzero"` // with the kernel
	LastDifferences int       `json:"lastDifferences"`
	Differences     int       `json:"differences"` // found by all comparisons

	VirtualServers int `json:"virtualServers"`
	RealServers    int `json:"realServers"`
	Draining       int `json:"drainingRealServers"`
	Conflicts      int `json:"conflicts"`
}

// SetNode sets the name that /status shows.
func (s *Server) SetNode(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.Node = name
}

// ProbeHandler serves /livez and /readyz to the kubelet, and /status to "kube-ipvs
// status". It needs a port that kube-proxy never uses. Otherwise a kube-proxy beside us
// would answer the probes, and one older than 1.28, which has no /livez, would cause the
// kubelet to kill us.
func (s *Server) ProbeHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/livez", s.livez)
	mux.HandleFunc("/readyz", s.readyz)
	mux.HandleFunc("/status", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, http.StatusOK, s.Report())
	})
	return mux
}

// Report returns the current state.
func (s *Server) Report() Report {
	now := time.Now()
	st := s.current(now)
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.report
	r.Version, r.PID, r.Started, r.Now = version.Get().GitVersion, os.Getpid(), legacyregistry.GetProcessStart(), now
	r.Live, r.Eligible, r.LastSync = st.healthy, st.eligible, st.passed
	r.Why = r.why()
	r.Ready = len(r.Why) == 0
	return r
}

// why returns the reasons for not being ready. Single refused Services are not a reason:
// they are retried and logged. If most are refused, the node is at fault.
func (r *Report) why() []string {
	var out []string
	if r.Syncs == 0 {
		out = append(out, "the first sync is not finished")
	}
	if !r.Live {
		out = append(out, "the proxy does not keep up with changes")
	}
	if r.NodeRefused {
		out = append(out, "some of the node's own state is refused by the kernel or cannot be read, see the log")
	}
	if 2*r.ServicesRefused > r.Services {
		out = append(out, "the kernel refuses most Services, see the log")
	}
	return out
}

// askLimit limits the wait for /status.
const askLimit = 3 * time.Second

// Ask reads the state of the proxy that serves /status at an address.
func Ask(ctx context.Context, address netip.AddrPort) (*Report, error) {
	if !address.IsValid() {
		return nil, errors.New("the proxy's probes are disabled by its configuration")
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address.String()+"/status", nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if name := response.Header.Get("Server"); response.StatusCode != http.StatusOK || name != ServerName {
		return nil, fmt.Errorf("%s belongs to another program: %s %s", address, response.Status, name)
	}
	var r Report
	return &r, json.NewDecoder(response.Body).Decode(&r)
}

// readyBody is the response of /readyz.
type readyBody struct {
	Ready bool     `json:"ready"`
	Why   []string `json:"why,omitempty"`
}

func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	r := s.Report()
	answerJSON(w, status(r.Ready), readyBody{r.Ready, r.Why})
}
