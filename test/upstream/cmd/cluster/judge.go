package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/upstream/cluster"
	"github.com/kube-ipvs/kube-ipvs/test/upstream/judge"
)

// applicable are the specs of the SIG that owns Services, except those that do not test
// Services (DNS, Ingress, NetworkPolicy, throughput) or need the Internet.
const (
	applicable = `\[sig-network\]`
	notOurs    = `\[sig-network\] (DNS|Ingress)|Netpol|NetworkPolicy|IPerf2|PerformanceDNS|Internet connection`
)

// kubernetesVersion is the version of the tests and of the cluster.
const kubernetesVersion = "v1.36.3"

type judgement struct {
	program, focus, results, page string
	parallel                      uint
	short                         bool
}

// runJudge runs upstream's tests and writes the page. It uses the running cluster, or
// else one that it starts and stops.
func runJudge(ctx context.Context, config *cluster.Config, j *judgement) (err error) {
	running, err := config.Running()
	if errors.Is(err, fs.ErrNotExist) {
		if err := up(ctx, config, j.program); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, config.Down()) }()
		running, err = config.Running()
	}
	if err != nil {
		return err
	}
	if running.Proxy != config.Served.Proxy {
		return fmt.Errorf("the cluster that is up has %s, not %s", running.Proxy, config.Served.Proxy)
	}
	return judgeRunning(ctx, config, running, j)
}

func judgeRunning(ctx context.Context, config *cluster.Config, running cluster.Served, j *judgement) error {
	tests, err := upstreamTests(config)
	if err != nil {
		return err
	}
	applies, err := tests.List(ctx, applicable, notOurs)
	if err != nil {
		return err
	}
	nodes, run, err := nodesRun(ctx, config)
	if err != nil {
		return err
	}
	results, err := judge.Open(filepath.Join(j.results, running.Proxy+".json"), &judge.Results{
		Proxy: running.Proxy, Version: running.Version, Build: running.Build, Kubernetes: kubernetesVersion,
		Nodes: run, Date: time.Now().UTC().Format(time.DateOnly), Applies: applies,
	})
	if err != nil {
		return err
	}
	chosen, err := j.choose(applies)
	if err != nil {
		return err
	}
	runner := &judge.Runner{Tests: tests, Results: results, Parallel: j.atOnce(nodes), Nodes: nodes, Log: config.Log}
	ranErr := runner.Run(ctx, chosen)
	return errors.Join(ranErr, writePage(j), j.failed(results, chosen))
}

// choose returns the specs to run.
func (j *judgement) choose(applies []string) ([]string, error) {
	if j.short {
		return short, known(short, applies)
	}
	focus, err := regexp.Compile(j.focus)
	if err != nil {
		return nil, fmt.Errorf("-focus: %w", err)
	}
	return slices.DeleteFunc(slices.Clone(applies), func(name string) bool { return !focus.MatchString(name) }), nil
}

// atOnce is how many specs run at once, on so many nodes. Beside another spec on six of
// them, with two processors, a command in a Pod took ten to twenty seconds, and specs
// that allow thirty for an answer failed that pass alone.
func (j *judgement) atOnce(nodes int) int {
	switch {
	case j.parallel > 0:
		return int(j.parallel)
	case nodes > 3:
		return 1
	}
	return 2
}

func upstreamTests(config *cluster.Config) (*judge.Tests, error) {
	dir := filepath.Join(config.Cache, "cluster", "reports")
	program := filepath.Join(config.Cache, "upstream", "e2e.test")
	return &judge.Tests{
		Dir: dir, Checkout: config.Source,
		Command: func(ctx context.Context, args ...string) (*exec.Cmd, error) {
			cmd, err := config.Inside(ctx, program, args...)
			if err == nil {
				cmd.Env = append(os.Environ(), "KUBE_SSH_KEY_PATH="+config.SSHKey(), "KUBE_SSH_USER="+cluster.SSHUser)
			}
			return cmd, err
		},
		// "local" is the provider for clusters without a cloud whose nodes are reached by
		// SSH.
		Arguments: []string{
			"--provider=local", "--kubeconfig=" + config.InsideKubeconfig(), "--kubectl-path=" + config.Kubectl(),
			"--cluster-ip-range=10.96.0.0/16", "--allowed-not-ready-nodes=-1", "--num-nodes=-1",
			"--ginkgo.v", "--ginkgo.no-color", "--ginkgo.timeout=24h",
		},
	}, os.MkdirAll(dir, 0o755)
}

// nodesRun counts the nodes, and describes what they run.
func nodesRun(ctx context.Context, config *cluster.Config) (count int, what string, err error) {
	const info = `{range .items[*]}Linux {.status.nodeInfo.kernelVersion}, {.status.nodeInfo.containerRuntimeVersion}{"\n"}{end}`
	out, err := exec.CommandContext(ctx, config.Kubectl(), "--kubeconfig", config.Kubeconfig(), "get", "nodes", "-o", "jsonpath="+info).Output()
	if err != nil {
		return 0, "", fmt.Errorf("what the nodes run: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return len(lines), lines[0], nil
}

// writePage writes the recorded results of all proxies.
func writePage(j *judgement) error {
	page, err := judge.Page(j.results, cluster.Proxies)
	if err != nil {
		return err
	}
	return os.WriteFile(j.page, []byte(page), 0o644)
}

// failed returns an error if one of the specs failed or was flaky. A short run guards
// changes: it fails if no spec ran, but not because a node was late once.
func (j *judgement) failed(results *judge.Results, names []string) error {
	bad := []judge.State{judge.Failed, judge.Flaky}
	if j.short {
		bad = []judge.State{judge.Failed, judge.Skipped}
	}
	var errs []error
	for _, name := range names {
		verdict, ran := results.Specs[name]
		if ran && slices.Contains(bad, verdict.State()) {
			errs = append(errs, fmt.Errorf("%s: %s: %s", verdict.State(), name, verdict.Reason()))
		}
	}
	return errors.Join(errs...)
}
