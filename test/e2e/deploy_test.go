//go:build e2e

package e2e

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/document"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// deployed lists the objects of base, chart and install.yaml. The ConfigMap's name ends
// in a hash of its content, except in install.yaml.
var deployed = []string{
	"serviceaccount/kube-ipvs", "clusterrole.rbac.authorization.k8s.io/kube-ipvs",
	"clusterrolebinding.rbac.authorization.k8s.io/kube-ipvs", "configmap/kube-ipvs", "daemonset.apps/kube-ipvs",
}

// The values that every cluster has to set.
const (
	deployedAPIServer = "https://10.0.0.10:6443"
	deployedPodCIDR   = "10.244.0.0/16"
)

// placeholders returns the placeholders of the base and of install.yaml.
var placeholders = strings.NewReplacer("POD_CIDR", deployedPodCIDR, "https://API_SERVER:6443", deployedAPIServer)

// TestBehaviourDeployIsAccepted applies the deployments, with unknown fields refused, and
// checks that all three ways to install create the same objects.
func TestBehaviourDeployIsAccepted(t *testing.T) {
	rendered := map[string]string{
		"base":         placeholders.Replace(renderBase(t, "deploy", "base")),
		"install.yaml": placeholders.Replace(string(sourceFile(t, "deploy", "install.yaml"))),
		"kind":         renderBase(t, "test", "e2e", "kind"),
		"chart":        renderChart(t),
		"full chart": renderChart(t, "privileged=true", "extraArgs={--v=2}", "ipvs.udpDrain=true", "profile=kube-proxy", "hostPID=true",
			"image.digest=sha256:"+strings.Repeat("0", 64), "imagePullSecrets[0].name=pull", "nodeSelector.kube-ipvs=canary", "minReadySeconds=10",
			"updateStrategy.rollingUpdate.maxUnavailable=1%", "podAnnotations.a=b", "podLabels.a=b", "commonLabels.a=b", "extraEnv[0].name=GOGC", "extraEnv[0].value=off",
			"affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].key=a",
			"affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].operator=Exists",
			"proxy.metricsBindAddress=0.0.0.0:10249", "metrics.dashboard.enabled=true"),
		"OnDelete chart": renderChart(t, "updateStrategy.type=OnDelete", "updateStrategy.rollingUpdate=null"),
	}
	// One kubectl applies all of them, because the lab takes seconds to start each.
	all := strings.Join(slices.Collect(maps.Values(rendered)), "\n---\n")
	t.Cleanup(func() { kubectl(t, all, "delete", "--wait=false", "--ignore-not-found", "-f", "-") })
	applied := kubectl(t, all, "apply", "-f", "-", "--server-side", "--force-conflicts", "--validate=strict")
	applied = hashedName.ReplaceAllString(applied, "configmap/kube-ipvs ")
	for _, object := range deployed {
		if n := strings.Count(applied, object+" serverside-applied"); n < len(rendered) {
			t.Errorf("%s was applied %d times, want %d:\n%s", object, n, len(rendered), applied)
		}
	}
	base := objects(t, rendered["base"])
	for _, other := range []string{"chart", "install.yaml"} {
		if diff := cmp.Diff(base, objects(t, rendered[other])); diff != "" {
			t.Errorf("base (-), %s (+):\n%s", other, diff)
		}
	}
}

// hashedName matches the name of a ConfigMap with a hash, in kubectl's output.
var hashedName = regexp.MustCompile(`configmap/kube-ipvs-[0-9a-z]{10} `)

// kubectl runs kubectl with an input.
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
	chart := filepath.Join(os.Getenv("LAB_SRC"), "deploy", "chart")
	return output(t, lab.Peer("helm"), append([]string{chart, "apiServer=" + deployedAPIServer, "proxy.clusterCIDR=" + deployedPodCIDR}, settings...)...)
}

func output(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command(program, args...).Output()
	if err != nil {
		t.Fatalf("%s: %v: %s", program, err, out)
	}
	return string(out)
}

// objects returns the objects of a rendering by kind, without intended differences: the
// image, the ConfigMap's name and whether it is immutable, and Helm's labels.
func objects(t *testing.T, text string) map[string]map[string]any {
	t.Helper()
	byKind := map[string]map[string]any{}
	for _, d := range document.Split([]byte(text)) {
		var object map[string]any
		if _, err := d.Decode(&object); err != nil {
			t.Fatal(err)
		}
		kind, _ := object["kind"].(string)
		metadata := object["metadata"].(map[string]any)
		labels, _ := metadata["labels"].(map[string]any)
		for _, helms := range []string{"helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"} {
			delete(labels, helms)
		}
		switch kind {
		case "DaemonSet":
			dropImages(object)
		case "ConfigMap":
			delete(metadata, "name")
			delete(object, "immutable")
			object["data"] = documents(t, object["data"].(map[string]any))
		}
		byKind[kind] = object
	}
	return byKind
}

// documents decodes the files of the ConfigMap. Their comments and order may differ.
func documents(t *testing.T, files map[string]any) map[string][]any {
	t.Helper()
	out := map[string][]any{}
	for name, text := range files {
		for _, d := range document.Split([]byte(text.(string))) {
			var content any
			if _, err := d.Decode(&content); err != nil {
				t.Fatal(err)
			}
			out[name] = append(out[name], content)
		}
	}
	return out
}

func dropImages(node any) {
	switch n := node.(type) {
	case map[string]any:
		delete(n, "image")
		delete(n, "imagePullPolicy")
		if volume, ok := n["configMap"].(map[string]any); ok {
			delete(volume, "name")
		}
		for _, child := range n {
			dropImages(child)
		}
	case []any:
		for _, child := range n {
			dropImages(child)
		}
	}
}
