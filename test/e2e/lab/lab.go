// Package lab creates clusters for end-to-end tests from network namespaces (a fabric,
// nodes, pods, clients), sends traffic through them, and captures it.
//
// It runs as root inside the kernel lab (see test/e2e/README.md). If creating a cluster
// fails, the test fails immediately. Everything is removed when the test ends.
package lab

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Lab is one test's set of namespaces.
type Lab struct {
	t          testing.TB
	number     int
	prefix     string
	root       *Namespace
	namespaces []*Namespace
	nodes      []*Node
	links      int
	bridges    int
}

// labs counts the labs of this process, for names that do not collide.
var labs atomic.Int32

// New begins a lab. When the test ends, the state of all nodes is written to its
// output if it failed, and all namespaces are removed.
func New(t testing.TB) *Lab {
	t.Helper()
	if os.Getenv("LAB") == "" {
		t.Fatal("this test changes the kernel it runs on: run it in the lab (make e2e)")
	}
	number := int(labs.Add(1))
	l := &Lab{t: t, number: number, prefix: fmt.Sprintf("l%d-", number)}
	root, err := netns.Get()
	l.must(err, "open the root namespace")
	handle, err := netlink.NewHandleAt(root, unix.NETLINK_ROUTE)
	l.must(err, "netlink in the root namespace")
	l.root = &Namespace{lab: l, Name: "root", file: root, netlink: handle}
	t.Cleanup(l.close)
	return l
}

func (l *Lab) close() {
	if l.t.Failed() {
		for _, node := range l.nodes {
			l.keep(node.Name+".txt", node.Dump())
		}
	}
	for i := len(l.namespaces) - 1; i >= 0; i-- {
		l.namespaces[i].close()
	}
	l.root.netlink.Close()
	l.root.file.Close()
}

// keep writes text to the test's output and to the output directory.
func (l *Lab) keep(name, text string) {
	l.t.Logf("%s:\n%s", name, text)
	dir := filepath.Join(os.Getenv("LAB_OUT"), l.t.Name())
	if err := os.MkdirAll(dir, 0o755); err != nil {
		l.t.Log(err)
		return
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		l.t.Log(err)
	}
}

// must ends the test if a step of building failed.
func (l *Lab) must(err error, format string, args ...any) {
	if err != nil {
		l.t.Helper()
		l.t.Fatalf("lab: %s: %v", fmt.Sprintf(format, args...), err)
	}
}

// linkName returns a name for the far end of a link, which nothing refers to.
func (l *Lab) linkName(kind string) string {
	l.links++
	return fmt.Sprintf("%s%d", kind, l.links)
}

// Eventually waits until check returns nil. If that takes too long, it fails the test
// with check's last error. Prefer to wait for an event if there is one.
func (l *Lab) Eventually(limit time.Duration, what string, check func() error) {
	l.t.Helper()
	Eventually(l.t, limit, what, check)
}

// Eventually does the same for a subtest, which alone fails.
func Eventually(t testing.TB, limit time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("lab: %s: not within %s: %v", what, limit, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (l *Lab) prefixes(texts []string) []netip.Prefix {
	l.t.Helper()
	var prefixes []netip.Prefix
	for _, text := range texts {
		prefix, err := parsePrefix(text)
		l.must(err, "address")
		prefixes = append(prefixes, prefix)
	}
	return prefixes
}

// parsePrefix parses "10.0.0.1/24", or "10.0.0.1" as a host prefix.
func parsePrefix(text string) (netip.Prefix, error) {
	if address, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(address, address.BitLen()), nil
	}
	return netip.ParsePrefix(text)
}
