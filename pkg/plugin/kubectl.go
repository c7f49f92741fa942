// Package plugin implements the kubectl plugin: it finds the pods of kube-ipvs, runs
// commands in them, and shows nodes side by side. It accesses the cluster only through
// kubectl, with the user's permissions.
package plugin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Kubectl runs kubectl. It may be called concurrently.
type Kubectl interface {
	// Run returns the program's exit code. It returns an error only if kubectl could not
	// be run, or not to its end before ctx was done.
	Run(ctx context.Context, stdout, stderr io.Writer, args ...string) (code int, err error)
}

// program is the kubectl in the PATH, with the flags of all calls.
type program struct{ flags []string }

func (p program) Run(ctx context.Context, stdout, stderr io.Writer, args ...string) (int, error) {
	c := exec.CommandContext(ctx, "kubectl", append(slices.Clone(p.flags), args...)...)
	c.Stdout, c.Stderr = stdout, stderr
	c.WaitDelay = waitDelay
	err := c.Run()
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		return ended.ExitCode(), nil
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		return 0, nil // kubectl itself has succeeded
	}
	return 0, err
}

// waitDelay limits the wait for a program that kubectl has started, such as one for
// credentials, after kubectl was killed.
const waitDelay = 2 * time.Second

// cluster is the cluster in which kube-ipvs runs.
type cluster struct {
	kubectl                        Kubectl
	namespace, selector, container string
}

var errNoPod = errors.New("no pod of kube-ipvs")

// pod is a pod of kube-ipvs.
type pod struct{ name, node, phase string }

// list reads objects as JSON.
func (c *cluster) list(ctx context.Context, into any, args ...string) error {
	var out, problems bytes.Buffer
	code, err := c.kubectl.Run(ctx, &out, &problems, append([]string{"get", "-o", "json"}, args...)...)
	if err != nil {
		return fmt.Errorf("kubectl: %w", err)
	}
	if code != 0 {
		return fmt.Errorf("kubectl get %s: %s", strings.Join(args, " "), strings.TrimSpace(problems.String()))
	}
	return json.Unmarshal(out.Bytes(), into)
}

// pods returns the pods of kube-ipvs on the given nodes, or on all if there are none,
// sorted by node.
func (c *cluster) pods(ctx context.Context, nodes []string) ([]pod, error) {
	var list corev1.PodList
	if err := c.list(ctx, &list, "pods", "-n", c.namespace, "-l", c.selector); err != nil {
		return nil, err
	}
	var out []pod
	for i := range list.Items {
		p := &list.Items[i]
		if p.DeletionTimestamp == nil && (len(nodes) == 0 || slices.Contains(nodes, p.Spec.NodeName)) {
			out = append(out, pod{p.Name, p.Spec.NodeName, string(p.Status.Phase)})
		}
	}
	out = withoutFinished(out)
	slices.SortFunc(out, func(a, b pod) int { return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.name, b.name)) })
	for _, node := range nodes {
		if !slices.ContainsFunc(out, func(p pod) bool { return p.node == node }) {
			return nil, fmt.Errorf("%w (-n %s -l %s) on node %s", errNoPod, c.namespace, c.selector, node)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w (-n %s -l %s)", errNoPod, c.namespace, c.selector)
	}
	return out, nil
}

// runsDaemonSets selects nodes that may run kube-ipvs: those with Linux and a kubelet.
const runsDaemonSets = "kubernetes.io/os=linux,eks.amazonaws.com/compute-type notin (fargate,auto),type!=virtual-kubelet"

// daemonSets is a list of DaemonSets, as far as it is needed here: the package k8s.io/api/apps/v1
// would make the program, which nodes run too, larger.
type daemonSets struct {
	Items []daemonSet `json:"items"`
}

type daemonSet struct {
	Spec struct {
		Template struct {
			Spec struct {
				NodeSelector map[string]string `json:"nodeSelector"`
			} `json:"spec"`
		} `json:"template"`
	} `json:"spec"`
}

