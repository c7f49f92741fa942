//go:build e2e

package neighbours

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// program is the proxy that serves the Services of a site.
type program string

const (
	kubeProxy program = "kube-proxy"
	kubeIPVS  program = "kube-ipvs"
)

// side is a site with its program.
type side struct {
	*site
	program program
	process *lab.Process
	ports   ports
	own     []netip.Addr // the node's addresses
}

// start runs the program and waits until everything is programmed.
func (s *side) start() {
	s.t.Helper()
	common := s.arguments()
	ready := func(*lab.Process) error {
		err := s.programmed()
		if err != nil {
			// A check runs several processes, which compete with the program for the
			// processor.
			time.Sleep(time.Second)
		}
		return err
	}
	if s.program == kubeIPVS {
		s.process = s.Node.StartProxy(ready, append(common, s.plan.flags...)...)
		return
	}
	s.process = s.Node.StartProgram(ready, lab.Peer("kube-proxy"), append(common, s.peerArguments("ipvs")...)...)
}

// arguments returns the arguments that both programs have.
func (s *side) arguments() []string {
	return []string{"--kubeconfig", lab.Kubeconfig(), "--hostname-override", nodeName, "--cluster-cidr", s.plan.clusterCIDR}
}

// peerArguments returns kube-proxy's own arguments. They leave the machine's conntrack
// settings unchanged.
func (s *side) peerArguments(mode string) []string {
	return []string{
		"--proxy-mode", mode, "--conntrack-max-per-core", "0", "--conntrack-min", "0",
		"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s",
	}
}

// programmed returns an error that names missing state. Both programs write the
// masquerade rules last.
func (s *side) programmed() error {
	// kube-proxy has no /readyz, and answers 404.
	if out, err := s.Node.TryExec("curl", "-s", "--max-time", "5", "http://127.0.0.1:10256/readyz"); err != nil || strings.Contains(out, "the first sync is not finished") {
		return fmt.Errorf("no sync yet: %s", out)
	}
	table, err := s.Node.TryExec("ipvsadm", "-Ln")
	if err != nil {
		return err
	}
	for n := range services {
		for family, ip := range clusterIPs(n + 1) {
			server := fmt.Sprintf("UDP  %s:%d ", bracketed(ip), servicePort(n+1))
			if !strings.Contains(table, server) {
				return fmt.Errorf("no virtual server %s", server)
			}
			for _, e := range s.servers {
				if a := e.addresses[family]; a.IsValid() && !strings.Contains(table, fmt.Sprintf("%s:%d ", bracketed(a.String()), s.plan.targetPort(n+1))) {
					return fmt.Errorf("no real server %s", a)
				}
			}
		}
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		// kube-ipvs keeps the variant that it finds in use. iptables-legacy-save would
		// create its tables if they do not exist. Files in /proc have no size.
		legacy := fmt.Sprintf("if grep -q . /proc/net/%s_names; then %s-legacy-save -t nat; fi", strings.Replace(family, "tables", "_tables", 1), family)
		if !s.masquerades(family+"-nft-save", "-t", "nat") && !s.masquerades("sh", "-c", legacy) {
			return fmt.Errorf("%s has no KUBE-POSTROUTING yet", family)
		}
	}
	return nil
}

// masquerades reports whether a program's output contains the masquerade rules.
func (s *side) masquerades(program string, args ...string) bool {
	out, err := s.Node.TryExec(program, args...)
	return err == nil && strings.Contains(out, "-A KUBE-POSTROUTING")
}

func bracketed(ip string) string {
	if strings.Contains(ip, ":") {
		return "[" + ip + "]"
	}
	return ip
}

// restart stops the program and starts it again.
func (s *side) restart() {
	s.t.Helper()
	s.process.Terminate()
	s.start()
}
