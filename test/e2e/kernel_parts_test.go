//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// kernelParts are modules that a kernel may lack, with the clients that need them (a
// regular expression for their names) and a part of the resulting message.
var kernelParts = []struct{ module, loses, says string }{
	{"xt_REDIRECT", "", ""},
	{"xt_addrtype", "", "addrtype"},
	{"xt_ipvs", "", ""},
	{"xt_connmark", "", ""},
	{"ipt_REJECT", "", ""},
	{"ip6t_REJECT", "", ""},
	{"ip_set_hash_ipportip", "", "KUBE-LOOP-BACK"},
	{"ip_set_hash_ipportnet", "", "KUBE-LOAD-BALANCER-SOURCE-CIDR"},
	{"ip_set_hash_net", "", "KUBE-IPVS-REPLY-SRC"},
	{"ip_set_hash_ip", "VIP", "KUBE-IPVS-IPS"},
	{"ip_set_bitmap_port", "node port", "KUBE-NODE-PORT-TCP"},
	{"br_netfilter", "", ""},
	{"ip_vs_sh", "", ""},
	{"xt_comment", "", "xt_comment"},
	{"xt_conntrack", "", ""},
	{"xt_mark", "", "xt_MARK"},
	{"xt_set", "outside", "xt_set"},
	{"ip_vs_rr", "", "rr"},                                     // before the next one, whose virtual servers remain and use it
	{"ip_set_hash_ipport", "a pod|outside", "KUBE-CLUSTER-IP"}, // without it, the Service of a virtual server is not recorded
	{"nf_conntrack_netlink", "", "nf_conntrack_netlink"},
	{"xt_nat", "", ""},
	{"tcp_diag", "", ""},
}

// TestMissingKernelParts withholds one module at a time. Clients that do not need it are
// served. The lost function is reported: in the log, and by doctor if the module is an
// extension of iptables. Every second module is tested, and all of them in `make
// reliability`.
func TestMissingKernelParts(t *testing.T) {
	c := newOfflineCluster(t)
	node := c.Nodes[0]
	dir := writeManifests(t, withSlices(newExposed("web", 1), ready(c.web2))...)
	clients := []ask{}
	for i, family := range []string{"IPv4", "IPv6"} {
		clients = append(clients,
			ask{"a pod, a cluster IP, " + family, c.caller1.Namespace, at(clusterIPs(1)[i], 80)},
			ask{"the node, a cluster IP, " + family, node.Namespace, at(clusterIPs(1)[i], 80)},
			ask{"a pod, a VIP, " + family, c.caller1.Namespace, at(balancerIPs(1)[i], 80)},
			ask{"outside, a VIP, " + family, c.Client, at(balancerIPs(1)[i], 80)},
			ask{"outside, a node port, " + family, c.Client, at(nodeIPs(node)[i], 30001)},
		)
	}
	for i, part := range kernelParts {
		if i%reliability.Times(2, 1) > 0 {
			continue
		}
		t.Run(part.module, func(t *testing.T) {
			withhold(t, part.module)
			started := time.Now()
			p := node.StartProxy(func(*lab.Process) error { return hasCompared(node.Node, 2) },
				"--manifests", dir, "--hostname-override", node.Name, "--cluster-cidr", podCIDRs, "--ipvs-sync-period", "1s")
			t.Logf("ready after %s", time.Since(started))
			for _, client := range clients {
				if part.loses != "" && regexp.MustCompile(part.loses).MatchString(client.name) {
					continue
				}
				if answer := client.from.Dial(lab.TCP, client.address); answer.Err != nil {
					t.Errorf("%s: %s", client.name, answer)
				}
			}
			log := p.Log()
			_, found := node.RunProxy("doctor")
			if want, got := lacking(part.module), lacks.FindAllString(strings.ToLower(found), -1); (want == "") != (len(got) == 0) ||
				slices.ContainsFunc(got, func(s string) bool { return s != want }) {
				t.Errorf("doctor does not find %q, or more:\n%s", want, found)
			}
			says := part.says
			if strings.HasPrefix(part.module, "xt_") {
				says = "module " + part.module + " "
			}
			if !strings.Contains(found, says) {
				t.Errorf("doctor does not name %q:\n%s", says, found)
			}
			p.Stop()
			if !strings.Contains(log, part.says) {
				t.Errorf("%q is not said:\n%s", part.says, log)
			}
			if code, output := node.RunProxy("--cleanup"); code != 0 {
				t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
			}
		})
	}
}

