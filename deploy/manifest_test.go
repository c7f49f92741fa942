package deploy

import (
	"regexp"
	"strings"
	"testing"
)

const installFile = "install.yaml"

const installHead = `# kube-ipvs without Helm and kustomize. Generated from deploy/base by "make docs".
#
# Replace the two placeholders, POD_CIDR and API_SERVER:
#
#   sed -e 's|POD_CIDR|10.244.0.0/16|' -e 's|API_SERVER:6443|10.0.0.10:6443|' install.yaml |
#     kubectl apply -f -
#
# If you change this ConfigMap later, kube-ipvs restarts on all nodes within about a
# minute. Then restart the DaemonSet: only a new pod sets kernel parameters. The Helm
# chart and the kustomize base roll out changes node by node.
`

// TestInstallManifest checks that install.yaml has what the base has.
func TestInstallManifest(t *testing.T) {
	var want strings.Builder
	want.WriteString(installHead)
	want.WriteString("---\n" + read(t, "base/rbac.yaml"))
	want.WriteString("---\n" + installConfigMap(t))
	want.WriteString("---\n" + read(t, "base/daemonset.yaml"))
	checkFile(t, installFile, want.String(), readOrEmpty(t, installFile))
}

func installConfigMap(t *testing.T) string {
	var out strings.Builder
	out.WriteString(`apiVersion: v1
kind: ConfigMap
metadata:
  name: kube-ipvs
  namespace: kube-system
  labels:
    app.kubernetes.io/name: kube-ipvs
    app.kubernetes.io/instance: kube-ipvs
data:
`)
	for _, name := range []string{"config.yaml", "kubeconfig.yaml"} {
		out.WriteString("  " + name + ": |\n")
		for line := range strings.Lines(read(t, "base/"+name)) {
			out.WriteString("    " + line)
		}
	}
	return out.String()
}

// TestPlaceholders checks that the commands of the manifest's head replace something,
// and that nothing is left then.
func TestPlaceholders(t *testing.T) {
	_, objects, _ := strings.Cut(read(t, installFile), "---\n")
	for _, placeholder := range []string{"POD_CIDR", "API_SERVER:6443"} {
		if strings.Count(objects, placeholder) != 1 {
			t.Errorf("%s is %d times in %s, want once", placeholder, strings.Count(objects, placeholder), installFile)
		}
	}
}

// TestMinReadySeconds checks that a build that crashes soon after it was ready is not rolled
// out, in whichever way it is installed.
func TestMinReadySeconds(t *testing.T) {
	for _, file := range []string{"base/daemonset.yaml", "install.yaml", "chart/values.yaml"} {
		if !regexp.MustCompile(`(?m)^ *minReadySeconds: 10\b`).MatchString(read(t, file)) {
			t.Errorf("%s: minReadySeconds is not 10", file)
		}
	}
}
