package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/vm"
)

// machine is the guest that is a node.
type machine struct {
	*supervisor
	node   node
	lab    *vm.Lab
	others []node
	// stop kills the guest, ended is closed when it has ended.
	stop  context.CancelFunc
	ended chan struct{}
}

// share is the directory that the guest shares with this process.
func (m *machine) share() string { return filepath.Join(m.dir, m.node.name()) }

// logs are the files in the shared directory that say why a node is not ready.
var logs = []string{"console", "containerd.log", "import.log", "kubelet.log"}

// clockParameters make a node use the ACPI timer as its clock. An emulated node on a busy
// machine may measure a wrong frequency of its TSC at the start: one node's clock ran 27
// times too fast, and everything on it timed out.
const clockParameters = "tsc=unstable clocksource=acpi_pm"

// boot starts the guest, which ends with this process.
func (m *machine) boot(ctx context.Context) error {
	if err := m.writeShare(); err != nil {
		return err
	}
	console := filepath.Join(m.share(), "console")
	ctx, m.stop = context.WithCancel(ctx)
	cmd := m.lab.Command(ctx, vm.Machine{
		Disk: m.disk, Tap: m.node.tap(), MAC: m.node.mac(), Shares: map[string]string{"node": m.share()},
		Memory: nodeMemory, Console: console, Parameters: clockParameters,
	})
	ended := make(chan struct{})
	m.ended = ended
	go func() {
		defer close(ended)
		if err := run(cmd); ctx.Err() == nil {
			fmt.Fprintf(os.Stderr, "%s ended: %v\n", m.node.name(), withEndOf(console, err))
		}
	}()
	return nil
}

// writeShare writes what the guest reads when it starts.
func (m *machine) writeShare() error {
	n := m.node
	files := map[string][]byte{
		"env":             fmt.Appendf(nil, "NAME=%s\nADDRESSES=%s,%s\n", n.name(), n.address4(), n.address6()),
		"network":         []byte(n.networkScript(m.others)),
		"cni.conflist":    []byte(n.cni()),
		"kubeconfig":      m.server.KubeconfigFor(n.user(), m.server.URL()),
		"authorized_keys": []byte(m.authorized),
	}
	for _, archive := range m.archives {
		image, err := os.ReadFile(archive)
		if err != nil {
			return err
		}
		files["images/"+filepath.Base(archive)] = image
	}
	for name, content := range files {
		if err := write(m.share(), name, content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// restart kills the guest and boots it again, with the disk as it was at first.
func (m *machine) restart(ctx context.Context) error {
	m.stop()
	select {
	case <-m.ended:
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := os.RemoveAll(m.share()); err != nil {
		return err
	}
	return m.boot(ctx)
}

// why returns the last lines of the node's logs, each after a line break.
func (m *machine) why() string {
	var text strings.Builder
	for _, name := range logs {
		content, err := os.ReadFile(filepath.Join(m.share(), name))
		if err != nil {
			fmt.Fprintf(&text, "\n%s's %s: %v", m.node.name(), name, err)
			continue
		}
		fmt.Fprintf(&text, "\n%s's %s ends with: %s", m.node.name(), name, lastLines(string(content), 3))
	}
	return text.String()
}

// nodeLimit is how long a node may take to be ready. An emulated node on an idle machine
// takes half a minute; a few have hung while they started.
func nodeLimit(nodes int) time.Duration { return 2*time.Minute + time.Duration(nodes)*time.Minute }

// restarts is how often a node that is not ready in time is started again.
const restarts = 2

// awaitNodes waits until all nodes are ready. A node that does not become ready starts
// again: no proxy runs yet, so that this hides nothing of what is tested.
func (s *supervisor) awaitNodes(ctx context.Context) error {
	limit := nodeLimit(len(s.machines))
	for attempt := 0; ; attempt++ {
		err := s.kubectl(ctx, nil, "wait", "--for=condition=Ready", "node", "--all", "--timeout="+limit.String())
		if err == nil {
			return nil
		}
		late, listErr := s.lateMachines(ctx)
		if listErr != nil {
			return errors.Join(err, listErr)
		}
		for _, m := range late {
			if attempt == restarts || ctx.Err() != nil {
				err = fmt.Errorf("%w\n%s is not ready%s", err, m.node.name(), m.why())
				continue
			}
			s.say("%s is not ready after %s and starts again%s", m.node.name(), limit, m.why())
			if err := m.restart(ctx); err != nil {
				return err
			}
		}
		if attempt == restarts || ctx.Err() != nil {
			return err
		}
	}
}

// conditions lists the nodes with the status of their condition Ready.
const conditions = `{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`

// lateMachines returns the machines of the nodes that are not ready.
func (s *supervisor) lateMachines(ctx context.Context) (late []*machine, err error) {
	out, err := s.ask(ctx, "get", "nodes", "-o", "jsonpath="+conditions)
	if err != nil {
		return nil, err
	}
	ready := strings.Fields(out)
	for _, m := range s.machines {
		if !slices.Contains(ready, m.node.name()+"=True") {
			late = append(late, m)
		}
	}
	return late, nil
}
