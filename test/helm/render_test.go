package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const chart = "../../deploy/chart"

// required are the values without which the chart does not install.
var required = []string{"apiServer=https://10.0.0.10:6443", `proxy.clusterCIDR=10.244.0.0/16\,fd00:10:244::/56`}

func with(settings ...string) []string { return append(slices.Clone(required), settings...) }

func mustRender(t *testing.T, settings ...string) map[string]string {
	t.Helper()
	files, err := render(chart, with(settings...))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for name, text := range files {
		out[strings.TrimPrefix(name, "kube-ipvs/templates/")] = text
	}
	return out
}

func TestLint(t *testing.T) {
	for _, settings := range [][]string{
		nil,
		{"metrics.podMonitor.enabled=true", "metrics.prometheusRule.enabled=true", "metrics.dashboard.enabled=true", "proxy.metricsBindAddress=0.0.0.0:10249"},
		{"updateStrategy.type=OnDelete", "updateStrategy.rollingUpdate=null", "profile=kube-proxy"},
	} {
		if err := lintChart(chart, with(settings...)); err != nil {
			t.Errorf("%q: %v", settings, err)
		}
	}
}

// TestRefused: what cannot work is refused before anything is installed, and the
// message names the value.
func TestRefused(t *testing.T) {
	for _, tc := range []struct {
		settings []string
		want     string
	}{
		{nil, "apiServer is required"},
		{required[1:], "apiServer is required"},
		{required[:1], "proxy.clusterCIDR is required"},
		{[]string{required[0], "proxy.detectLocalMode=ClusterCIDR"}, "proxy.clusterCIDR is required"},
		{[]string{required[0], "proxy.detectLocalMode=BridgeInterface"}, "proxy.detectLocal.bridgeInterface is required"},
		{[]string{required[0], "proxy.detectLocalMode=InterfaceNamePrefix"}, "proxy.detectLocal.interfaceNamePrefix is required"},
		{[]string{"apiServer=10.0.0.10:6443", required[1]}, "/apiServer"},
		{with("proxy.clusterCIDR=POD_CIDR"), "/proxy/clusterCIDR"},
		{with("proxy.mode=nftables"), "/proxy/mode"},
		{with("profile=iptables"), "/profile"},
		{with("ipvs.snat.mod=off"), "additional properties 'mod' not allowed"},
		{with("image.tags=v1"), "additional properties 'tags' not allowed"},
		{with("image.digest=v1"), "/image/digest"},
		{with("extraEnv[0].name=GOGC", "extraEnv[0].value=50"), "/extraEnv/0/value"},
		{with("updateStrategy.rollingUpdate.maxSurge=1"), "/updateStrategy/rollingUpdate/maxSurge"},
		{with("extraArgs[0]=--probe-bind-address=0.0.0.0:10266"), "set ipvs.probeBindAddress instead"},
		{with("ipvs.manifests=/manifests"), "ipvs.manifests cannot be used"},
		{with("ipvs.stateDir=/var/lib/kube-ipvs"), "ipvs.stateDir must be /run/kube-ipvs"},
		{with("metrics.podMonitor.enabled=true"), `proxy.metricsBindAddress is "127.0.0.1:10249"`},
		{with("metrics.podMonitor.enabled=true", "proxy.metricsBindAddress=0.0.0.0:10249", "containerPorts=false"), "metrics.podMonitor needs containerPorts"},
	} {
		_, err := render(chart, tc.settings)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: error %v, want %q", tc.settings, err, tc.want)
		}
	}
}

