package judge

import (
	"flag"
	"os"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/upstream/cluster"
)

var update = flag.Bool("update", false, "write docs/conformance.md")

const page = "../../../docs/conformance.md"

// TestPage checks that the page matches the recorded results.
func TestPage(t *testing.T) {
	want, err := Page("../results", cluster.Proxies)
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(page); err != nil || string(got) != want {
		t.Errorf("%s does not match the verdicts (make docs): %v", page, err)
	}
}
