package health

import (
	"net/http"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestReady: a node is ready only once the proxy has programmed the kernel.
func TestReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(syncPeriod, &counts{})
		want := func(when string, why ...string) {
			t.Helper()
			code, body := ask(t, s.ProbeHandler(), "/readyz")
			if (code == http.StatusOK) != (len(why) == 0) {
				t.Errorf("%s: /readyz answers %d %v", when, code, body)
			}
			if got := s.Report(); got.Ready != (len(why) == 0) || !slices.Equal(got.Why, why) {
				t.Errorf("%s: %+v, want %q", when, got, why)
			}
			if code, _ := ask(t, s.Handler(), "/readyz"); (code == http.StatusOK) != (len(why) == 0) {
				t.Errorf("%s: the healthz port answers %d", when, code)
			}
		}
		want("before the first sync", "the first sync is not finished")
		s.Failing(true, 1, 3)
		s.Passed(time.Second, 3, 4)
		want("a refused rule", "some of the node's own state is refused by the kernel or cannot be read, see the log")
		if code, _ := ask(t, s.ProbeHandler(), "/livez"); code != http.StatusOK {
			t.Errorf("a refused rule must not cause a restart, but /livez answers %d", code)
		}
		s.Failing(false, 1, 3)
		want("one Service of three is refused")
		s.Failing(false, 2, 3)
		want("two Services of three are refused", "the kernel refuses most Services, see the log")
		s.Failing(false, 0, 0)
		want("there is no Service")
		s.Queued()
		time.Sleep(2*syncPeriod + time.Second)
		want("stuck", "the proxy does not keep up with changes")
		s.Passed(time.Second, 1, 0)
		want("going on")
	})
}

// TestStatus: /status shows everything that the proxy reports.
func TestStatus(t *testing.T) {
	s := NewServer(syncPeriod, &counts{})
	s.SetNode("node1")
	s.Held(5, 7, 1)
	s.Conflicts(2)
	s.Compared(time.Second, 3)
	s.Compared(time.Second, 1)
	s.Passed(2*time.Second, 1, 0)
	s.Node(true, true, false)
	code, body := ask(t, s.ProbeHandler(), "/status")
	if code != http.StatusOK {
		t.Errorf("answers %d", code)
	}
	for field, want := range map[string]any{
		"node": "node1", "virtualServers": 5.0, "realServers": 7.0, "drainingRealServers": 1.0, "conflicts": 2.0,
		"lastDifferences": 1.0, "differences": 4.0, "syncs": 1.0, "lastSyncSeconds": 2.0, "nodeEligible": false, "ready": true,
	} {
		if body[field] != want {
			t.Errorf("%s is %v, want %v", field, body[field], want)
		}
	}
}
