package health

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// counts is a Counter.
type counts []string

func (c *counts) Healthz(_ context.Context, code int) { *c = append(*c, fmt.Sprint("healthz ", code)) }
func (c *counts) Livez(_ context.Context, code int)   { *c = append(*c, fmt.Sprint("livez ", code)) }

const syncPeriod = 30 * time.Second

// ask returns a response's status and body.
func ask(t *testing.T, handler http.Handler, path string) (int, map[string]any) {
	t.Helper()
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	var body map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
		t.Fatalf("%s: %v in %s", path, err, w.Body)
	}
	return w.Code, body
}

func wantCodes(t *testing.T, s *Server, healthz, livez int) {
	t.Helper()
	for path, want := range map[string]int{"/healthz": healthz, "/livez": livez} {
		if code, _ := ask(t, s.Handler(), path); code != want {
			t.Errorf("%s answers %d, want %d", path, code, want)
		}
	}
	if want := livez == http.StatusOK; s.Healthy() != want {
		t.Errorf("healthy is %t, want %t", s.Healthy(), want)
	}
}

func TestStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(syncPeriod, &counts{})
		wantCodes(t, s, 503, 200) // nothing is programmed yet, and nothing has failed
		time.Sleep(time.Hour)
		wantCodes(t, s, 503, 200)
		s.Passed(time.Second, 1, 0)
		wantCodes(t, s, 200, 200)

		s.Queued()
		time.Sleep(syncPeriod)
		s.Queued() // more work does not change the age of pending work
		time.Sleep(syncPeriod)
		wantCodes(t, s, 200, 200)
		time.Sleep(time.Second)
		wantCodes(t, s, 503, 503)

		s.Idle()
		wantCodes(t, s, 200, 200)
		s.Queued()
		time.Sleep(2*syncPeriod + time.Second)
		s.Compared(time.Second, 1)
		s.Held(1, 1, 0)
		wantCodes(t, s, 503, 503)
		s.Passed(time.Second, 1, 1)
		wantCodes(t, s, 200, 200)
		time.Sleep(time.Hour)
		wantCodes(t, s, 200, 200)
	})
}

// TestRestart: while the kernel serves what an earlier process programmed, load balancers use the
// node before the first sync, as under kube-proxy, unless the Node is about to be removed or the sync
// is late. Such a node is not ready.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(syncPeriod, &counts{})
		wantCodes(t, s, 503, 200)
		s.Serving()
		wantCodes(t, s, 200, 200)
		if code, body := ask(t, s.Handler(), "/readyz"); code != 503 {
			t.Errorf("/readyz answers %d before the first sync: %v", code, body)
		}
		s.Node(true, true, false)
		wantCodes(t, s, 503, 200)
		s.Node(true, false, false)
		time.Sleep(time.Hour) // the API server delivers nothing
		wantCodes(t, s, 200, 200)
		s.Queued()
		time.Sleep(2*syncPeriod + time.Second)
		wantCodes(t, s, 503, 503)
		s.Passed(time.Second, 1, 0)
		wantCodes(t, s, 200, 200)
		if code, body := ask(t, s.Handler(), "/readyz"); code != 200 {
			t.Errorf("/readyz answers %d after the first sync: %v", code, body)
		}
	})
}

func TestNode(t *testing.T) {
	for _, c := range []struct {
		exists, deleting, excluded bool
		healthz                    int
	}{
		{true, false, false, 200},
		{true, true, false, 503},
		{true, false, true, 503},
		{false, false, false, 503},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			s := NewServer(syncPeriod, &counts{})
			s.Passed(time.Second, 1, 0)
			s.Node(c.exists, c.deleting, c.excluded)
			wantCodes(t, s, c.healthz, 200)
			s.Node(true, false, false)
			wantCodes(t, s, 200, 200)
		})
	}
}

func TestBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var counted counts
		s := NewServer(syncPeriod, &counted, ip.IPv4, ip.IPv6)
		clock := func() string { return time.Now().Format(time.RFC3339Nano) }
		want := func(path string, code int, want map[string]any) {
			t.Helper()
			got, body := ask(t, s.Handler(), path)
			if diff := cmp.Diff(want, body); diff != "" || got != code {
				t.Errorf("%s answers %d, want %d (-want +got):\n%s", path, got, code, diff)
			}
		}
		want("/livez", 200, map[string]any{"lastUpdated": clock(), "currentTime": clock(), "healthy": true})
		s.Passed(0, 0, 0)
		passed := clock()
		status := func(healthy bool) map[string]any {
			family := map[string]any{"lastUpdated": passed, "healthy": healthy}
			return map[string]any{"IPv4": family, "IPv6": family}
		}
		time.Sleep(time.Minute)
		want("/healthz", 200, map[string]any{"lastUpdated": clock(), "currentTime": clock(), "nodeEligible": true, "healthy": true, "status": status(true)})
		want("/livez", 200, map[string]any{"lastUpdated": clock(), "currentTime": clock(), "healthy": true, "status": status(true)})
		s.Node(false, false, false)
		want("/healthz", 503, map[string]any{"lastUpdated": passed, "currentTime": clock(), "nodeEligible": false, "healthy": true, "status": status(true)})
		s.Queued()
		time.Sleep(time.Hour)
		want("/livez", 503, map[string]any{"lastUpdated": passed, "currentTime": clock(), "healthy": false, "status": status(false)})

		if diff := cmp.Diff(counts{"livez 200", "healthz 200", "livez 200", "healthz 503", "livez 503"}, counted); diff != "" {
			t.Errorf("counted (-want +got):\n%s", diff)
		}
	})
}

// runner is what both servers have in common.
type runner interface {
	Run(ctx context.Context, address netip.AddrPort, hardFail bool) error
}

// servers returns both servers, which listen with a function.
func servers(listen listenFunc) map[string]runner {
	healthz, metrics := NewServer(syncPeriod, &counts{}), NewMetricsServer(Pages{})
	healthz.Passed(time.Second, 1, 0)
	healthz.listen, metrics.listen = listen, listen
	return map[string]runner{"healthz": healthz, "metrics": metrics}
}

func TestRun(t *testing.T) {
	listening := make(chan string, 1)
	for name, s := range servers(onLoopback(listening)) {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- s.Run(ctx, netip.MustParseAddrPort("127.0.0.1:1"), true) }()
			address := <-listening
			if code, _, body := get(t, http.DefaultClient, "http://"+address+"/healthz"); code != http.StatusOK {
				t.Errorf("%d: %s", code, body)
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if c, err := net.Dial("tcp", address); err == nil {
				c.Close()
				t.Error("still listening")
			}
		})
	}
}

func TestRunDisabled(t *testing.T) {
	for name, s := range servers(nil) {
		if err := s.Run(t.Context(), netip.AddrPort{}, true); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestHardFail(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	address := netip.MustParseAddrPort(l.Addr().String())
	for name, s := range servers(net.Listen) {
		if err := s.Run(t.Context(), address, true); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v does not name what cannot be served", name, err)
		}
	}
}

// kube-proxy has the address until it is stopped.
func TestAddressTaken(t *testing.T) {
	for _, name := range []string{"healthz", "metrics"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const address = "127.0.0.1:10256"
				var j journal
				n := newNetwork()
				n.take(address, true)
				ctx, cancel := context.WithCancel(j.context(t.Context()))
				ended := make(chan error, 1)
				go func() { ended <- servers(n.listen)[name].Run(ctx, netip.MustParseAddrPort(address), false) }()
				pass(time.Hour)
				j.want(t, 1, "")
				j.want(t, 1, name, address, errTaken.Error())
				n.take(address, false)
				pass(lastRetry)
				if code, _, body := n.get(t, "http://"+address+"/healthz"); code != http.StatusOK {
					t.Errorf("%d: %s", code, body)
				}
				j.want(t, 1, "Serving HTTP", name)
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
				if left := n.addresses(); !slices.Equal(left, nil) {
					t.Errorf("still listening on %v", left)
				}
			})
		})
	}
}
