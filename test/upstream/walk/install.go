package walk

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/test/upstream/cluster"
)

const (
	kubeadm   = "docs/guides/install-kubeadm.md"
	eks       = "docs/guides/install-eks.md"
	ack       = "docs/guides/install-ack.md"
	k3s       = "docs/guides/install-k3s.md"
	upgrade   = "docs/guides/upgrade.md"
	alerts    = "docs/guides/alerts.md"
	trouble   = "docs/guides/troubleshoot.md"
	installed = "kubectl --namespace kube-system rollout status daemonset/kube-ipvs --timeout 10m"
	uninstall = "helm uninstall kube-ipvs --namespace kube-system --wait"
)

// page returns the step of a block, with other text in place of what the page says.
func page(name, section string, index int, replace map[string]string) step {
	return step{page: name, section: section, index: index, set: replace, replace: true}
}

// helmList escapes commas, at which --set separates values.
func helmList(value string) string { return strings.ReplaceAll(value, ",", `\,`) }

// run returns a step of commands that are no block of a page: what a reader does before,
// or what a page says within its text.
func run(commands string) step { return step{commands: commands} }

// installation are the steps that install kube-ipvs in each way that the guides have, use
// what they show on it, and remove it.
func installation(values map[string]string) (steps []step) {
	server := strings.TrimPrefix(values["server"], "https://")
	cidr := values["cidr"]
	image := map[string]string{"registry.example/kube-ipvs": values["image"]}
	with := func(pairs ...string) map[string]string {
		out := maps.Clone(image)
		for i := 0; i < len(pairs); i += 2 {
			out[pairs[i]] = pairs[i+1]
		}
		return out
	}
	for _, part := range [][]step{
		{
			page(install, "Get the image", 1, map[string]string{"ctr": "onNode1 ctr", "kube-ipvs-image.tar": "/node/images/walk.tar"}),
			page(install, "Helm", 0, with("10.0.0.10:6443", server, "10.244.0.0/16", "'"+helmList(cidr)+"'")),
			run(installed),
			page(install, "Helm", 1, nil).checked(prints("Succeeded")),
			page(install, "Check that it works", 0, map[string]string{"NODE": "node1"}).checked(prints("OK       kernel")),
			page(install, "Check that it works", 1, with("NODE", "node2")).checked(prints("OK       kernel")),
		},
		operation(values),
		{
			page(install, "Kustomize", 0, with(
				"# kustomization.yaml", "cat > kustomization.yaml <<'END'",
				"[../kube-ipvs/deploy/base]", "[deploy/base]",
				"files: [config.yaml, kubeconfig.yaml]", "files: [config.yaml, kubeconfig.yaml]\nEND",
			)),
			run("for file in config kubeconfig; do sed -e 's|POD_CIDR|" + cidr + "|' -e 's|API_SERVER:6443|" + server + "|' deploy/base/$file.yaml >$file.yaml; done; kubectl apply -k ."),
			run(installed),
			run("kubectl delete -k . --wait"),
			page(install, "Plain manifest", 0, with("10.0.0.10:6443", server, "10.244.0.0/16", cidr)),
			run(installed),
			run("kubectl delete -f deploy/install.yaml --wait"),
		},
		platforms(values, server, cidr, with),
		{
			page(install, "Man pages and completion", 0, map[string]string{
				"/usr/local/share": "prefix/share", "/etc/": "prefix/", `zsh -c 'kube-ipvs completion zsh > "${fpath[1]}/_kube-ipvs"'`: "kube-ipvs completion zsh > _kube-ipvs",
			}),
			page(commands, "kubectl ipvs", 0, map[string]string{"/usr/local/bin": "$PWD"}),
		},
	} {
		steps = append(steps, part...)
	}
	return steps
}

