//go:build e2e

// Package demo shows the product at work to a person: one cluster in several
// set-ups, what a pod's requests did in each, and what then stands in the kernel.
// Everything that it prints was measured in this run, and it fails if that is not
// what the product promises.
package demo

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// setup is one row of the table: a cluster, who programs its node, and what
// must come of it.
type setup struct {
	name    string
	options lab.ENIOptions
	program func(*testing.T, *lab.ENICluster, image)
	// requests is how many the pod sends.
	requests int
	want     way
	answered bool
	// state are the commands that show what the node's kernel holds then.
	state []command
}

// The addresses of the lab's ENI cluster.
const (
	nodeAddress = "10.12.97.49"
	eniAddress  = "10.12.192.10"
)

var setups = []setup{
	{
		name: "kube-proxy's rules, sources not checked", program: kubeProxy, requests: 1,
		want: way{leaves: "eth1 as " + nodeAddress, returns: "eth0"},
	}, {
		name: "kube-proxy's rules", program: kubeProxy, requests: 1,
		options: lab.ENIOptions{CheckSources: true},
		want:    way{leaves: "eth1 as " + nodeAddress, returns: nothing},
	}, {
		name: "kube-ipvs", program: kubeIPVS(), requests: 6, answered: true,
		options: lab.ENIOptions{CheckSources: true},
		want:    way{leaves: "eth0 as " + nodeAddress, returns: "eth0"},
		state:   wholeState,
	}, {
		name:    "kube-ipvs --snat-source eth1=" + eniAddress,
		program: kubeIPVS("--snat-source", "eth1="+eniAddress), requests: 6, answered: true,
		options: lab.ENIOptions{CheckSources: true},
		want:    way{leaves: "eth1 as " + eniAddress, returns: "eth1"},
		state:   sourceRules,
	}, {
		name: "kube-ipvs, eth1 has its address", program: kubeIPVS(), requests: 6, answered: true,
		options: lab.ENIOptions{CheckSources: true, Eth1Address: true},
		want:    way{leaves: "eth1 as " + eniAddress, returns: "eth1"},
		state:   sourceRules,
	},
}

const picture = `
A node has two network interfaces, and its pods have addresses of the second, as
some cloud CNIs do it. What comes from a pod leaves by eth1, everything else by
eth0. A pod calls the address of the cloud's load balancer, %[1]s.

                 .-- eth0 %-11[2]s --.           .-- backend1 %[4]s
  pod ------- node                       network --<
  %-14[3]s '-- eth1 --------------'           '-- backend2 %[5]s

rp_filter is strict. The network drops packets whose source is not an address of
the interface that they come from, unless stated otherwise. eth1's own address is %[6]s;
the node does not carry it, unless stated otherwise.

`

// TestDemo runs the set-ups one by one.
func TestDemo(t *testing.T) {
	img := unpack(t)
	var rows []row
	var states strings.Builder
	for i, s := range setups {
		t.Run(s.name, func(t *testing.T) {
			c := lab.NewENICluster(t, s.options)
			if i == 0 {
				fmt.Printf(picture, c.VIP, c.NodeAddress, c.Pod.Addresses[0], c.Endpoints[0], c.Endpoints[1], c.ENIAddress)
			}
			say("%d of %d: %s", i+1, len(setups), s.name)
			s.program(t, c, img)
			m := measure(c, s.options, s.requests)
			m.show()
			rows = append(rows, row{s.name, m})
			s.check(t, m)
			for _, show := range s.state {
				states.WriteString(show.run(s.name, c.Node))
			}
		})
	}
	printTable(rows)
	fmt.Print(states.String())
	if t.Failed() {
		fmt.Print("\nThis is not what it should be:\n\n")
	} else {
		fmt.Print(conclusion)
	}
}

const conclusion = `
Under kube-proxy's rules the pod's request times out: it leaves by one interface
with the address of the other. Under kube-ipvs the request, its source address and
the reply belong to one interface, and every request was answered.

`

// check fails the demo if the packets went another way than they must.
func (s *setup) check(t *testing.T, m measurement) {
	t.Helper()
	if m.way != s.want {
		t.Errorf("the requests left by %s, the replies came by %s; want %s and %s",
			m.leaves, m.returns, s.want.leaves, s.want.returns)
	}
	if s.answered {
		if m.outcomes[lab.OK] != s.requests || len(m.servers) != 2 || m.spoofed > 0 {
			t.Errorf("%s; want %d answers, of both backends", m.result(), s.requests)
		}
	} else if m.outcomes[lab.TimedOut] != s.requests {
		t.Errorf("%s; want a time-out", m.result())
	}
}

// kubeProxy programs the node as kube-proxy does.
func kubeProxy(_ *testing.T, c *lab.ENICluster, _ image) {
	lab.KubeProxyRules(c.Node, c.VIP, c.Endpoints...)
}

// image is the unpacked container image.
type image struct {
	lab.ImageConfig
	root string
}

func unpack(t *testing.T) image {
	t.Helper()
	root := t.TempDir()
	return image{lab.UnpackImage(t, root), root}
}

// kubeIPVS programs the node with the container image, from a folder of manifests. The container
// has the mounts of the DaemonSet, and is privileged.
func kubeIPVS(flags ...string) func(*testing.T, *lab.ENICluster, image) {
	return func(t *testing.T, c *lab.ENICluster, img image) {
		t.Helper()
		const manifests, lock = "/manifests", "/run/xtables.lock"
		c.Node.HostFile(lock)
		container := lab.Container{Root: img.root, Env: img.Env, Privileged: true, Mounts: []lab.Mount{
			{Host: filepath.Join(os.Getenv("LAB_SRC"), "test/e2e/demo/manifests"), Path: manifests, ReadOnly: true},
			{Host: "/lib/modules", Path: "/lib/modules", ReadOnly: true},
			{Host: lock, Path: lock},
		}}
		args := slices.Concat(img.Entrypoint[1:], []string{"--manifests", manifests, "--once", "--hostname-override", "node"}, flags)
		begin := time.Now()
		if code, output := c.Node.RunContainer(container, img.Entrypoint[0], args...); code != 0 {
			t.Fatalf("kube-ipvs ended with exit code %d:\n%s", code, output)
		}
		say("    kube-ipvs --once, from its container image, has programmed the node after %.1f s", time.Since(begin).Seconds())
	}
}

var begin = time.Now()

// say reports progress.
func say(format string, args ...any) {
	fmt.Printf("[%4.1fs] %s\n", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
}
