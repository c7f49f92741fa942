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
}

func podOn(name, node, ip string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{PodIP: ip, Phase: corev1.PodRunning},
	}
}

func (f *fakeCluster) Run(_ context.Context, stdout, stderr io.Writer, args ...string) (int, error) {
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
	case args[0] == "exec":
		return f.exec(args[3], strings.Join(args[slices.Index(args, "--")+2:], " "), stdout), nil
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
		"status": {"node1 OK v1 ready; 3 virtual servers", "node2 error kube-ipvs: not ready", "node3 error kube-ipvs status exited with 126:"},
		"doctor": {"node1 OK 2 checks passed", "node2 warning eth1: no address (mend it)", "node3 error kube-ipvs doctor exited with 126:"},
		"diff":   {"node1 OK no difference", "node2 error ipvs: add TCP 10.96.0.1:443", "node3 error kube-ipvs diff exited with 126:"},
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
