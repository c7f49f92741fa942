package plugin

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// fakeCluster answers as kubectl does for a cluster of three nodes, with a pod of
// kube-ipvs on each and a client on node2.
type fakeCluster struct {
	mu    sync.Mutex
	calls []string
	// exec answers for a pod and a command.
	exec func(pod, command string, stdout io.Writer) int
	// frozen is a pod that does not answer, and broken one that kubectl cannot reach.
	frozen, broken string
	// nodes has the labels of nodes; forbidden reports that they may not be listed.
	nodes     map[string]map[string]string
	forbidden bool
}

func podOn(name, node, ip string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{PodIP: ip, Phase: corev1.PodRunning},
	}
}

func (f *fakeCluster) Run(ctx context.Context, stdout, stderr io.Writer, args ...string) (int, error) {
	call := strings.Join(args, " ")
	f.mu.Lock()
	f.calls = append(f.calls, call)
	f.mu.Unlock()
	answer := func(value any) (int, error) { return 0, json.NewEncoder(stdout).Encode(value) }
	switch {
	case call == "get -o json pods -n kube-system -l app.kubernetes.io/name=kube-ipvs":
		evicted := podOn("ki-0", "node1", "")
		evicted.Status.Phase = corev1.PodFailed
		return answer(corev1.PodList{Items: []corev1.Pod{evicted, podOn("ki-b", "node2", "10.0.0.2"), podOn("ki-a", "node1", "10.0.0.1"), podOn("ki-c", "node3", "10.0.0.3")}})
	case call == "get -o json pod -n default web-0", strings.HasSuffix(call, "status.podIP=10.244.2.7"):
		one := podOn("web-0", "node2", "10.244.2.7")
		one.Status.PodIPs = []corev1.PodIP{{IP: "10.244.2.7"}, {IP: "fd00:244:2::7"}}
		if strings.Contains(call, "-A") { // the address was another pod's before
			job := podOn("job-0", "node1", "10.244.2.7")
			job.Status.Phase = corev1.PodSucceeded
			return answer(corev1.PodList{Items: []corev1.Pod{job, one}})
		}
		return answer(one)
	case strings.HasPrefix(call, "get -o json nodes"):
		if f.forbidden {
			fmt.Fprintln(stderr, "Error from server (Forbidden): nodes is forbidden")
			return 1, nil
		}
		var list corev1.NodeList
		for name, labels := range f.nodes {
			list.Items = append(list.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}})
		}
		return answer(list)
	case call == "get -o json daemonsets -n kube-system -l app.kubernetes.io/name=kube-ipvs":
		var set appsv1.DaemonSet
		set.Spec.Template.Spec.NodeSelector = map[string]string{"kube-ipvs": "active"}
		return answer(appsv1.DaemonSetList{Items: []appsv1.DaemonSet{set}})
	case args[0] == "exec" && args[3] == f.frozen:
		<-ctx.Done()
		return 0, context.Cause(ctx)
	case args[0] == "exec" && args[3] == f.broken:
		fmt.Fprintln(stderr, "error: unable to upgrade connection: Forbidden")
		return 1, nil
	case args[0] == "exec":
		code := f.exec(args[3], strings.Join(args[slices.Index(args, "--")+2:], " "), stdout)
		if code != 0 {
			fmt.Fprintf(stderr, "command terminated with exit code %d\n", code)
		}
		return code, nil
	case args[0] == "logs", args[0] == "version", strings.HasPrefix(call, "get nodes"), strings.HasPrefix(call, "get pods -n"), strings.HasPrefix(call, "get daemonsets"), strings.HasPrefix(call, "get events"):
		fmt.Fprintln(stdout, "of", call, "https://admin:hunter2@10.0.0.10:6443")
		return 0, nil
	}
	fmt.Fprintln(stderr, "not found:", call)
	return 1, nil
}

func run(t *testing.T, f *fakeCluster, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, problems bytes.Buffer
	cmd := New(f)
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&problems)
	err = cmd.ExecuteContext(t.Context())
	return out.String(), problems.String(), err
}