// operation are the steps for a release that is installed: alerts, an upgrade and the way
// back. They end with its removal.
func operation(values map[string]string) []step {
	return []step{
		page(alerts, "Alerts", 0, map[string]string{"10.12.96.0/20": "172.30.0.0/24"}),
		run(installed),
		run("kubectl --namespace kube-system get podmonitors,prometheusrules,configmaps --selector app.kubernetes.io/name=kube-ipvs --output name").checked(
			prints("podmonitor.monitoring.coreos.com/", "prometheusrule.monitoring.coreos.com/", "dashboard")),
		page(alerts, "Alerts", 1, map[string]string{"NODE": "node2"}),
		run("kubectl --namespace kube-system exec $pod --container kube-ipvs -- kube-ipvs status").checked(prints("OK       kube-ipvs", "node2")),
		page(alerts, "KubeIPVSConflict", 0, nil),
		run("true # the commands within the text of " + alerts).checked(func(ctx context.Context, w *Walk, _ string) error {
			return w.followSpans(ctx, alerts)
		}),
		page(upgrade, "Upgrade, downgrade, and change the configuration", 0, map[string]string{"VERSION": "cluster"}),
		run(images).checked(prints(values["image"] + ":cluster")),
		page(upgrade, "Upgrade, downgrade, and change the configuration", 1, nil),
		run(installed),
		run(images).checked(prints(values["image"] + ":" + values["version"])),
		run(uninstall),
	}
}

// platforms are the steps of the platforms' guides. Where a guide names another address
// or range than the lab has, that is replaced.
func platforms(values map[string]string, server, cidr string, with func(...string) map[string]string) []step {
	hasCIDR := run("helm get values kube-ipvs --namespace kube-system").checked(prints("clusterCIDR: " + cidr))
	return []step{
		page(kubeadm, "Install on kubeadm", 1, with()),
		hasCIDR,
		run(uninstall),
		page(kubeadm, "Take over kube-proxy's configuration", 0, with()),
		run(installed),
		hasCIDR,
		run(uninstall),
		page(eks, "Install on EKS", 0, with()),
		run(uninstall),
		page(eks, "kube-proxy is an add-on", 0, nil),
		page(eks, "kube-proxy is an add-on", 1, nil),
		page(eks, "New nodes", 0, nil),
		page(ack, "Install on ACK (Alibaba Cloud)", 0, nil).checked(prints("eniip_virtual_type")),
		page(ack, "Install on ACK (Alibaba Cloud)", 1, with("API-SERVER-INTRANET-ADDRESS:6443", server)),
		run(uninstall),
		page(k3s, "Install on k3s", 1, with("SERVER:6443", server, "10.42.0.0/16", "'"+helmList(cidr)+"'")),
		run(uninstall),
	}
}

// notRun are the blocks of those pages that no walk runs, and why.
var notRun = map[string]string{
	readme + " Try it 0":                         "make demo and make test are what CI runs",
	readme + " Try it 1":                         "output",
	readme + " Try it 2":                         "output",
	readme + " Install 0":                        "needs a registry; the walk's image is made by make container-image",
	install + " Get the image 0":                 "the same",
	install + " kind 0":                          "a file for kind, which needs Docker",
	install + " Without a cluster 0":             "TestScenario2DirectlyAttachedPods and others run it",
	kubeadm + " Install on kubeadm 0":            "makes a cluster",
	k3s + " Install on k3s 0":                    "makes a cluster",
	k3s + " Migrate 0":                           "the walk's cluster is not of k3s",
	migrate + " If kube-proxy has an affinity 0": "TestBehaviourKubeProxyKeepsItsAffinity runs it",
	migrate + " If kube-proxy has an affinity 1": "the same",
	trouble + " Network managers 0":              "a file for systemd-networkd",
	trouble + " Network managers 1":              "a file for NetworkManager",
	commands + " trace 0":                        "TestBehaviourInside and pluginWorks run such commands, with addresses of theirs",
	commands + " preflight 0":                    "the migration guide's Pod runs it",
}

