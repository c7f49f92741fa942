//go:build e2e

package e2e

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestInvalidManifestOverRestart makes the manifests of a Service and of its endpoints
// invalid. The Service stays programmed, also by the next process, until a manifest is removed.
func TestInvalidManifestOverRestart(t *testing.T) {
	node, flags := loneNode(t)
	folder := flags[1]
	start := func() *lab.Process {
		return node.StartProxy(func(*lab.Process) error { return hasPassed(node) }, flags...)
	}
	process := start()
	programmed := kernelState(node)
	for _, name := range []string{"00.yaml", "01.yaml"} {
		invalid := filepath.Join(folder, name)
		text, err := os.ReadFile(invalid)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(invalid, slices.Concat([]byte("{\n---\n"), text[:len(text)/2]), 0o600); err != nil {
			t.Fatal(err)
		}
		lab.Eventually(t, syncLimit, name+" is reported", func() error {
			if !strings.Contains(process.Log(), name+": document 1 (line 1)") {
				return errors.New(process.Log())
			}
			return nil
		})
	}
	for range 2 {
		process.Terminate()
		process = start()
		if diff := cmp.Diff(programmed, kernelState(node)); diff != "" {
			t.Errorf("state before (-) and with invalid manifests (+):\n%s", diff)
		}
	}
	if err := os.Remove(filepath.Join(folder, "00.yaml")); err != nil {
		t.Fatal(err)
	}
	lab.Eventually(t, syncLimit, "the Service is removed", func() error {
		if state := kernelState(node); strings.Contains(state, clusterIPs(1)[0]) {
			return errors.New(state)
		}
		return nil
	})
}
