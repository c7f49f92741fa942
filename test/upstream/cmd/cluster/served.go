package main

import (
	"fmt"
	"os/exec"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/test/upstream/cluster"
)

// product are the paths in the checkout of the parts that a cluster runs.
var product = []string{"cmd", "pkg", "deploy", "go.mod", "go.sum"}

// served describes the proxy that the cluster will have.
func served(config *cluster.Config, program string) (s cluster.Served, err error) {
	s.Proxy = config.Served.Proxy
	if s.Proxy != cluster.Proxies[0] {
		s.Version = kubernetesVersion
		s.Build, err = cluster.PeerBuild(kubernetesVersion)
		return s, err
	}
	version, err := exec.Command(program, "--version").Output()
	if err != nil {
		return s, fmt.Errorf("%s --version: %w", program, err)
	}
	words := strings.Fields(string(version))
	if len(words) == 0 {
		return s, fmt.Errorf("%s --version says nothing", program)
	}
	s.Version = words[len(words)-1]
	s.Build, err = productBuild(config.Source, program)
	return s, err
}

// productBuild is the commit that last changed the product, so that verdicts stay valid
// after other commits. With uncommitted changes it is a hash of the program.
func productBuild(source, program string) (string, error) {
	git := func(args ...string) (string, error) {
		out, err := exec.Command("git", append([]string{"-C", source}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	changed, err := git(append([]string{"status", "--porcelain", "--"}, product...)...)
	if err == nil && changed == "" {
		return git(append([]string{"log", "-1", "--format=%h", "--"}, product...)...)
	}
	return cluster.Digest(program)
}
