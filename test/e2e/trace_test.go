//go:build e2e

package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourTrace asks the program about the report that the project comes
// from, where it fails and where it does not; TestENIMatrixOneENI compares what
// is explained with what packets do, cell by cell.
func TestBehaviourTrace(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{CheckSources: true})
	for mode, want := range map[string]trace.Outcome{"off": trace.Asymmetric, "auto": trace.Answered} {
		programENI(t, c, "--snat-mode", mode)
		from := c.Pod.Addresses[0].String()
		code, text := c.Node.RunProxy("trace", "--from", from, "--to", c.VIP)
		t.Logf("--snat-mode %s:\n%s", mode, text)
		last := strings.Split(strings.TrimSpace(text), "\n")
		if verdict := last[len(last)-1]; code != 0 || !strings.HasPrefix(verdict, string(want)) {
			t.Errorf("--snat-mode %s: ended with %d and %q, want %q", mode, code, verdict, want)
		}

		code, text = c.Node.RunProxy("trace", "--from", from, "--to", c.VIP+"/tcp", "-o", "json")
		var x trace.Explanation
		if err := json.Unmarshal([]byte(text), &x); code != 0 || err != nil {
			t.Fatalf("-o json: ended with %d, %v:\n%s", code, err, text)
		}
		if x.Verdict.Outcome != want || len(x.RealServers) != len(c.Endpoints) || x.EntersBy != c.Pod.HostInterface {
			t.Errorf("-o json: %+v", x)
		}
		if answer := c.Pod.DialWithin(briefly, lab.TCP, c.VIP); (answer.Err == nil) != (want == trace.Answered) {
			t.Errorf("--snat-mode %s: %s", mode, answer)
		}
	}
	for arg, part := range map[string]string{
		"--to=10.0.0.1": `--to "10.0.0.1"`, "--from=nobody": "neither an IP address nor a pod", "--from=fd00::1": "another family",
		"--in=eth9": "no such interface", "--output=xml": "must be text or json",
	} {
		code, text := c.Node.RunProxy("trace", "--from", "10.0.0.1", "--to", c.VIP, arg)
		if code == 0 || !strings.Contains(strings.ReplaceAll(text, `\"`, `"`), part) {
			t.Errorf("%s: ended with %d, want an error with %q:\n%s", arg, code, part, text)
		}
	}
}
