//go:build e2e

package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

var flagInHelp = regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z0-9-]+)`)

// TestConformanceFlags compares the list of kube-proxy's flags in package config with the
// flags of the real program.
func TestConformanceFlags(t *testing.T) {
	help, err := exec.Command(lab.Peer("kube-proxy"), "--help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, help)
	}
	var got []string
	for _, match := range flagInHelp.FindAllStringSubmatch(string(help), -1) {
		if match[1] != "help" {
			got = append(got, match[1])
		}
	}
	slices.Sort(got)
	listed, err := os.ReadFile(filepath.Join(os.Getenv("LAB_SRC"), "pkg/config/testdata/kube-proxy-flags.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Fields(string(listed)), got); diff != "" {
		t.Errorf("listed (-), known to kube-proxy (+):\n%s", diff)
	}
}
