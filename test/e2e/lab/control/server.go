// Package control starts the control plane for the lab's nodes: etcd and kube-apiserver.
// Tests write what controllers would write (EndpointSlices, statuses, Nodes), or the
// caller starts controllers.
//
// Like the runner that uses it, the package needs only the standard library.
package control

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Config says what to start and where to listen.
type Config struct {
	// Peers is the directory of the programs etcd and kube-apiserver.
	Peers string
	// Listen is the IP address that the API server listens on.
	Listen string
	// Address is the IP address by which its clients reach it.
	Address string
	// Users are the users that the API server accepts besides Admin.
	Users []User
	// Arguments are additional arguments of the API server.
	Arguments []string
}

// WithoutControllers are arguments for an API server without controllers: nothing creates
// the objects that admission of Pods requires.
var WithoutControllers = []string{
	"--endpoint-reconciler-type", "none", "--authorization-mode", "RBAC",
	"--disable-admission-plugins", "ServiceAccount",
}

// Server is a running control plane.
type Server struct {
	config    Config
	dir       string
	port      string
	etcdPort  string
	identity  *identity
	processes []*process
}

// readyLimit is far above the few seconds that a start takes, for busy machines.
const readyLimit = 2 * time.Minute

// Start starts etcd and kube-apiserver and waits until the API server is ready.
// The processes end with Stop, and with the caller's process.
func Start(ctx context.Context, config Config) (*Server, error) {
	dir, err := os.MkdirTemp("", "control-")
	if err != nil {
		return nil, err
	}
	server := &Server{config: config, dir: dir}
	if err := server.start(ctx); err != nil {
		server.Stop()
		return nil, fmt.Errorf("start the API server: %w", err)
	}
	return server, nil
}

func (s *Server) start(ctx context.Context) (err error) {
	if s.identity, err = newIdentity(s.dir, s.config.Users, s.config.Address, "127.0.0.1", serviceAddress); err != nil {
		return err
	}
	ports, err := freePorts(3)
	if err != nil {
		return err
	}
	s.etcdPort, s.port = ports[0], ports[2]
	etcd := "http://127.0.0.1:" + ports[0]
	if err := s.launchPeer("etcd", etcdArguments(s.dir, etcd, "http://127.0.0.1:"+ports[1])); err != nil {
		return err
	}
	if err := s.launchPeer("kube-apiserver", s.apiserverArguments(etcd)); err != nil {
		return err
	}
	return s.waitReady(ctx)
}

func etcdArguments(dir, client, peer string) []string {
	return []string{
		"--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--initial-cluster", "default=" + peer,
	}
}

func (s *Server) apiserverArguments(etcd string) []string {
	return append([]string{
		"--etcd-servers", etcd,
		"--bind-address", s.config.Listen, "--secure-port", s.port,
		"--advertise-address", s.config.Address,
		"--tls-cert-file", s.identity.certificateFile, "--tls-private-key-file", s.identity.keyFile,
		"--token-auth-file", s.identity.tokenFile,
		"--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", s.identity.keyFile,
		"--service-account-signing-key-file", s.identity.keyFile,
		"--allow-privileged", // as in every cluster, for Pods such as the one in deploy
		"--service-cluster-ip-range", ServiceCIDRs,
	}, s.config.Arguments...)
}

// ServiceCIDRs hold the cluster IPs.
const ServiceCIDRs = "10.96.0.0/16,fd00:10:96::/112"

// serviceAddress is the cluster IP of default/kubernetes: the first of the range.
const serviceAddress = "10.96.0.1"

// Kubeconfig is the path of Admin's client configuration for the server.
func (s *Server) Kubeconfig() []byte { return s.KubeconfigFor(Admin.Name, s.URL()) }

// KubeconfigFor returns the client configuration of another user, for another URL.
func (s *Server) KubeconfigFor(user, url string) []byte { return s.identity.kubeconfig(url, user) }

// URL is the server's URL for nodes.
func (s *Server) URL() string { return "https://" + net.JoinHostPort(s.config.Address, s.port) }

