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

	corev1 "k8s.io/api/core/v1"
)

// Kubectl runs kubectl. It may be called concurrently.
type Kubectl interface {
	// Run returns the program's exit code. It returns an error only if kubectl could
	// not be run.
	Run(ctx context.Context, stdout, stderr io.Writer, args ...string) (code int, err error)
}

// program is the kubectl in the PATH, with the flags of all calls.
type program struct{ flags []string }

func (p program) Run(ctx context.Context, stdout, stderr io.Writer, args ...string) (int, error) {
	c := exec.CommandContext(ctx, "kubectl", append(slices.Clone(p.flags), args...)...)
	c.Stdout, c.Stderr = stdout, stderr
	err := c.Run()
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		return ended.ExitCode(), nil
	}
	return 0, err
}

// cluster is the cluster in which kube-ipvs runs.
type cluster struct {
	kubectl                        Kubectl
	namespace, selector, container string
}

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
			return nil, fmt.Errorf("no pod of kube-ipvs (-n %s -l %s) on node %s", c.namespace, c.selector, node)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no pod of kube-ipvs (-n %s -l %s)", c.namespace, c.selector)
	}
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

// exec runs a command of kube-ipvs in a pod.
func (c *cluster) exec(ctx context.Context, stdout, stderr io.Writer, p pod, args ...string) (int, error) {
	call := append([]string{"exec", "-n", c.namespace, p.name, "-c", c.container, "--", "kube-ipvs"}, args...)
	return c.kubectl.Run(ctx, stdout, stderr, call...)
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
