package walk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/upstream/cluster"
)

// Walk is a walk through the guide on a cluster that is up.
type Walk struct {
	Config *cluster.Config
	// Program is kube-ipvs, for the kubectl plugin, and Helm the program of that name.
	Program, Helm string
	// Image and Version are what the nodes have of kube-ipvs.
	Image, Version string
	// Short ends the walk when one node has been there and back. Direct goes to all nodes
	// and back, but not back on the way.
	Short, Direct bool

	// dir has the state of the reader's shell, and programs in bin.
	dir string
	// work is the directory that commands run in.
	work    string
	clients clients
}

// Run copies one block after the other. It returns an error at the first command that
// fails, or connection that breaks.
func (w *Walk) Run(ctx context.Context) error {
	mode, ok := strings.CutPrefix(w.Config.Served.Proxy, "kube-proxy-")
	if !ok {
		return fmt.Errorf("the walk begins with kube-proxy, not with %s", w.Config.Served.Proxy)
	}
	if err := w.prepare(); err != nil {
		return err
	}
	defer os.RemoveAll(w.dir)
	w.clients = clients{w: w}
	defer w.clients.stop()
	if err := w.clients.start(ctx); err != nil {
		return fmt.Errorf("start the clients: %w", err)
	}
	if err := w.check(ctx, "begin"); err != nil {
		return err
	}
	values, err := w.values(ctx)
	if err != nil {
		return err
	}
	way := steps(mode, w.Config.Nodes, w.Short, values)
	if w.Direct {
		way = direct(mode, w.Config.Nodes, values)
	}
	begin, blocks := time.Now(), 0
	for _, s := range way {
		if err := w.take(ctx, s); err != nil {
			return errors.Join(err, w.scene(ctx))
		}
		if s.page != "" {
			blocks++
		}
	}
	w.Config.Log("%s: %d blocks in %s, %d connections held to the end", mode, blocks, time.Since(begin).Round(time.Second), w.clients.targets)
	return nil
}

// scene returns what the cluster looks like when a step has failed, as an error.
func (w *Walk) scene(ctx context.Context) error {
	out, err := w.shell(ctx, `set +e
kubectl get pods --all-namespaces --output wide
kubectl get endpointslices --all-namespaces
kubectl get events --all-namespaces --sort-by .metadata.creationTimestamp | tail -n 60
for pod in $(kubectl get pods --selector 'app in (client-pod,client-host)' --output name); do echo "$pod"; kubectl logs "$pod" | tail -n 12; done`)
	return errors.Join(errors.New(out), err)
}

// values are what a reader puts in place of the guides' examples.
func (w *Walk) values(ctx context.Context) (map[string]string, error) {
	server, err := w.shell(ctx, "kubectl config view --minify --output jsonpath='{.clusters[0].cluster.server}'")
	return map[string]string{
		"image": w.Image, "version": w.Version, "server": strings.TrimSpace(server),
		"cidr": cluster.PodCIDRs, "node": "node1", "batch": "1",
	}, err
}

func (w *Walk) prepare() (err error) {
	w.work = w.Config.Source
	if w.dir, err = os.MkdirTemp("", "walk-"); err != nil {
		return err
	}
	bin := filepath.Join(w.dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		return err
	}
	for name, program := range map[string]string{"kubectl": w.Config.Kubectl(), "helm": w.Helm, "kubectl-ipvs": w.Program, "kube-ipvs": w.Program} {
		if err := os.Symlink(program, filepath.Join(bin, name)); err != nil {
			return err
		}
	}
	return nil
}

// take runs a step, and checks the clients.
func (w *Walk) take(ctx context.Context, s step) error {
	switch {
	case s.commands != "":
		return w.follow(ctx, s, s.commands, strings.SplitN(strings.TrimSpace(s.commands), "\n", 2)[0])
	case s.page == "" && s.set != nil:
		return w.assign(ctx, s.set)
	case s.page == "":
		w.Config.Log("%s", s.section)
		if err := w.clients.renew(ctx); err != nil {
			return err
		}
		return w.check(ctx, s.section)
	case s.page == commands && !s.replace:
		if err := w.pluginWorks(ctx); err != nil {
			return err
		}
		return w.check(ctx, s.section)
	}
	block, err := find(w.Config.Source, s)
	if err != nil {
		return err
	}
	text, err := s.text(block)
	if err != nil {
		return err
	}
	return w.follow(ctx, s, text, fmt.Sprintf("%s, %s", block, s.section))
}

// follow runs the commands of a step, and checks the result and the clients.
func (w *Walk) follow(ctx context.Context, s step, text, name string) error {
	printed, err := w.shell(ctx, text)
	if err == nil && s.then != nil {
		err = s.then(ctx, w, printed)
	}
	if err != nil {
		return fmt.Errorf("%s\n%s\nprinted:\n%s\n%w", name, text, printed, err)
	}
	if s.ends {
		w.Config.Log("%s", name)
		return nil
	}
	return w.check(ctx, name)
}

func (w *Walk) assign(ctx context.Context, values map[string]string) error {
	for name, value := range values {
		if _, err := w.shell(ctx, name+"="+value); err != nil {
			return err
		}
	}
	return nil
}

// check checks the clients after a step, if there are any.
func (w *Walk) check(ctx context.Context, after string) error {
	if w.clients.targets == 0 {
		w.Config.Log("%s", after)
		return nil
	}
	held, failed, err := w.clients.check(ctx)
	if err != nil {
		return fmt.Errorf("after %s: %w", after, err)
	}
	w.Config.Log("%s: %d connections held, %d new ones failed", after, held, failed)
	return nil
}

