package walk

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

//go:embed hold.sh
var holdScript string

//go:embed objects.yaml
var objects string

//go:embed clients.yaml
var clientsFormat string

// state is what a client has printed of a target.
type state struct{ held, fresh, failed int }

// clients are pods on each node, each node itself, and an external client.
type clients struct {
	w *Walk
	// external is the client outside of the nodes, and log its output.
	external *exec.Cmd
	log      string
	// last is what was seen at the last check, by client and target.
	last map[string]state
	// targets is how many connections there are, of all clients.
	targets int
}

// start makes the Service and its clients, and waits until each target answers.
func (c *clients) start(ctx context.Context) error {
	agnhost, err := c.w.Config.AgnhostImage(ctx)
	if err != nil {
		return err
	}
	script := filepath.Join(c.w.dir, "hold.sh")
	if err := os.WriteFile(script, []byte(holdScript), 0o644); err != nil {
		return err
	}
	if err := c.w.apply(ctx, strings.ReplaceAll(objects, "AGNHOST", agnhost)); err != nil {
		return err
	}
	for _, command := range []string{
		"kubectl create configmap walk --dry-run=client --output yaml --from-file=" + script + " | kubectl apply --filename -",
		"kubectl wait service/web --for jsonpath='{.status.loadBalancer.ingress[1].ip}' --timeout 2m",
		"kubectl rollout status statefulset/web --timeout 10m",
	} {
		if _, err := c.w.shell(ctx, command); err != nil {
			return err
		}
	}
	s, err := c.service(ctx)
	if err != nil {
		return err
	}
	c.targets = 0
	for kind, targets := range map[string][]string{
		"pod":  {"cluster4=" + s.cluster[0] + "/80", "cluster6=" + s.cluster[1] + "/80", "balanced=" + s.balanced[0] + "/80", "port=$(HOST_IP)/" + s.port},
		"host": {"cluster4=" + s.cluster[0] + "/80", "cluster6=" + s.cluster[1] + "/80", "port=$(HOST_IP)/" + s.port},
	} {
		c.targets += len(targets) * c.w.Config.Nodes
		manifest := strings.NewReplacer("AGNHOST", agnhost, "KIND", kind, "HOST_NETWORK", strconv.FormatBool(kind == "host"),
			"TARGETS", `["`+strings.Join(targets, `", "`)+`"]`).Replace(clientsFormat)
		if err := c.w.apply(ctx, manifest); err != nil {
			return err
		}
	}
	for _, kind := range []string{"pod", "host"} {
		if _, err := c.w.shell(ctx, "kubectl rollout status daemonset/client-"+kind+" --timeout 10m"); err != nil {
			return err
		}
	}
	return c.startExternal(ctx, s, script)
}

// service is where clients reach the Service.
type service struct {
	cluster, balanced []string
	port              string
}

func (c *clients) service(ctx context.Context) (s service, err error) {
	out, err := c.w.shell(ctx, `kubectl get service web --output jsonpath='{.spec.clusterIPs[*]} {.status.loadBalancer.ingress[*].ip} {.spec.ports[0].nodePort}'`)
	words := strings.Fields(out)
	if err != nil || len(words) != 5 {
		return s, errors.Join(fmt.Errorf("addresses of the Service: %q", out), err)
	}
	return service{words[:2], words[2:4], words[4]}, nil
}

// startExternal starts the client outside of the nodes. The lab's balancer spreads
// connections over the nodes that pass its health check, and moves them when a node
// fails it; this client's connections stay with the first node, as those of a cloud's
// balancer do.
func (c *clients) startExternal(ctx context.Context, s service, script string) error {
	nodes, err := c.w.shell(ctx, `kubectl get nodes --output jsonpath='{range .items[*]}{.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}'`)
	if err != nil {
		return err
	}
	targets := []string{"balanced4=" + s.balanced[0] + "/80", "balanced6=" + s.balanced[1] + "/80"}
	for i, line := range strings.Split(strings.TrimSpace(nodes), "\n") {
		addresses := strings.Fields(line)
		targets = append(targets, fmt.Sprintf("port%d=%s/%s", i+1, addresses[0], s.port))
		if i > 0 || len(addresses) < 2 {
			continue
		}
		for family, address := range addresses[:2] {
			if _, err := c.w.shell(ctx, fmt.Sprintf("ip -%d rule del priority 10 2>/dev/null || true; ip -%[1]d rule add to %[2]s lookup 77 priority 10 && ip -%[1]d route replace %[2]s via %[3]s table 77",
				[]int{4, 6}[family], s.balanced[family], address)); err != nil {
				return err
			}
		}
	}
	c.targets += len(targets)
	c.log = filepath.Join(c.w.dir, "external.log")
	log, err := os.Create(c.log)
	if err != nil {
		return err
	}
	defer log.Close()
	if c.external, err = c.w.Config.Inside(context.Background(), "bash", append([]string{script}, targets...)...); err != nil {
		return err
	}
	c.external.Stdout, c.external.Stderr = log, log
	// Its loops end with it.
	c.external.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return c.external.Start()
}

