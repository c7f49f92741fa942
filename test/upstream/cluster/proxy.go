package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// Proxies are the programs that can serve the cluster's Services, by their names for
// -proxy.
var Proxies = []string{"kube-ipvs", "kube-proxy-ipvs", "kube-proxy-nftables", "kube-proxy-iptables"}

// proxyImage is the image of a proxy, by its short name.
func proxyImage(proxy string) string {
	image, _, _ := strings.Cut(strings.Replace(proxy, "kube-proxy-", "kube-proxy:", 1), ":")
	return image
}

// imageTag is not "latest", which the kubelet would pull. The Makefile has it, too.
const imageTag = "cluster"

// The label by which upstream's tests find the proxy that they restart.
const overlayFormat = `apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [%s]
images: [{name: ghcr.io/kube-ipvs/kube-ipvs, newTag: ` + imageTag + `}]
patches:
  - target: {kind: ConfigMap, name: kube-ipvs}
    path: config.yaml
  - target: {kind: DaemonSet, name: kube-ipvs}
    patch: |
      - {op: add, path: /spec/template/metadata/labels/k8s-app, value: kube-proxy}
`

const configFormat = `apiVersion: v1
kind: ConfigMap
metadata: {name: kube-ipvs}
data:
  config.yaml: |
    apiVersion: kubeproxy.config.k8s.io/v1alpha1
    kind: KubeProxyConfiguration
    mode: ipvs
    clusterCIDR: %s
    metricsBindAddress: 127.0.0.1:10249
    clientConnection:
      kubeconfig: /var/lib/kube-ipvs/kubeconfig.yaml
    ---
    apiVersion: kube-ipvs.io/v1alpha1
    kind: KubeIPVSConfiguration
  kubeconfig.yaml: |
    apiVersion: v1
    kind: Config
    clusters:
      - name: default
        cluster:
          certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
          server: %s
    contexts:
      - name: default
        context: {cluster: default, namespace: default, user: default}
    current-context: default
    users:
      - name: default
        user:
          tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
`

// deployKubeIPVS applies deploy/base as users do: with an overlay that sets the image,
// the pod CIDRs and the API server.
func (s *supervisor) deployKubeIPVS(ctx context.Context) error {
	overlay := filepath.Join(s.dir, "overlay")
	base, err := filepath.Rel(overlay, filepath.Join(s.config.Source, "deploy/base"))
	if err != nil {
		return err
	}
	if err := write(overlay, "kustomization.yaml", fmt.Appendf(nil, overlayFormat, base), 0o644); err != nil {
		return err
	}
	config := fmt.Appendf(nil, configFormat, PodCIDRs, s.server.URL())
	if err := write(overlay, "config.yaml", config, 0o644); err != nil {
		return err
	}
	return s.kubectl(ctx, nil, "apply", "-k", overlay)
}

// deployProxy applies the DaemonSet of the cluster's proxy.
func (s *supervisor) deployProxy(ctx context.Context) error {
	mode, isPeer := strings.CutPrefix(s.config.Served.Proxy, "kube-proxy-")
	if !isPeer {
		return s.deployKubeIPVS(ctx)
	}
	return s.kubectl(ctx, []byte(peerManifest(mode, s.server.URL())), "apply", "-f", "-")
}

// peerManifest returns the manifest of kube-proxy in a mode.
func peerManifest(mode, server string) string {
	return strings.NewReplacer("@MODE@", mode, "@CIDR@", PodCIDRs, "@SERVER@", server).Replace(kubeProxyManifest)
}

// PeerBuild identifies a version of kube-proxy together with its deployment, which
// affects verdicts as much as the program does.
func PeerBuild(version string) (string, error) {
	manifest, err := digest(nil, kubeProxyManifest)
	return version + "-" + manifest, err
}

// proxyArchive returns the image of the cluster's proxy.
func (c *Config) proxyArchive(ctx context.Context) (string, error) {
	switch {
	case !slices.Contains(Proxies, c.Served.Proxy):
		return "", fmt.Errorf("unknown proxy %q: not one of %s", c.Served.Proxy, strings.Join(Proxies, ", "))
	case c.Served.Proxy == Proxies[0]:
		return c.Image, nil
	}
	return kubeProxy(c.peers()).build(ctx, c.images(), "localhost/kube-proxy:"+imageTag)
}
