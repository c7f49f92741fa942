//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// TestReliabilityContainer runs the image's root file system as the DaemonSet does:
// read-only, with its mounts, arguments, capabilities and the default seccomp profile of
// container runtimes. The privileged init container sets kernel parameters. Each
// capability of the main container is needed, and its absence is reported. The cleanup
// leaves nothing.
func TestReliabilityContainer(t *testing.T) {
	record := reliability.Begin(t, reliability.Security, "container")
	c := newCluster(t)
	svc := newExposed("web", 1)
	for _, slice := range dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)) {
		for i := range slice.Endpoints {
			slice.Endpoints[i].TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: c.api.namespace, Name: fmt.Sprintf("web-%d", i+1)}
		}
		c.api.addSlice(slice)
	}
	c.api.addService(svc)
	d := deploy(t, c.Nodes[0])
	if code, output := d.run(d.pod.InitContainers[0]); code != 0 {
		t.Fatalf("the init container ended with %d:\n%s", code, output)
	}
	main := d.pod.Containers[0]
	for _, missing := range main.SecurityContext.Capabilities.Add {
		t.Run("without "+string(missing), func(t *testing.T) { d.checkWithout(t, missing) })
	}
	p := d.start(main)
	d.checkConfined(t, p)
	asked := 0
	for _, ask := range []struct {
		from    *lab.Namespace
		address string
	}{
		{c.Client, at(balancerIPs(1)[0], 80)}, {c.Client, at(balancerIPs(1)[1], 80)}, {c.Client, at(d.node.IPv6.String(), 30001)},
		{c.caller1.Namespace, at(clusterIPs(1)[0], 80)}, {d.node.Namespace, at(clusterIPs(1)[1], 80)}, {d.node.Namespace, "127.0.0.1:30001"},
	} {
		for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
			asked++
			limit := lab.DialTimeout
			if strings.HasPrefix(ask.address, "127.") { // its rules are written once the first packet needs them
				limit = stallLimit
			}
			if answer := ask.from.DialWithin(limit, protocol, ask.address); answer.Err != nil {
				t.Errorf("%s from %s to %s: %s", protocol, ask.from.Name, ask.address, answer)
			}
		}
	}
	if out := d.node.Exec("curl", "-s", "http://127.0.0.1:10249/metrics"); strings.Contains(out, "\nkube_ipvs_kernel_errors_total") {
		t.Errorf("something was refused:\n%s", out)
	}
	d.checkCommands(t, c.api.namespace, c.web1.Addresses[0].String())
	d.checkSysctls(t)
	p.Terminate()
	d.cleanUp(t)
	record(
		reliability.Figure{Name: "capabilities of the container", Value: float64(len(main.SecurityContext.Capabilities.Add)), Shows: "no others, and a read-only root file system"},
		reliability.Figure{Name: "of these, removed, one at a time", Value: float64(len(main.SecurityContext.Capabilities.Add)), Shows: "each time the process exited with an error that names it"},
		reliability.Figure{Name: "operations that the kernel refused", Value: 0},
		reliability.Figure{Name: "connections to a Service", Value: float64(asked), Shows: "all answered"},
	)
}

// deployment is the DaemonSet's Pod on a node.
type deployment struct {
	node  *lab.BridgeNode
	pod   corev1.PodSpec
	root  string
	image lab.ImageConfig
	files map[string]string // of the host: where a volume is
}

// deploy prepares the files that a kubelet prepares before it starts containers.
func deploy(t *testing.T, node *lab.BridgeNode) *deployment {
	t.Helper()
	d := &deployment{node: node, pod: daemonSet(t).Spec.Template.Spec, root: t.TempDir(), files: map[string]string{}}
	d.image = lab.UnpackImage(t, d.root)
	for _, v := range d.pod.Volumes {
		switch {
		case v.ConfigMap != nil:
			d.files[v.Name] = configFolder(t)
		case v.HostPath.Type == nil, *v.HostPath.Type == corev1.HostPathDirectory:
			d.files[v.Name] = v.HostPath.Path
		case *v.HostPath.Type == corev1.HostPathDirectoryOrCreate:
			node.HostFolder(v.HostPath.Path)
			d.files[v.Name] = v.HostPath.Path
		case *v.HostPath.Type == corev1.HostPathFileOrCreate:
			node.HostFile(v.HostPath.Path)
			d.files[v.Name] = v.HostPath.Path
		}
	}
	return d
}