// without returns the names of nodes that have none of the pods although a DaemonSet of
// kube-ipvs selects them. The DaemonSet's affinity is not evaluated.
func (c *cluster) without(ctx context.Context, pods []pod) ([]string, error) {
	var sets daemonSets
	if err := c.list(ctx, &sets, "daemonsets", "-n", c.namespace, "-l", c.selector); err != nil {
		return nil, err
	}
	var nodes corev1.NodeList
	if err := c.list(ctx, &nodes, "nodes", "-l", runsDaemonSets); err != nil {
		return nil, err
	}
	has := map[string]bool{}
	for _, p := range pods {
		has[p.node] = true
	}
	var out []string
	for _, node := range nodes.Items {
		selects := func(s daemonSet) bool {
			return labels.SelectorFromSet(s.Spec.Template.Spec.NodeSelector).Matches(labels.Set(node.Labels))
		}
		if !has[node.Name] && slices.ContainsFunc(sets.Items, selects) {
			out = append(out, node.Name)
		}
	}
	slices.Sort(out)
	return out, nil
}

// withoutFinished drops pods that have ended, such as evicted ones, if another pod has taken
// their place.
func withoutFinished(pods []pod) []pod {
	current := map[string]bool{}
	for _, p := range pods {
		current[p.node] = current[p.node] || !finished(p.phase)
	}
	return slices.DeleteFunc(pods, func(p pod) bool { return finished(p.phase) && current[p.node] })
}

func finished(phase string) bool {
	return phase == string(corev1.PodFailed) || phase == string(corev1.PodSucceeded)
}

// exec runs a command of kube-ipvs in a pod, and returns its exit code. It returns an error if
// kubectl itself failed, which has the exit code 1, too.
func (c *cluster) exec(ctx context.Context, stdout, stderr io.Writer, p pod, args ...string) (int, error) {
	call := append([]string{"exec", "-n", c.namespace, p.name, "-c", c.container, "--", "kube-ipvs"}, args...)
	var last tail
	code, err := c.kubectl.Run(ctx, stdout, io.MultiWriter(stderr, &last), call...)
	if err == nil && code != 0 && !strings.HasSuffix(strings.TrimSpace(string(last)), fmt.Sprintf("command terminated with exit code %d", code)) {
		err = fmt.Errorf("kubectl exec exited with %d", code)
	}
	return code, err
}

// tail keeps the end of what is written to it.
type tail []byte

func (t *tail) Write(text []byte) (int, error) {
	const limit = 200
	*t = append(*t, text...)
	*t = (*t)[max(len(*t)-limit, 0):]
	return len(text), nil
}

// of returns the pod of kube-ipvs on the node of a client, which is an address or a pod
// as NAMESPACE/NAME, and the client's address for trace: of the family of the server, if that
// is an address too.
func (c *cluster) of(ctx context.Context, client, server string) (p pod, address string, err error) {
	var clients []corev1.Pod
	if namespace, name, ok := strings.Cut(client, "/"); ok {
		var one corev1.Pod
		if err := c.list(ctx, &one, "pod", "-n", namespace, name); err != nil {
			return pod{}, "", err
		}
		clients = []corev1.Pod{one}
	} else {
		var list corev1.PodList
		if err := c.list(ctx, &list, "pods", "-A", "--field-selector", "status.podIP="+client); err != nil {
			return pod{}, "", err
		}
		clients = list.Items
	}
	i := slices.IndexFunc(clients, func(p corev1.Pod) bool {
		return p.Spec.NodeName != "" && p.Status.PodIP != "" && !finished(string(p.Status.Phase))
	})
	if i < 0 {
		return pod{}, "", fmt.Errorf("pod %s not found on any node: name the node with --node", client)
	}
	pods, err := c.pods(ctx, []string{clients[i].Spec.NodeName})
	if err != nil {
		return pod{}, "", err
	}
	return pods[0], addressOf(&clients[i], server), nil
}

// addressOf returns a pod's address of the family of server, which is ADDRESS:PORT/PROTOCOL, or
// else its first one.
func addressOf(p *corev1.Pod, server string) string {
	server, _, _ = strings.Cut(server, "/")
	if to, err := netip.ParseAddrPort(server); err == nil {
		for _, have := range p.Status.PodIPs {
			if a, err := netip.ParseAddr(have.IP); err == nil && a.Is4() == to.Addr().Is4() {
				return have.IP
			}
		}
	}
	return p.Status.PodIP
}