// lacks returns doctor's findings about missing parts, in lower case.
var lacks = regexp.MustCompile(`the kernel (has no|lacks the iptables extension) [^;]*;`)

// lacking returns what doctor must report about a module.
func lacking(module string) string {
	name, ok := map[string]string{
		"ip_set_hash_ip": "hash:ip", "ip_set_hash_net": "hash:net", "ip_set_hash_ipport": "hash:ip,port", "ip_set_bitmap_port": "bitmap:port",
		"ip_set_hash_ipportip": "hash:ip,port,ip", "ip_set_hash_ipportnet": "hash:ip,port,net",
	}[module]
	if ok {
		return "the kernel has no set type " + name + ";"
	}
	switch kind, name, _ := strings.Cut(strings.ToLower(module), "_"); {
	case module == "nf_conntrack_netlink":
		return "the kernel has no nf_conntrack_netlink;"
	case module == "xt_nat":
		return "the kernel lacks the iptables extension snat;"
	case kind == "xt" || kind == "ipt" || kind == "ip6t":
		return "the kernel lacks the iptables extension " + name + ";"
	}
	return ""
}

// withhold unloads a module, with the modules that use it, and hides it from modprobe
// until the test ends.
func withhold(t *testing.T, module string) {
	t.Helper()
	out, err := exec.Command("modinfo", "-n", module).CombinedOutput()
	path := strings.TrimSpace(string(out))
	if err != nil || path == "(builtin)" {
		t.Skipf("%s: %v: %s", module, err, out)
	}
	// The kernel deletes the network namespaces of earlier tests, and with them the last
	// rules that use a module, some time after their last process has ended.
	lab.Eventually(t, syncLimit, module+" is unloaded", func() error { return unload(module) })
	if err := os.Rename(path, path+".withheld"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Rename(path+".withheld", path); err != nil {
			t.Error(err)
		}
	})
}

// unload unloads a module after the modules that use it. Modules that cannot be unloaded
// yet are in the error.
func unload(module string) error {
	users, err := os.ReadDir(filepath.Join("/sys/module", module, "holders"))
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	var errs []error
	for _, user := range users {
		errs = append(errs, unload(user.Name()))
	}
	if _, err := os.Stat(filepath.Join("/sys/module", module)); os.IsNotExist(err) {
		return nil
	}
	// Not modprobe -r: with br_netfilter it would unload bridge, and with it all bridges.
	if out, err := exec.Command("rmmod", module).CombinedOutput(); err != nil {
		errs = append(errs, fmt.Errorf("%w: %s", err, out))
	}
	return errors.Join(errs...)
}

// TestMissingNFTables starts on a kernel without nf_tables, where iptables-legacy and the
// program nft are installed, as in the image. The node serves.
func TestMissingNFTables(t *testing.T) {
	// iptables has left its tables in the lab's own namespace, where earlier tests wrote rules.
	if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	withhold(t, "nf_tables")
	node, flags := loneNode(t)
	out, err := node.TryExec("nft", "list", "tables")
	if err == nil {
		t.Fatalf("nft works:\n%s", out)
	}
	t.Logf("nft list tables: %v: %s", err, out)
	p := node.StartProxy(func(*lab.Process) error { return hasCompared(node, 2) }, append(flags, "--ipvs-sync-period", "1s")...)
	if servers := node.Exec("ipvsadm", "-Ln"); !strings.Contains(servers, "10.96.1.1:80") {
		t.Errorf("virtual servers:\n%s", servers)
	}
	if rules := node.Exec("iptables-legacy-save"); !strings.Contains(rules, "KUBE-SERVICES") {
		t.Errorf("rules:\n%s", rules)
	}
	if code, found := node.RunProxy("doctor"); code > 1 || strings.Contains(found, "nft list tables") {
		t.Errorf("kube-ipvs doctor ended with %d:\n%s", code, found)
	}
	if log := p.Log(); strings.Contains(log, "cannot be read") || strings.Contains(log, "Cannot read") {
		t.Errorf("the log tells of what the kernel does not have:\n%s", log)
	}
	p.Stop()
	if code, output := node.RunProxy("--cleanup"); code != 0 {
		t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
}