// TestValues: each setting is found in the object that it is for.
func TestValues(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0a", 32)
	for _, tc := range []struct {
		settings []string
		file     string
		want     []string
	}{
		// Fields that are set must not drop the kubeconfig, without which the API server
		// would be asked by the cluster IP that kube-ipvs itself serves.
		{[]string{"proxy.clientConnection.qps=50"}, "configmap.yaml", []string{"kubeconfig: /var/lib/kube-ipvs/kubeconfig.yaml", "qps: 50"}},
		{[]string{"profile=kube-proxy"}, "configmap.yaml", []string{"compat: kube-proxy"}},
		{[]string{"ipvs.snat.mode=off"}, "configmap.yaml", []string{"snat:\n      mode: \"off\""}},
		{[]string{"updateStrategy.type=OnDelete"}, "configmap.yaml", []string{"helm.sh/resource-policy: keep"}},
		{nil, "daemonset.yaml", []string{"image: ghcr.io/kube-ipvs/kube-ipvs:v", "maxUnavailable: 10%", "containerPort: 10249"}},
		{[]string{"image.repository=r.example/k", "image.tag=v9"}, "daemonset.yaml", []string{"image: r.example/k:v9\n"}},
		{[]string{"image.tag=v9", "image.digest=" + digest}, "daemonset.yaml", []string{"image: ghcr.io/kube-ipvs/kube-ipvs@" + digest + "\n"}},
		{[]string{"imagePullSecrets[0].name=pull"}, "daemonset.yaml", []string{"imagePullSecrets:\n        - name: pull"}},
		{[]string{"nodeSelector.kube-ipvs=canary"}, "daemonset.yaml", []string{"kube-ipvs: canary", "kubernetes.io/os: linux"}},
		{[]string{"updateStrategy.rollingUpdate.maxUnavailable=1%", "minReadySeconds=30"}, "daemonset.yaml", []string{"maxUnavailable: 1%", "minReadySeconds: 30"}},
		{[]string{"priorityClassName=p", "podAnnotations.a=b", "podLabels.c=d", "commonLabels.e=f"}, "daemonset.yaml", []string{"priorityClassName: p", "a: b", "c: d", "e: f"}},
		{[]string{"affinity.nodeAffinity.x=y"}, "daemonset.yaml", []string{"affinity:\n        nodeAffinity:"}},
		{[]string{"extraEnv[0].name=GOGC", "extraEnv[0].value=off", "extraArgs={--v=4}", "hostPID=true"}, "daemonset.yaml", []string{"name: GOGC", `- "--v=4"`, "hostPID: true"}},
		{[]string{"proxy.metricsBindAddress=0.0.0.0:9999"}, "daemonset.yaml", []string{"containerPort: 9999"}},
		{nil, "daemonset.yaml", []string{"- name: probes\n              containerPort: 10266\n", `httpGet: {path: /livez, port: probes, host: "127.0.0.1"}`, `httpGet: {path: /readyz, port: probes, host: "127.0.0.1"}`}},
		{[]string{"containerPorts=false"}, "daemonset.yaml", []string{`{path: /livez, port: 10266, host: "127.0.0.1"}`, `{path: /readyz, port: 10266, host: "127.0.0.1"}`}},
		// With another port, a fixed one would end the process again and again.
		{[]string{"ipvs.probeBindAddress=127.0.0.2:10300"}, "daemonset.yaml", []string{"containerPort: 10300\n", `{path: /livez, port: probes, host: "127.0.0.2"}`, `{path: /readyz, port: probes, host: "127.0.0.2"}`}},
		{[]string{"ipvs.probeBindAddress=0.0.0.0:10300"}, "daemonset.yaml", []string{"containerPort: 10300\n", `{path: /livez, port: probes, host: "127.0.0.1"}`}},
		{[]string{`ipvs.probeBindAddress=\[fd00::1\]:10300`}, "daemonset.yaml", []string{"containerPort: 10300\n", `{path: /livez, port: probes, host: "fd00::1"}`}},
		{[]string{"proxy.metricsBindAddress=0.0.0.0:9999", "metrics.podMonitor.enabled=true", "metrics.podMonitor.labels.release=p"}, "monitoring.yaml", []string{"kind: PodMonitor", "port: metrics", "release: p"}},
		{[]string{"metrics.prometheusRule.enabled=true"}, "monitoring.yaml", []string{"kind: PrometheusRule", "alert: KubeIPVSDown", "{{ $labels.instance }}"}},
		{[]string{"metrics.dashboard.enabled=true"}, "monitoring.yaml", []string{"name: kube-ipvs-dashboard", `grafana_dashboard: "1"`, `"uid": "kube-ipvs"`}},
		{[]string{"fullnameOverride=other"}, "rbac.yaml", []string{"name: other"}},
		{[]string{"nodeSelector.a=b", "profile=kube-proxy"}, "NOTES.txt", []string{"a=b", "Profile kube-proxy: the defaults that differ", "docs/differences.md", "Metrics are bound to 127.0.0.1:10249"}},
	} {
		text := mustRender(t, tc.settings...)[tc.file]
		for _, want := range tc.want {
			if !strings.Contains(text, want) {
				t.Errorf("%q: %s has no %q:\n%s", tc.settings, tc.file, want, text)
			}
		}
	}
}