// KeyFile holds the key that signs ServiceAccount tokens, CertificateFile the authority
// that signed the server's certificate.
func (s *Server) KeyFile() string         { return s.identity.keyFile }
func (s *Server) CertificateFile() string { return s.identity.certificateFile }

// Dir holds the server's files; Stop removes them.
func (s *Server) Dir() string { return s.dir }

// EtcdPort is etcd's port on the loopback address, for tests that write a hundred
// thousand objects directly.
func (s *Server) EtcdPort() string { return s.etcdPort }

// Stop kills the processes and removes their data.
func (s *Server) Stop() {
	for i := len(s.processes) - 1; i >= 0; i-- {
		s.processes[i].stop()
	}
	os.RemoveAll(s.dir)
}

func (s *Server) launchPeer(program string, args []string) error {
	return s.Launch(filepath.Join(s.config.Peers, program), args...)
}

// Launch starts another program of the control plane, which Stop stops too. Its log is in
// Dir, under its name.
func (s *Server) Launch(program string, args ...string) error {
	p, err := startProcess(program, filepath.Join(s.dir, filepath.Base(program)+".log"), args)
	if err != nil {
		return err
	}
	s.processes = append(s.processes, p)
	return nil
}

// waitReady polls /readyz, which has no event, until it returns 200 or a process ends.
func (s *Server) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyLimit, fmt.Errorf("not ready after %s", readyLimit))
	defer cancel()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: s.identity.pool}}}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		ready := s.isReady(ctx, client)
		if ready == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), ready)
		case <-tick.C:
		}
		for _, p := range s.processes {
			if err := p.ended(); err != nil {
				return err
			}
		}
	}
}

func (s *Server) isReady(ctx context.Context, client *http.Client) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://127.0.0.1:"+s.port+"/readyz", nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+s.identity.tokens[Admin.Name])
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return errors.New("/readyz: " + response.Status)
	}
	return nil
}

// Ports are chosen below those that Linux gives to outgoing connections
// (net.ipv4.ip_local_port_range): a connection of another lab's API server to its etcd
// could take such a port before the server here listens on it.
const firstPort, lastPort = 10000, 32767

// freePorts returns different ports on which no process listens now.
func freePorts(count int) ([]string, error) {
	var ports []string
	var failed error
	for range 100 {
		port := strconv.Itoa(firstPort + rand.IntN(lastPort-firstPort+1))
		listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", port))
		if err != nil {
			failed = err
			continue
		}
		// Keep them open until all are found, so that they differ.
		defer listener.Close()
		if ports = append(ports, port); len(ports) == count {
			return ports, nil
		}
	}
	return nil, fmt.Errorf("no %d free ports from %d to %d: %w", count, firstPort, lastPort, failed)
}

// process is a program in the background with its output in a file.
type process struct {
	cmd  *exec.Cmd
	log  string
	done chan struct{}
}

func startProcess(program, log string, args []string) (*process, error) {
	if _, err := os.Stat(program); err != nil {
		return nil, fmt.Errorf("%w (run: make peers)", err)
	}
	file, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = file, file
	// Its own process group keeps a Ctrl-C from it, so that the runner can stop it in
	// order. The signal is for a runner that is killed: it is sent when the starting
	// thread ends, and Go keeps threads until the process ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, log: log, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		// The log shows the reason; ended reports it.
		_ = cmd.Wait()
	}()
	return p, nil
}

// ended returns an error with the end of the log if the process has ended.
func (p *process) ended() error {
	select {
	case <-p.done:
	default:
		return nil
	}
	log, err := os.ReadFile(p.log)
	if err != nil {
		return err
	}
	lines := bytes.Split(bytes.TrimSpace(log), []byte("\n"))
	end := bytes.Join(lines[max(0, len(lines)-15):], []byte("\n"))
	return fmt.Errorf("%s ended (%s):\n%s", filepath.Base(p.cmd.Path), p.cmd.ProcessState, strings.TrimSpace(string(end)))
}

// stop kills the process, whose state is not needed any more.
func (p *process) stop() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// newPool returns a set of trusted roots with one member.
func newPool(certificate []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(certificate) {
		return nil, errors.New("the server's own certificate cannot be parsed")
	}
	return pool, nil
}
