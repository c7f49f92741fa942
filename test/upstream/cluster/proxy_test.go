package cluster

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// kube-proxy ignores an unknown field, and continues without it.
func TestPeerIsConfigured(t *testing.T) {
	manifest := peerManifest("nftables", "https://192.0.2.1:6443")
	var config proxyconfig.KubeProxyConfiguration
	for document := range strings.SplitSeq(manifest, "\n---\n") {
		var object corev1.ConfigMap
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			t.Fatal(err)
		}
		if object.Kind != "ConfigMap" {
			continue
		}
		if err := yaml.UnmarshalStrict([]byte(object.Data["config.conf"]), &config); err != nil {
			t.Error(err)
		}
		if want := "server: https://192.0.2.1:6443\n"; !strings.Contains(object.Data["kubeconfig.conf"], want) {
			t.Errorf("no %q in %s", want, object.Data["kubeconfig.conf"])
		}
	}
	if config.Mode != "nftables" || config.ClusterCIDR != PodCIDRs {
		t.Errorf("mode %q, clusterCIDR %q", config.Mode, config.ClusterCIDR)
	}
}
