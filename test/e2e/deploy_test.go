//go:build e2e

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/document"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// deployed are the objects that both the base and the chart make.
var deployed = []string{
	"serviceaccount/kube-ipvs", "clusterrole.rbac.authorization.k8s.io/kube-ipvs",
	"clusterrolebinding.rbac.authorization.k8s.io/kube-ipvs", "configmap/kube-ipvs", "daemonset.apps/kube-ipvs",
}

// TestBehaviourDeployIsAccepted applies what is deployed, with unknown fields refused.
func TestBehaviourDeployIsAccepted(t *testing.T) {
	rendered := map[string]string{"base": renderBase(t, "deploy", "base"), "kind": renderBase(t, "test", "e2e", "kind")}
	rendered["chart"] = renderChart(t)
	rendered["privileged chart"] = renderChart(t, "privileged=true", "extraArgs={--v=2}", "ipvs.udpDrain=true")
	t.Cleanup(func() { kubectl(t, rendered["base"], "delete", "--wait=false", "-f", "-") })
	for name, text := range rendered {
		output := kubectl(t, text, "apply", "-f", "-", "--server-side", "--validate=strict")
		for _, object := range deployed {
			if !strings.Contains(output, object+" serverside-applied") {
				t.Errorf("%s: %s is not among what was applied:\n%s", name, object, output)
			}
		}
	}
	if diff := cmp.Diff(objects(t, rendered["base"]), objects(t, rendered["chart"])); diff != "" {
		t.Errorf("base (-), chart (+):\n%s", diff)
	}
}

// kubectl gives it an input.
func kubectl(t *testing.T, input string, args ...string) (output string) {
	t.Helper()
	cmd := exec.Command(lab.Peer("kubectl"), append([]string{"--kubeconfig", lab.Kubeconfig()}, args...)...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("kubectl %q: %v\n%s\n%s", args, err, out, input)
	}
	return string(out)
}

func renderBase(t *testing.T, folder ...string) string {
	t.Helper()
	return output(t, lab.Peer("kubectl"), "kustomize", filepath.Join(append([]string{os.Getenv("LAB_SRC")}, folder...)...))
}

func renderChart(t *testing.T, settings ...string) string {
	t.Helper()
	return output(t, lab.Peer("helm"), append([]string{filepath.Join(os.Getenv("LAB_SRC"), "deploy", "chart")}, settings...)...)
}

func output(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command(program, args...).Output()
	if err != nil {
		t.Fatalf("%s: %v: %s", program, err, out)
	}
	return string(out)
}

// objects gives the objects of a rendering by their kind, but for what differs on
// purpose: the image, and what documents stand in the ConfigMap.
func objects(t *testing.T, text string) map[string]map[string]any {
	t.Helper()
	byKind := map[string]map[string]any{}
	for _, d := range document.Split([]byte(text)) {
		var object map[string]any
		if _, err := d.Decode(&object); err != nil {
			t.Fatal(err)
		}
		kind, _ := object["kind"].(string)
		if kind == "DaemonSet" {
			dropImages(object)
		}
		if kind != "ConfigMap" {
			byKind[kind] = object
		}
	}
	return byKind
}

func dropImages(node any) {
	switch n := node.(type) {
	case map[string]any:
		delete(n, "image")
		delete(n, "imagePullPolicy")
		for _, child := range n {
			dropImages(child)
		}
	case []any:
		for _, child := range n {
			dropImages(child)
		}
	}
}
