//go:build e2e

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/upstream/walk"
)

// kubeProxy is a DaemonSet such as kubeadm's.
const kubeProxy = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system, labels: {k8s-app: kube-proxy}}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      containers: [{name: kube-proxy, image: registry.example/kube-proxy}]
`

// eksAffinity is what EKS's has in addition. It belongs at the end of kubeProxy.
const eksAffinity = `      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: kubernetes.io/os, operator: In, values: [linux]}
                  - {key: eks.amazonaws.com/compute-type, operator: NotIn, values: [fargate]}
`

// TestBehaviourRemovedKubeProxyComesBack runs the commands of the migration guide that
// change kube-proxy's DaemonSet, as printed: what step 7 saves can be created again, and
// stays off the nodes of kube-ipvs.
func TestBehaviourRemovedKubeProxyComesBack(t *testing.T) {
	kubectl(t, kubeProxy, "create", "-f", "-")
	t.Cleanup(func() { kubectl(t, "", "-n", "kube-system", "delete", "daemonset", "kube-proxy", "--ignore-not-found") })
	affinity := func() string {
		return kubectl(t, "", "-n", "kube-system", "get", "daemonset", "kube-proxy", "-o", "jsonpath={.spec.template.spec.affinity}")
	}
	home := t.TempDir()
	run := func(section string, index int) { runBlock(t, home, section, index) }

	run("2. Keep kube-proxy off labelled nodes", 0)
	patched := affinity()
	if !strings.Contains(patched, `"key":"kube-ipvs","operator":"DoesNotExist"`) {
		t.Fatalf("the affinity is %s", patched)
	}
	run("7. Remove kube-proxy", 0)
	if left := kubectl(t, "", "-n", "kube-system", "get", "daemonset", "--ignore-not-found", "kube-proxy", "-o", "name"); left != "" {
		t.Fatalf("%s is left", left)
	}
	run("7. Remove kube-proxy", 1)
	if back := affinity(); back != patched {
		t.Errorf("the affinity was %s, and is %s", patched, back)
	}
	run("2. Keep kube-proxy off labelled nodes", 1)
	if back := affinity(); back != "" {
		t.Errorf("the affinity is %s after its rollback", back)
	}
}

// TestBehaviourKubeProxyKeepsItsAffinity runs the commands for a DaemonSet that has an
// affinity, such as EKS's: they add an expression, and their rollback removes only that.
func TestBehaviourKubeProxyKeepsItsAffinity(t *testing.T) {
	const section = "If kube-proxy has an affinity"
	kubectl(t, kubeProxy+eksAffinity, "create", "-f", "-")
	t.Cleanup(func() { kubectl(t, "", "-n", "kube-system", "delete", "daemonset", "kube-proxy", "--ignore-not-found") })
	affinity := func() string {
		return kubectl(t, "", "-n", "kube-system", "get", "daemonset", "kube-proxy", "-o", "jsonpath={.spec.template.spec.affinity}")
	}
	before := affinity()
	runBlock(t, t.TempDir(), section, 0)
	for _, want := range []string{`"key":"kube-ipvs","operator":"DoesNotExist"`, `"fargate"`, `"kubernetes.io/os"`} {
		if patched := affinity(); !strings.Contains(patched, want) {
			t.Errorf("%s is not in the affinity: %s", want, patched)
		}
	}
	runBlock(t, t.TempDir(), section, 1)
	if after := affinity(); after != before {
		t.Errorf("the affinity was %s, and is %s after its rollback", before, after)
	}
}

// runBlock runs a block of the migration guide's commands, except Helm's and those that
// wait for pods: the lab has an API server without kubelets.
func runBlock(t *testing.T, home, section string, index int) {
	t.Helper()
	blocks, err := walk.Blocks(os.Getenv("LAB_SRC"), "docs/guides/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	values := "" // that the reader sets first
	for _, b := range blocks {
		if b.Section == "1. Prepare" && b.Index == 0 {
			values = b.Text
		}
		if b.Section != section || b.Index != index {
			continue
		}
		cmd := exec.Command("sh", "-euc", "helm() { :; }\nkubectl() { case \" $* \" in *' rollout status '*) ;; *) \"$KUBECTL\" \"$@\" ;; esac; }\n"+values+b.Text)
		cmd.Env = append(os.Environ(), "HOME="+home, "KUBECONFIG="+lab.Kubeconfig(), "KUBECTL="+filepath.Clean(lab.Peer("kubectl")))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", b, err, out)
		}
		return
	}
	t.Fatalf("no block %d below %q", index, section)
}
