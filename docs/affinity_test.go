package docs

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"

	"github.com/kube-ipvs/kube-ipvs/test/upstream/walk"
)

// eksProxy is the part of EKS's kube-proxy DaemonSet that the migration guide changes.
const eksProxy = `{"spec": {"template": {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
	{"nodeSelectorTerms": [{"matchExpressions": [
		{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]},
		{"key": "eks.amazonaws.com/compute-type", "operator": "NotIn", "values": ["fargate"]}]}]}}}}}}}`

// TestAffinityPatches applies the migration guide's JSON patches, as printed, with the API
// server's library: the affinity of kube-proxy stays, and the rollback restores it.
func TestAffinityPatches(t *testing.T) {
	patched := apply(t, eksProxy, patchOf(t, 0))
	for _, want := range []string{`{"key":"kube-ipvs","operator":"DoesNotExist"}`, `"fargate"`, `"kubernetes.io/os"`} {
		if !strings.Contains(patched, want) {
			t.Errorf("%s is not in %s", want, patched)
		}
	}
	if diff := cmp.Diff(parsed(t, eksProxy), parsed(t, apply(t, patched, patchOf(t, 1)))); diff != "" {
		t.Errorf("after the rollback (-before +after):\n%s", diff)
	}
	if undo, err := jsonpatch.DecodePatch([]byte(patchOf(t, 1))); err != nil {
		t.Error(err)
	} else if _, err := undo.Apply([]byte(eksProxy)); err == nil {
		t.Error("the rollback removes an expression of another owner")
	}
}

// patchOf returns the patch that a block of the guide passes to kubectl.
func patchOf(t *testing.T, index int) string {
	t.Helper()
	const section = "If kube-proxy has an affinity"
	blocks, err := walk.Blocks("..", "docs/guides/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if b.Section != section || b.Index != index {
			continue
		}
		out, err := exec.Command("bash", "-euc", `kubectl() { case " $* " in *' --type json '*) printf '%s' "${@: -1}" ;; esac; }`+"\n"+b.Text).Output()
		if err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		return string(out)
	}
	t.Fatalf("no block %d below %q", index, section)
	return ""
}

func apply(t *testing.T, object, patch string) string {
	t.Helper()
	p, err := jsonpatch.DecodePatch([]byte(patch))
	if err != nil {
		t.Fatalf("%v: %s", err, patch)
	}
	out, err := p.Apply([]byte(object))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func parsed(t *testing.T, object string) (out any) {
	t.Helper()
	if err := json.Unmarshal([]byte(object), &out); err != nil {
		t.Fatal(err)
	}
	return out
}