// stage prepares what the guides assume: a cluster without kube-proxy, with the objects
// that kubeadm and Terway leave, and with the kinds of the Prometheus operator. aws, the
// cloud's own program, is replaced by one that knows the commands of the page.
const stage = `
kubectl --namespace kube-system delete daemonset kube-proxy --wait
kubectl --namespace kube-system delete configmap kube-proxy
cat >kubeadm.conf <<END
apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: $pods
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
kind: KubeProxyConfiguration
metricsBindAddress: ""
mode: ""
nodePortAddresses: null
winkernel:
  enableDSR: false
END
kubectl --namespace kube-system create configmap kube-proxy --from-file config.conf=kubeadm.conf
kubectl --namespace kube-system create configmap kubeadm-config --from-literal ClusterConfiguration="networking:
  podSubnet: $pods"
kubectl --namespace kube-system create configmap eni-config --from-literal eni_conf='{"eniip_virtual_type": "Veth"}'
for kind in PodMonitor PrometheusRule; do
kubectl apply --filename - <<END
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: $(echo ${kind}s | tr A-Z a-z).monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: $kind, plural: $(echo ${kind}s | tr A-Z a-z), singular: $(echo $kind | tr A-Z a-z)}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
END
done
kubectl wait --for condition=Established crd/podmonitors.monitoring.coreos.com crd/prometheusrules.monitoring.coreos.com
cat >bin/aws <<'END'
#!/bin/bash
case "$*" in
"eks describe-cluster --name NAME --query cluster.endpoint --output text") kubectl config view --minify --output jsonpath='{.clusters[0].cluster.server}' ;;
"eks delete-addon --cluster-name NAME --addon-name kube-proxy --preserve") ;;
"eks update-nodegroup-config --cluster-name NAME --nodegroup-name GROUP --labels addOrUpdateLabels={kube-ipvs=active}") ;;
"eks create-addon --cluster-name NAME --addon-name kube-proxy --resolve-conflicts OVERWRITE") ;;
*) echo "aws: unknown command: $*" >&2; exit 2 ;;
esac
END
chmod +x bin/aws`

const images = "kubectl --namespace kube-system get pods --selector app.kubernetes.io/name=kube-ipvs --output jsonpath='{.items[*].spec.containers[*].image}'"

// RunInstallation runs the blocks of the installation guides on a cluster that kube-proxy
// serves, which it removes first. There are no clients.
func (w *Walk) RunInstallation(ctx context.Context) error {
	if err := w.prepare(); err != nil {
		return err
	}
	defer os.RemoveAll(w.dir)
	// A reader works in a checkout. Files that the commands write stay out of it.
	for _, name := range []string{"deploy", "docs"} {
		if err := os.Symlink(filepath.Join(w.Config.Source, name), filepath.Join(w.dir, name)); err != nil {
			return err
		}
	}
	w.work = w.dir
	values, err := w.values(ctx)
	if err != nil {
		return err
	}
	for _, s := range append([]step{run("pods=" + cluster.PodCIDRs + "\n" + w.nodeFunction() + stage)}, installation(values)...) {
		if err := w.take(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// span is a command of kubectl within the text of a page.
var span = regexp.MustCompile("(?s)`(kubectl [^`]*)`")

// spans returns the commands within the text of a page, without what reads their output.
// Whether there is a previous container depends on the cluster's past.
func spans(text string) (commands []string) {
	for _, match := range span.FindAllStringSubmatch(text, -1) {
		command, _, _ := strings.Cut(strings.Join(strings.Fields(match[1]), " "), " | ")
		if !strings.Contains(command, "--previous") {
			commands = append(commands, strings.ReplaceAll(command, "NODE", "node2"))
		}
	}
	return commands
}

// followSpans runs the commands within the text of a page, after the block that sets pod.
func (w *Walk) followSpans(ctx context.Context, page string) error {
	text, err := os.ReadFile(filepath.Join(w.Config.Source, page))
	if err != nil {
		return err
	}
	for _, command := range spans(string(text)) {
		if _, err := w.shell(ctx, command); err != nil {
			return err
		}
		w.Config.Log("%s: %s", page, command)
	}
	return nil
}

// nodeFunction defines a function of the shell that runs a command on the first node.
func (w *Walk) nodeFunction() string { return "onNode1() { " + w.ssh(1) + " \"$*\"; }\n" }