func (c *clients) stop() {
	if c.external != nil && c.external.Process != nil {
		_ = syscall.Kill(-c.external.Process.Pid, syscall.SIGKILL)
		_ = c.external.Wait()
	}
}

// progressLimit is how long all connections together may take to answer, on an emulated
// cluster.
const progressLimit = 4 * time.Minute

// check waits until every connection has answered again since the last check, and
// returns an error if one has broken. It returns how many connections there are, and how
// many new ones failed since the last check.
func (c *clients) check(ctx context.Context) (held, failed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, progressLimit)
	defer cancel()
	for {
		states, broken, err := c.read(ctx)
		if err != nil {
			return 0, 0, err
		}
		if len(broken) > 0 {
			return 0, 0, fmt.Errorf("connections broke: %s", strings.Join(broken, ", "))
		}
		silent := c.silent(states)
		if len(silent) == 0 && len(states) == c.targets {
			for name, s := range states {
				failed += s.failed - c.last[name].failed
			}
			c.last = states
			return len(states), failed, nil
		}
		select {
		case <-ctx.Done():
			return 0, 0, fmt.Errorf("of %d connections, %d were seen; those that do not answer: %s", c.targets, len(states), strings.Join(silent, ", "))
		case <-time.After(2 * time.Second):
		}
	}
}

// silent returns the connections that have not answered since the last check. A client
// that is gone is one as well.
func (c *clients) silent(states map[string]state) (names []string) {
	for name, s := range states {
		if s.held <= c.last[name].held {
			names = append(names, name)
		}
	}
	for name := range c.last {
		if _, ok := states[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// read reads the output of all clients.
func (c *clients) read(ctx context.Context) (states map[string]state, broken []string, err error) {
	states = map[string]state{}
	names, err := c.w.shell(ctx, `kubectl get pods --selector 'app in (client-pod,client-host)' --output jsonpath='{range .items[*]}{.metadata.name},{.spec.nodeName},{.status.phase}{"\n"}{end}'`)
	if err != nil {
		return nil, nil, err
	}
	logs := map[string]string{}
	for name := range strings.FieldsSeq(names) {
		parts := strings.Split(name, ",")
		log, err := c.w.shell(ctx, "kubectl logs "+parts[0])
		if err != nil {
			return nil, nil, err
		}
		kind := strings.Join(strings.Split(parts[0], "-")[:2], "-")
		logs[kind+" on "+parts[1]] = log
	}
	external, err := os.ReadFile(c.log)
	if err != nil {
		return nil, nil, err
	}
	logs["external"] = string(external)
	for _, client := range slices.Sorted(maps.Keys(logs)) {
		broken = append(broken, parseLog(client, logs[client], states)...)
	}
	return states, broken, nil
}

// parseLog adds what a client has printed, and returns what broke.
func parseLog(client, log string, states map[string]state) (broken []string) {
	for line := range strings.Lines(log) {
		words := strings.Fields(line)
		if len(words) != 3 {
			continue
		}
		n, err := strconv.Atoi(words[2])
		if err != nil {
			continue
		}
		name := client + " to " + words[1]
		s := states[name]
		switch words[0] {
		case "held":
			s.held = n
		case "new":
			s.fresh = n
		case "failed":
			s.failed++
		case "broken":
			broken = append(broken, fmt.Sprintf("%s after %d requests", name, n))
			continue
		default:
			continue
		}
		states[name] = s
	}
	return broken
}

// renew ends all connections and opens others.
func (c *clients) renew(ctx context.Context) error {
	c.stop()
	for _, command := range []string{
		"kubectl rollout restart daemonset/client-pod daemonset/client-host",
		"kubectl rollout status daemonset/client-pod --timeout 10m",
		"kubectl rollout status daemonset/client-host --timeout 10m",
	} {
		if _, err := c.w.shell(ctx, command); err != nil {
			return err
		}
	}
	c.last = nil
	return c.restartExternal()
}

// restartExternal starts the external client again, with the same targets.
func (c *clients) restartExternal() error {
	log, err := os.Create(c.log)
	if err != nil {
		return err
	}
	defer log.Close()
	args := c.external.Args
	c.external = exec.Command(args[0], args[1:]...)
	c.external.Stdout, c.external.Stderr = log, log
	// Its loops end with it.
	c.external.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return c.external.Start()
}