// text returns the commands of a step.
func (s *step) text(block *Block) (string, error) {
	if !s.replace {
		changed, err := block.set(s.set)
		if err != nil {
			return "", err
		}
		return (&Block{Text: changed}).script(), nil
	}
	text := block.Text
	for old, value := range s.set {
		if !strings.Contains(text, old) {
			return "", fmt.Errorf("%s: there is no %s", block, old)
		}
		text = strings.ReplaceAll(text, old, value)
	}
	return text, nil
}

// find returns the block of a step.
func find(source string, s step) (*Block, error) {
	blocks, err := Blocks(source, s.page)
	if err != nil {
		return nil, err
	}
	for _, b := range blocks {
		if b.Section == s.section && b.Index == s.index {
			return b, nil
		}
	}
	return nil, fmt.Errorf("%s has no block %d in the section %q", s.page, s.index, s.section)
}

// shellFormat runs commands as one shell would that the reader keeps open: variables and
// functions are there in the next block. It stops at the first command that fails.
const shellFormat = `set -a -e -o pipefail
state=%s
[ ! -e $state ] || . $state
trap '{ declare -f; export -p; } >$state' EXIT
. /dev/fd/3
`

// stepLimit is how long a block may take.
const stepLimit = 12 * time.Minute

// shell runs commands in the cluster's network, with its kubeconfig, in the checkout.
func (w *Walk) shell(ctx context.Context, text string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	cmd, err := w.Config.Inside(ctx, "bash", "-c", fmt.Sprintf(shellFormat, filepath.Join(w.dir, "state")))
	if err != nil {
		return "", err
	}
	file := filepath.Join(w.dir, "commands")
	if err := os.WriteFile(file, []byte(text+"\n"), 0o644); err != nil {
		return "", err
	}
	script, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer script.Close()
	cmd.ExtraFiles = []*os.File{script}
	cmd.Dir = w.work
	cmd.Env = append(os.Environ(), "KUBECONFIG="+w.Config.InsideKubeconfig(),
		"PATH="+filepath.Join(w.dir, "bin")+":"+os.Getenv("PATH"), "HOME="+w.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w:\n%s", strings.TrimSpace(text), err, out)
	}
	return string(out), nil
}

func (w *Walk) apply(ctx context.Context, manifest string) error {
	_, err := w.shell(ctx, "kubectl apply --filename - <<'END_OF_MANIFEST'\n"+manifest+"\nEND_OF_MANIFEST")
	return err
}

// onNode runs a command on a node.
func (w *Walk) onNode(ctx context.Context, n int, command string) (string, error) {
	return w.shell(ctx, w.ssh(n)+" "+strconv.Quote(command))
}

// ssh is the command that runs others on a node.
func (w *Walk) ssh(n int) string {
	return "ssh -q -i " + w.Config.SSHKey() + " -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null " +
		cluster.SSHUser + "@" + cluster.NodeAddress(n)
}

// noise is what no command of the plugin prints.
var noise = []string{"reflector", "Defaulted container", "Unable to use a TTY", "context canceled"}

// pluginWorks runs the commands that the reference shows, and more.
func (w *Walk) pluginWorks(ctx context.Context) error {
	client, err := w.shell(ctx, "kubectl get pods --selector app=client-pod --output jsonpath='{.items[0].metadata.name} {.items[0].spec.nodeName}'")
	if err != nil {
		return err
	}
	pod, node, _ := strings.Cut(strings.TrimSpace(client), " ")
	var everyNode []string
	for n := range w.Config.Nodes {
		everyNode = append(everyNode, fmt.Sprintf("\nnode%d ", n+1))
	}
	for _, tc := range []struct {
		command string
		want    []string
		fails   bool
	}{
		{command: "kubectl ipvs status", want: everyNode},
		{command: "kubectl ipvs doctor", want: everyNode},
		{command: "kubectl ipvs diff", want: everyNode},
		{command: "kubectl ipvs trace --from default/web-0 --to svc/kube-system/kube-dns:dns-tcp", want: []string{"kube-system/kube-dns:dns-tcp", "answered"}},
		{command: "kubectl ipvs trace --from default/" + pod + " --to svc/web", want: []string{"on node " + node, "default/web-0", "default/web-2", "answered"}},
		{command: "kubectl ipvs trace --from default/" + pod + " --to svc/web:81", want: []string{"81"}, fails: true},
		{command: "kubectl ipvs get endpoints --node node1 -o wide", want: []string{"default/web-0", "default/web-1", "node2"}},
		{command: "kubectl ipvs get endpoints", want: []string{"choose one with --node"}, fails: true},
		{command: "kubectl ipvs connectivity test --node node1", want: []string{" 0 failed"}},
		{command: "cd $(mktemp -d) && kubectl ipvs sysdump && tar -tzf *.tar.gz && cd -", want: []string{"/node1/node.tar.gz", "/node2/node.tar.gz"}},
	} {
		printed, err := w.shell(ctx, tc.command)
		var ended *exec.ExitError
		if tc.fails && errors.As(err, &ended) {
			err = nil
		} else if tc.fails && err == nil {
			err = errors.New("did not exit non-zero")
		}
		for _, want := range tc.want {
			if !strings.Contains("\n"+printed, want) {
				err = errors.Join(err, fmt.Errorf("did not print %q", want))
			}
		}
		for _, bad := range noise {
			if strings.Contains(printed, bad) {
				err = errors.Join(err, fmt.Errorf("printed %q", bad))
			}
		}
		if err != nil {
			return fmt.Errorf("%s\nprinted:\n%s\n%w", tc.command, printed, err)
		}
		w.Config.Log("%s: as expected", tc.command)
	}
	return nil
}
