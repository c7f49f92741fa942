package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/control"
)

// dnsAddress is the cluster IP of DNS.
const dnsAddress = "10.96.0.10"

// startControlPlane starts etcd, the API server, controllers, scheduler, load balancer
// and DNS in the namespace of this process.
func (c *Config) startControlPlane(ctx context.Context) (*control.Server, error) {
	server, err := control.Start(ctx, control.Config{
		Peers: c.peers(), Listen: "0.0.0.0", Address: gateway4, Users: users(nodesUpTo(c.Nodes)),
		Arguments: []string{
			"--authorization-mode", "Node,RBAC",
			"--kubelet-preferred-address-types", "InternalIP", // node names are not in DNS
		},
	})
	if err != nil {
		return nil, err
	}
	for _, launch := range []func(*control.Server) error{c.launchControllers, c.launchBalancer, c.launchDNS} {
		if err := launch(server); err != nil {
			server.Stop()
			return nil, err
		}
	}
	return server, nil
}

func (c *Config) launchControllers(server *control.Server) error {
	manager, err := kubeconfigFile(server, "system:kube-controller-manager")
	if err != nil {
		return err
	}
	if err := server.Launch(filepath.Join(c.programs(), "kube-controller-manager"),
		"--kubeconfig", manager, "--authentication-kubeconfig", manager, "--authorization-kubeconfig", manager,
		"--service-account-private-key-file", server.KeyFile(), "--root-ca-file", server.CertificateFile(),
		"--use-service-account-credentials", "--leader-elect=false", "--bind-address", "127.0.0.1",
		"--cert-dir", server.Dir(),
		"--node-monitor-grace-period", "3m", // an emulated node may be late
	); err != nil {
		return err
	}
	scheduler, err := kubeconfigFile(server, "system:kube-scheduler")
	if err != nil {
		return err
	}
	return server.Launch(filepath.Join(c.programs(), "kube-scheduler"),
		"--kubeconfig", scheduler, "--authentication-kubeconfig", scheduler, "--authorization-kubeconfig", scheduler,
		"--leader-elect=false", "--bind-address", "127.0.0.1", "--cert-dir", server.Dir(),
	)
}

// launchBalancer starts the program that gives Services of type LoadBalancer their
// addresses.
func (c *Config) launchBalancer(server *control.Server) error {
	admin, err := kubeconfigFile(server, control.Admin.Name)
	if err != nil {
		return err
	}
	return server.Launch(filepath.Join(c.programs(), "loadbalancer"),
		"-kubeconfig", admin, "-ranges", balanced4+","+balanced6, "-sources", client4+","+client6)
}

const corefileFormat = `.:53 {
    bind %s
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig %s
        pods insecure
    }
}
`

func (c *Config) launchDNS(server *control.Server) error {
	admin, err := kubeconfigFile(server, control.Admin.Name)
	if err != nil {
		return err
	}
	corefile := filepath.Join(server.Dir(), "Corefile")
	if err := os.WriteFile(corefile, fmt.Appendf(nil, corefileFormat, gateway4, admin), 0o600); err != nil {
		return err
	}
	return server.Launch(filepath.Join(c.programs(), "coredns"), "-conf", corefile)
}

// kubeconfigFile writes a user's client configuration to the server's directory.
func kubeconfigFile(server *control.Server, user string) (string, error) {
	path := filepath.Join(server.Dir(), user+".kubeconfig")
	return path, os.WriteFile(path, server.KubeconfigFor(user, server.URL()), 0o600)
}

// dnsService is the Service by which Pods reach CoreDNS. CoreDNS runs outside the nodes,
// so its endpoint is written here.
const dnsService = `apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  clusterIP: ` + dnsAddress + `
  ports:
    - {name: dns, port: 53, protocol: UDP}
    - {name: dns-tcp, port: 53, protocol: TCP}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns-lab, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
endpoints: [{addresses: [` + gateway4 + `]}]
ports:
  - {name: dns, port: 53, protocol: UDP}
  - {name: dns-tcp, port: 53, protocol: TCP}
---
`
