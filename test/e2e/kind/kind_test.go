// Package kind has no code: it looks at what a kind cluster would be made with,
// as far as that is possible without Docker.
package kind

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// cluster is what is used of kind's v1alpha4 configuration.
type cluster struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Networking struct {
		KubeProxyMode string `json:"kubeProxyMode"`
		PodSubnet     string `json:"podSubnet"`
		ServiceSubnet string `json:"serviceSubnet"`
	} `json:"networking"`
	Nodes []struct {
		Role string `json:"role"`
	} `json:"nodes"`
}

func read(t *testing.T, name string, out any) (text string) {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if out != nil {
		if err := yaml.UnmarshalStrict(data, out); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	return string(data)
}

// TestConfiguration: no field is misspelt, and what two files say is the same.
func TestConfiguration(t *testing.T) {
	var c cluster
	read(t, "cluster.yaml", &c)
	if c.APIVersion != "kind.x-k8s.io/v1alpha4" || c.Kind != "Cluster" || c.Networking.KubeProxyMode != "none" {
		t.Errorf("%+v", c)
	}
	var config corev1.ConfigMap
	read(t, "config.yaml", &config)
	if cidr := "clusterCIDR: " + c.Networking.PodSubnet; !strings.Contains(config.Data["config.yaml"], cidr) {
		t.Errorf("%q is not in %s", cidr, config.Data["config.yaml"])
	}
	// kind names a control plane's node so, after the cluster.
	script := read(t, "run", nil)
	name, _, _ := strings.Cut(script[strings.Index(script, "\nname=")+len("\nname="):], "\n")
	if server := "server: https://" + name + "-control-plane:6443"; !strings.Contains(config.Data["kubeconfig.yaml"], server) {
		t.Errorf("%q is not in %s", server, config.Data["kubeconfig.yaml"])
	}
}

// TestScript: bash can read it, and it says what is missing.
func TestScript(t *testing.T) {
	if out, err := exec.Command("bash", "-n", "run").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bash, "run", "image.tar", "v1")
	// Only what stands before the check is to be found.
	cmd.Env = []string{"PATH=" + programs(t, "dirname", "realpath")}
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "docker is not installed") {
		t.Errorf("without Docker: %v\n%s", err, out)
	}
}

// programs makes a folder with these and no others.
func programs(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(path, dir+"/"+name)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