func sourceFile(t testing.TB, path ...string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(append([]string{os.Getenv("LAB_SRC")}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func daemonSet(t *testing.T) (out appsv1.DaemonSet) {
	t.Helper()
	if err := yaml.UnmarshalStrict(sourceFile(t, "deploy/base/daemonset.yaml"), &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// configFolder returns a folder with the content of the base's ConfigMap, with this
// cluster's pod CIDR and API server.
func configFolder(t *testing.T) string {
	t.Helper()
	const unset = "POD_CIDR"
	base := string(sourceFile(t, "deploy/base/config.yaml"))
	if !strings.Contains(base, unset) {
		t.Fatalf("%s is not in the base's config.yaml", unset)
	}
	kubeconfig, err := os.ReadFile(lab.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{
		"config.yaml":     strings.Replace(base, unset, podCIDRs, 1),
		"kubeconfig.yaml": string(kubeconfig),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// numbers maps the capabilities that a manifest may name.
var numbers = map[corev1.Capability]int{"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW, "SYS_MODULE": unix.CAP_SYS_MODULE, "SYS_RESOURCE": unix.CAP_SYS_RESOURCE}

func (d *deployment) container(c corev1.Container) lab.Container {
	out := lab.Container{Root: d.root, Env: d.image.Env}
	for _, m := range c.VolumeMounts {
		out.Mounts = append(out.Mounts, lab.Mount{Host: d.files[m.Name], Path: m.MountPath, ReadOnly: m.ReadOnly})
	}
	security := c.SecurityContext
	out.Privileged = security.Privileged != nil && *security.Privileged
	if security.Capabilities != nil {
		for _, name := range security.Capabilities.Add {
			out.Capabilities = append(out.Capabilities, numbers[name])
		}
	}
	if p := security.SeccompProfile; p != nil && p.Type == corev1.SeccompProfileTypeRuntimeDefault {
		out.SystemCalls = lab.Peer("seccomp")
	}
	return out
}

// command returns the image's entry point with a container's arguments.
func (d *deployment) command(c corev1.Container, more ...string) (program string, args []string) {
	words := slices.Clone(d.image.Entrypoint)
	for _, a := range append(slices.Clone(c.Args), more...) {
		words = append(words, strings.ReplaceAll(a, "$(NODE_NAME)", d.node.Name))
	}
	return words[0], words[1:]
}

func (d *deployment) run(c corev1.Container, more ...string) (int, string) {
	program, args := d.command(c, more...)
	return d.node.RunContainer(d.container(c), program, args...)
}

func (d *deployment) start(c corev1.Container) *lab.Process {
	program, args := d.command(c)
	return d.node.StartContainer(d.container(c), func(*lab.Process) error { return hasPassed(d.node.Node) }, program, args...)
}

// checkWithout checks that the process exits without a capability and names it.
func (d *deployment) checkWithout(t *testing.T, missing corev1.Capability) {
	c := *d.pod.Containers[0].DeepCopy()
	add := &c.SecurityContext.Capabilities.Add
	*add = slices.DeleteFunc(*add, func(has corev1.Capability) bool { return has == missing })
	want := "check that the process has CAP_" + string(missing)
	if code, output := d.run(c, "--once"); code == 0 || !strings.Contains(output, want) {
		t.Errorf("ended with %d, want a message with %q:\n%s", code, want, output)
	}
}

// checkSysctls checks that the process sets parameters, although /proc/sys is read-only in its
// container.
func (d *deployment) checkSysctls(t *testing.T) {
	t.Helper()
	if got := d.node.ReadSysctl("net.ipv4.vs.snat_reroute"); got != "0" {
		t.Errorf("snat_reroute is %s, so replies are routed twice", got)
	}
	const forward = "net.ipv4.ip_forward"
	d.node.Exec("sysctl", "-qw", forward+"=0")
	lab.Eventually(t, 2*stallLimit, forward+" is set again", func() error {
		if got := d.node.ReadSysctl(forward); got != "1" {
			return fmt.Errorf("it is %s", got)
		}
		return nil
	})
}

// checkCommands runs commands as "kubectl exec" does, beside the proxy. They use its
// kubeconfig, find the pods' names without permission to read pods, and print only their
// results. If the API server does not answer, they work without names.
func (d *deployment) checkCommands(t *testing.T, namespace, web1 string) {
	t.Helper()
	for _, c := range []struct {
		args  []string
		shows []string
	}{
		{[]string{"status"}, []string{"OK ", "ready", "by the configuration of process"}},
		{[]string{"doctor"}, []string{"OK       kube-ipvs", "OK       Services"}},
		{[]string{"get", "endpoints", "-o", "wide"}, []string{namespace + "/web:tcp ", web1, namespace + "/web-1"}},
		{[]string{"trace", "--from", namespace + "/web-1", "--to", "svc/" + namespace + "/web:tcp"}, []string{"Service            " + namespace + "/web:tcp", "pod " + namespace + "/web-2"}},
		{[]string{"diff"}, []string{"no difference"}},
		{[]string{"connectivity", "test", "--service", namespace + "/web"}, []string{"2 answered, 0 failed"}},
		{[]string{"preflight"}, []string{"OK       plan"}},
		{[]string{"get", "virtualservers", "--kubeconfig", "/var/lib/kube-ipvs/none.yaml"}, []string{clusterIPs(1)[0], "Showing addresses instead of names"}},
	} {
		container := *d.pod.Containers[0].DeepCopy()
		container.Args = c.args
		code, output := d.run(container)
		t.Logf("%q:\n%s", c.args, output)
		// A pod may fail to reach itself, with exit code 1.
		if code > 1 || code == 1 && c.args[0] != "trace" || strings.Contains(output, "reflector") {
			t.Errorf("%q ended with %d:\n%s", c.args, code, output)
		}
		for _, part := range c.shows {
			if !strings.Contains(output, part) {
				t.Errorf("%q: %q is not in\n%s", c.args, part, output)
			}
		}
	}
}

// cleanUp does what deploy/cleanup.yaml does, whose volumes are some of the
// DaemonSet's.
func (d *deployment) cleanUp(t *testing.T) {
	t.Helper()
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict(sourceFile(t, "deploy/cleanup.yaml"), &pod); err != nil {
		t.Fatal(err)
	}
	for _, v := range pod.Spec.Volumes {
		if !slices.ContainsFunc(d.pod.Volumes, func(has corev1.Volume) bool { return reflect.DeepEqual(has, v) }) {
			t.Errorf("the volume %s is not the DaemonSet's", v.Name)
		}
	}
	if code, output := d.run(pod.Spec.Containers[0]); code != 0 {
		t.Errorf("cleaning up ended with %d:\n%s", code, output)
	}
	hasNothingOfOurs(t, d.node)
	if rules := kernelState(d.node.Node); strings.Contains(rules, "KUBE-") || d.node.ReadSysctl("net.ipv4.vs.conntrack") != "0" {
		t.Errorf("the node has changed:\n%s", rules)
	}
}

// checkConfined checks the capabilities and restrictions of the process.
func (d *deployment) checkConfined(t *testing.T, p *lab.Process) {
	t.Helper()
	var want uint64
	for _, c := range d.container(d.pod.Containers[0]).Capabilities {
		want |= 1 << c
	}
	proc := filepath.Join("/proc", fmt.Sprint(p.PID()))
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		t.Fatal(err)
	}
	has := fmt.Sprintf("%016x", want)
	for _, set := range [][2]string{{"CapPrm", has}, {"CapEff", has}, {"CapBnd", has}, {"NoNewPrivs", "1"}, {"Seccomp", "2"}} { // 2: by a filter
		if line := "\n" + set[0] + ":\t" + set[1] + "\n"; !strings.Contains(string(status), line) {
			t.Errorf("%q is not in\n%s", line, status)
		}
	}
	if err := os.WriteFile(filepath.Join(proc, "root/written"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing to the root file system: %v, want it read-only", err)
	}
}