// TestKubeadmConfiguration runs the command of the guide on a ConfigMap of kubeadm's.
func TestKubeadmConfiguration(t *testing.T) {
	page, err := os.ReadFile("../../docs/guides/install-kubeadm.md")
	if err != nil {
		t.Fatal(err)
	}
	command := regexp.MustCompile(`(?m)^ +(\{ echo proxy:.*values\.yaml)$`).FindSubmatch(page)
	if command == nil {
		t.Fatal("the guide does not make values.yaml")
	}
	config, err := os.ReadFile("../../pkg/config/testdata/kubeadm.yaml")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.conf"), config, 0o644); err != nil {
		t.Fatal(err)
	}
	shell := exec.Command("bash", "-c", string(command[1]))
	shell.Dir = dir
	if out, err := shell.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	files, err := render(chart, []string{"-f=" + filepath.Join(dir, "values.yaml"), required[0]})
	if err != nil {
		t.Fatal(err)
	}
	text := files["kube-ipvs/templates/configmap.yaml"]
	for _, want := range []string{"mode: ipvs", "kubeconfig: /var/lib/kube-ipvs/kubeconfig.yaml", "clusterCIDR: 10.244.0.0/16,fd00:10:244::/56"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// TestConfigurationIsStaged: the ConfigMap's name, and with it the pods' template,
// changes with the configuration, and with nothing else.
func TestConfigurationIsStaged(t *testing.T) {
	name := func(settings ...string) string {
		files := mustRender(t, settings...)
		_, rest, _ := strings.Cut(files["configmap.yaml"], "\n  name: ")
		name, _, _ := strings.Cut(rest, "\n")
		if !strings.HasPrefix(name, "kube-ipvs-") {
			t.Fatalf("name %q", name)
		}
		if !strings.Contains(files["configmap.yaml"], "\nimmutable: true\n") {
			t.Error("the ConfigMap is not immutable")
		}
		for _, file := range []string{"daemonset.yaml", "tests/configuration.yaml"} {
			if !strings.Contains(files[file], "name: "+name+"\n") {
				t.Errorf("%s does not mount %s", file, name)
			}
		}
		return name
	}
	before := name()
	if again := name("image.tag=v9", "podLabels.a=b"); again != before {
		t.Errorf("another image changes the configuration's name: %s, %s", before, again)
	}
	seen := map[string]bool{before: true}
	for _, setting := range []string{"ipvs.snat.mode=off", "proxy.ipvs.scheduler=lc", "apiServer=https://10.0.0.11:6443", "profile=kube-proxy"} {
		seen[name(setting)] = true
	}
	if len(seen) != 5 {
		t.Errorf("names %q", slices.Sorted(maps.Keys(seen)))
	}
}

// TestLabelsAreStrings: the API refuses labels and annotations that are not.
func TestLabelsAreStrings(t *testing.T) {
	files := mustRender(t, "nodeSelector.gpu=true", "podLabels.gpu=true", "podAnnotations.gpu=true", "commonLabels.gpu=true", "serviceAccount.annotations.gpu=true",
		"proxy.metricsBindAddress=0.0.0.0:10249", "metrics.podMonitor.enabled=true", "metrics.podMonitor.labels.team=5", "metrics.prometheusRule.enabled=true",
		"metrics.prometheusRule.labels.team=5", "metrics.dashboard.enabled=true", "metrics.dashboard.labels.team=5", "metrics.dashboard.annotations.team=5")
	for name, text := range files {
		for _, bare := range []string{": true\n", ": 5\n"} {
			for line := range strings.Lines(text) {
				if at := strings.TrimSpace(line); strings.HasSuffix(line, bare) && (strings.HasPrefix(at, "gpu:") || strings.HasPrefix(at, "team:")) {
					t.Errorf("%s: %s is not a string", name, at)
				}
			}
		}
	}
	for file, want := range map[string]int{"daemonset.yaml": 4, "rbac.yaml": 4, "monitoring.yaml": 3, "tests/configuration.yaml": 1} {
		if n := strings.Count(files[file], `gpu: "true"`); n != want {
			t.Errorf("%s has %d labels, want %d", file, n, want)
		}
	}
	if n := strings.Count(files["monitoring.yaml"], `team: "5"`); n != 4 {
		t.Errorf("monitoring.yaml has %d labels, want 4", n)
	}
}

// TestProbesAreOff: without a port for probes there are none, and none is declared.
func TestProbesAreOff(t *testing.T) {
	if text := mustRender(t, "ipvs.probeBindAddress=")["daemonset.yaml"]; strings.Contains(text, "Probe:") || strings.Contains(text, "name: probes") {
		t.Errorf("probes of no port:\n%s", text)
	}
}

// TestMonitoringIsOff: a cluster without the Prometheus operator has no such kinds.
func TestMonitoringIsOff(t *testing.T) {
	if text := strings.TrimSpace(mustRender(t)["monitoring.yaml"]); text != "" {
		t.Errorf("%s", text)
	}
}

func TestPackage(t *testing.T) {
	dir := t.TempDir()
	name, err := packageChart(chart, "v1.2.3", dir)
	if err != nil || strings.TrimSpace(name) != dir+"/kube-ipvs-1.2.3.tgz" {
		t.Fatalf("%s, %v", name, err)
	}
	files, err := render(strings.TrimSpace(name), required)
	if err != nil || !strings.Contains(files["kube-ipvs/templates/daemonset.yaml"], "kube-ipvs:v1.2.3") {
		t.Errorf("%v\n%s", err, files["kube-ipvs/templates/daemonset.yaml"])
	}
}
