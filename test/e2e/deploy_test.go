//go:build e2e

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourDeployIsAccepted has the API server look at what is deployed, with
// unknown fields refused, as if it were to be applied.
func TestBehaviourDeployIsAccepted(t *testing.T) {
	base := filepath.Join(os.Getenv("LAB_SRC"), "deploy", "base")
	output, err := exec.Command(lab.Peer("kubectl"), "--kubeconfig", lab.Kubeconfig(), "apply", "-k", base,
		"--server-side", "--dry-run=server", "--validate=strict").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	for _, object := range []string{"serviceaccount/kube-ipvs", "clusterrole.rbac.authorization.k8s.io/kube-ipvs", "clusterrolebinding.rbac.authorization.k8s.io/kube-ipvs", "configmap/kube-ipvs", "daemonset.apps/kube-ipvs"} {
		if !strings.Contains(string(output), object+" serverside-applied") {
			t.Errorf("%s is not among what was applied:\n%s", object, output)
		}
	}
}