// TestAllNodes shows nodes side by side: a healthy one, one with findings, and one that
// cannot be queried.
func TestAllNodes(t *testing.T) {
	f := &fakeCluster{exec: func(pod, command string, stdout io.Writer) int {
		answers := map[string]string{
			"ki-a status -o json": `[{"status":"OK","component":"kube-ipvs","what":"v1 ready"},{"status":"OK","component":"IPVS","what":"3 virtual servers"}]`,
			"ki-b status -o json": `[{"status":"error","component":"kube-ipvs","what":"not ready"},{"status":"OK","component":"IPVS","what":"3"}]`,
			"ki-a doctor -o json": `[{"severity":"OK","about":"kernel","what":"fine"},{"severity":"note","about":"IPVS","what":"foreign"}]`,
			"ki-b doctor -o json": `[{"severity":"warning","about":"eth1","what":"no address","fix":"mend it"}]`,
			"ki-a diff -o json":   `[]`,
			"ki-b diff -o json":   `[{"part":"ipvs","operation":"add","change":"add TCP 10.96.0.1:443"}]`,
		}
		text, ok := answers[pod+" "+command]
		if !ok {
			return 126
		}
		fmt.Fprintln(stdout, text)
		return map[bool]int{true: 1, false: 0}[pod == "ki-b"]
	}}
	for command, want := range map[string][]string{
		"status": {"node1 OK v1 ready; 3 virtual servers", "node2 error kube-ipvs: not ready", "node3 error kube-ipvs status exited with 126: command terminated with exit code 126"},
		"doctor": {"node1 OK 2 checks passed", "node2 warning eth1: no address (mend it)", "node3 error kube-ipvs doctor exited with 126: command terminated with exit code 126"},
		"diff":   {"node1 OK no difference", "node2 error ipvs: add TCP 10.96.0.1:443", "node3 error kube-ipvs diff exited with 126: command terminated with exit code 126"},
	} {
		out, progress, err := run(t, f, command)
		if !errors.Is(err, ErrFound) || !strings.Contains(progress, "3 of 3 nodes") {
			t.Errorf("%s: %v, %q", command, err, progress)
		}
		var lines []string
		for line := range strings.Lines(out) {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		if len(lines) != 4 || lines[1] != want[0] || lines[2] != want[1] || lines[3] != want[2] {
			t.Errorf("%s: %q, want %q", command, lines[1:], want)
		}
	}
	if out, _, err := run(t, f, "status", "--node", "node1", "-o", "json"); err != nil || !strings.Contains(out, `"node": "node1"`) || strings.Contains(out, "node2") {
		t.Errorf("%v, %s", err, out)
	}
	if _, _, err := run(t, f, "status", "--node", "node9"); err == nil || !strings.Contains(err.Error(), "on node node9") {
		t.Errorf("a node that is not there: %v", err)
	}
}

// TestTraceOnTheClientsNode selects the node by the pod's name or address, or by --node.
func TestTraceOnTheClientsNode(t *testing.T) {
	for _, c := range []struct {
		args       string
		pod, trace string
	}{
		{"trace --from default/web-0 --to svc/web", "ki-b", "trace --from 10.244.2.7 --to svc/web"},
		{"trace --from=default/web-0 --to svc/web -o svg", "ki-b", "trace --from=10.244.2.7 --to svc/web -o svg"},
		{"trace --from 10.244.2.7 --to 10.96.0.1:443", "ki-b", "trace --from 10.244.2.7 --to 10.96.0.1:443"},
		{"trace --from default/web-0 --to [fd00:96::1]:53/udp", "ki-b", "trace --from fd00:244:2::7 --to [fd00:96::1]:53/udp"},
		{"trace --from default/web-0 --to=10.96.0.1:443", "ki-b", "trace --from 10.244.2.7 --to=10.96.0.1:443"},
		{"trace --node node3 --from 198.51.100.1 --in eth1 --to 10.0.0.3:30080", "ki-c", "trace --from 198.51.100.1 --in eth1 --to 10.0.0.3:30080"},
		{"get endpoints -o wide --node=node1", "ki-a", "get endpoints -o wide"},
	} {
		var ran []string
		f := &fakeCluster{exec: func(pod, command string, stdout io.Writer) int {
			ran = append(ran, pod+": "+command)
			return 0
		}}
		if _, _, err := run(t, f, strings.Fields(c.args)...); err != nil || !slices.Equal(ran, []string{c.pod + ": " + c.trace}) {
			t.Errorf("%s: %v, ran %q", c.args, err, ran)
		}
	}
	for args, want := range map[string]string{
		"trace --to 10.96.0.1:443":                      "--from is required",
		"trace --from 203.0.113.1 --to 10.96.0.1:443":   "kubectl get pods",
		"get endpoints":                                 "choose one with --node",
		"trace --from default/other --to 10.96.0.1:443": "not found",
		"get endpoints --node":                          "flag needs an argument",
	} {
		f := &fakeCluster{exec: func(string, string, io.Writer) int { return 0 }}
		if _, _, err := run(t, f, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}

// TestExitCodes: the plugin's exit code is the command's on the node.
func TestExitCodes(t *testing.T) {
	for code, want := range map[int]string{0: "<nil>", 1: ErrFound.Error(), 2: "on node node1: kube-ipvs get exited with 2"} {
		f := &fakeCluster{exec: func(string, string, io.Writer) int { return code }}
		if _, _, err := run(t, f, "get", "sets", "--node", "node1"); fmt.Sprint(err) != want {
			t.Errorf("%d: %v, want %s", code, err, want)
		}
	}
}

// TestFailureOfKubectl: an exit code of kubectl itself does not say that a problem was found.
func TestFailureOfKubectl(t *testing.T) {
	f := &fakeCluster{broken: "ki-a", exec: func(string, string, io.Writer) int { return 0 }}
	_, stderr, err := run(t, f, "get", "sets", "--node", "node1")
	if err == nil || errors.Is(err, ErrFound) || !strings.Contains(err.Error(), "on node node1: kubectl exec exited with 1") || !strings.Contains(stderr, "Forbidden") {
		t.Errorf("%v, %q", err, stderr)
	}
	if out, _, _ := run(t, f, "doctor", "--node", "node1"); !strings.Contains(out, "kubectl exec exited with 1: error: unable to upgrade connection: Forbidden") {
		t.Error(out)
	}
}

// TestFrozenNode: a node that does not answer is an error, and does not keep the others from
// being shown.
func TestFrozenNode(t *testing.T) {
	f := &fakeCluster{frozen: "ki-b", exec: func(_, _ string, stdout io.Writer) int {
		fmt.Fprint(stdout, "[]")
		return 0
	}}
	out, _, err := run(t, f, "diff", "--timeout", "0.1s")
	if !errors.Is(err, ErrFound) || !strings.Contains(out, "no answer within 0.1s") || strings.Count(out, "no difference") != 2 {
		t.Errorf("%v\n%s", err, out)
	}
	for command, want := range map[string]string{"status": "1m0s", "sysdump": "5m0s"} {
		cmd, _, err := New(f).Find([]string{command})
		if err != nil || cmd.Flag("timeout").DefValue != want {
			t.Errorf("%s: %v, the limit is %s, want %s", command, err, cmd.Flag("timeout").DefValue, want)
		}
	}
}

// TestKubectlIsKilled: neither kubectl, nor a program that it started, is waited for when the
// limit is reached.
func TestKubectlIsKilled(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "kubectl"), []byte("#!/bin/sh\nsleep 60 &\nwait\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	late := errors.New("late")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, late)
	defer cancel()
	began := time.Now()
	var out bytes.Buffer
	if _, err := (program{}).Run(ctx, &out, &out, "exec"); !errors.Is(err, late) || time.Since(began) > 30*time.Second {
		t.Errorf("%v after %s", err, time.Since(began))
	}
}

// TestNodesWithoutPods names nodes that the DaemonSet selects and that have no pod.
func TestNodesWithoutPods(t *testing.T) {
	active := map[string]string{"kube-ipvs": "active"}
	f := &fakeCluster{
		exec: func(_, _ string, stdout io.Writer) int {
			fmt.Fprint(stdout, "[]")
			return 0
		},
		nodes: map[string]map[string]string{"node1": active, "node2": active, "node4": active, "node5": nil},
	}
	stderrOf := func(args ...string) string {
		_, stderr, err := run(t, f, args...)
		if err != nil {
			t.Errorf("%q: %v", args, err)
		}
		return stderr
	}
	if got := stderrOf("diff"); !strings.Contains(got, "1 node has no pod of kube-ipvs: node4\n") {
		t.Error(got)
	}
	for i := range 11 {
		f.nodes[fmt.Sprintf("other%02d", i)] = active
	}
	if got := stderrOf("diff"); !strings.Contains(got, "12 nodes have no pod of kube-ipvs: node4, other00, other01") || !strings.Contains(got, "other08, …\n") {
		t.Error(got)
	}
	if got := stderrOf("diff", "--node", "node1"); strings.Contains(got, "no pod") {
		t.Error(got)
	}
	f.forbidden = true
	if got := stderrOf("diff"); !strings.Contains(got, "nodes without a pod of kube-ipvs are not named") || !strings.Contains(got, "Forbidden") {
		t.Error(got)
	}
}

// TestHelp: help does not need a cluster, also that of commands that pass on their flags.
func TestHelp(t *testing.T) {
	for _, command := range []string{"status", "doctor", "diff", "trace", "get", "connectivity", "preflight", "sysdump"} {
		for _, flag := range []string{"--help", "-h"} {
			f := &fakeCluster{}
			out, _, err := run(t, f, command, flag)
			if err != nil || !strings.Contains(out, "Usage:") || len(f.calls) > 0 {
				t.Errorf("%s %s: %v, %q, and called kubectl %q", command, flag, err, out, f.calls)
			}
		}
	}
}

// TestPreflightWithoutPod names the Pod for nodes that kube-proxy serves.
func TestPreflightWithoutPod(t *testing.T) {
	f := &fakeCluster{}
	if _, _, err := run(t, f, "preflight", "--node", "node9"); err == nil || !strings.Contains(err.Error(), "deploy/preflight.yaml") {
		t.Error(err)
	}
	if _, _, err := run(t, f, "get", "--node", "node9"); err == nil || strings.Contains(err.Error(), "preflight") {
		t.Error(err)
	}
}

// TestSysdump collects from all nodes, and reports what it could not collect from one.
func TestSysdump(t *testing.T) {
	f := &fakeCluster{exec: func(pod, command string, stdout io.Writer) int {
		if pod == "ki-c" {
			return 1
		}
		fmt.Fprint(stdout, "archive of ", pod)
		return 0
	}}
	name := filepath.Join(t.TempDir(), "dump.tar.gz")
	if _, _, err := run(t, f, "sysdump", "-o", name); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	z, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(r)
		files[h.Name] = string(text)
	}
	for file, part := range map[string]string{
		"dump/node1/node.tar.gz": "archive of ki-a", "dump/node2/log.txt": "of logs", "dump/node3/error.txt": "sysdump exited with 1", "dump/pods.txt": "of get pods",
	} {
		if !strings.Contains(files[file], part) {
			t.Errorf("%s is %q, want %q", file, files[file], part)
		}
	}
	for file, text := range files {
		if strings.Contains(text, "hunter2") {
			t.Errorf("%s has a password: %s", file, text)
		}
	}
	for _, call := range f.calls {
		if strings.Contains(call, "-o yaml") {
			t.Errorf("%s would show the environment", call)
		}
	}
	if events := "get events.events.k8s.io -A --field-selector reportingController=kube-ipvs.io/kube-ipvs"; !slices.Contains(f.calls, events) {
		t.Errorf("the Events of kube-ipvs are not read: %q", f.calls)
	}
}
