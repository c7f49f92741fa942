package walk

import (
	"context"
	"fmt"
	"regexp"
	"strings"
)

const (
	readme   = "README.md"
	install  = "docs/guides/install.md"
	migrate  = "docs/guides/migrate.md"
	commands = "docs/reference/commands.md"
)

// step is a block of commands that a reader of the guide copies.
type step struct {
	// page, section and index select the block.
	page, section string
	index         int
	// set are the values that the reader changes: names and values of assignments; or,
	// if replace, any text and what stands for it.
	set     map[string]string
	replace bool
	// commands stand for a block, if there is no page.
	commands string
	// ends is set if connections may end in this step. Clients are not checked after it.
	ends bool
	// then checks the result, if there is more to check than that no command fails.
	then func(ctx context.Context, w *Walk, printed string) error
}

func guide(section string, index int) step {
	return step{page: migrate, section: section, index: index}
}

// checked returns the step with a check of its result.
func (s step) checked(then func(context.Context, *Walk, string) error) step {
	s.then = then
	return s
}

const (
	prepare   = "1. Prepare"
	checkNode = "Check a node"
	keepOff   = "2. Keep kube-proxy off labelled nodes"
	onNoNode  = "3. Install kube-ipvs on no node"
	oneNode   = "4. One node"
	batches   = "5. In batches: 5, 25, 100 %"
	features  = "6. Features"
	remove    = "7. Remove kube-proxy"
	rollBack  = "Roll back"
	nftables  = "Back to nftables mode"
	cleanUp   = "Clean up"
)

// ending returns the step as one in which connections may end.
func (s step) ending() step {
	s.ends = true
	return s
}

// canary are the steps from the README to one node that kube-ipvs serves, and back.
func canary(mode string, values map[string]string) []step {
	settings := step{page: migrate, section: prepare, index: 0, set: values}
	placeholders := map[string]string{
		"https://10.0.0.10:6443": values["server"], "10.244.0.0/16": "'" + helmList(values["cidr"]) + "'",
		"registry.example/kube-ipvs": values["image"],
	}
	steps := []step{
		{page: readme, section: "Install", index: 1, set: placeholders, replace: true},
		settings,
		guide(prepare, 1),
		guide(prepare, 2).checked(prints("mode: ")),
		guide(keepOff, 0),
		guide(keepOff, 1).checked(runsAsBefore),
		guide(keepOff, 0),
		guide(onNoNode, 0).checked(runsNowhere),
		guide(checkNode, 0).checked(passes),
		guide(oneNode, 0),
		guide(oneNode, 1).checked(isServed),
	}
	if mode != "nftables" {
		return append(steps, guide(rollBack, 0).checked(runsNowhere))
	}
	return append(steps, guide(nftables, 0).checked(runsNowhere).ending(), guide(cleanUp, 0).ending(), guide(nftables, 1).ending(), renewed)
}

// back are the steps from all nodes to kube-proxy in a mode.
func back(mode string, nodes int) (steps []step) {
	if mode == "nftables" {
		steps = append(steps, guide(nftables, 2))
	}
	if mode != "ipvs" {
		steps = append(steps, renewed)
	}
	for range nodes {
		steps = append(steps, guide(rollBack, 1))
	}
	steps = append(steps, guide(rollBack, 2).checked(prints("ACTIVE")))
	if mode != "ipvs" {
		steps = append(steps, renewed, sourcesKept("!kube-ipvs"), renewed)
	}
	steps = append(steps, onNode(1), guide(cleanUp, 0), guide(cleanUp, 1).checked(isClean(nodes)))
	if mode == "nftables" {
		steps = append(steps, guide(nftables, 3).ending(), renewed)
	}
	return append(steps, guide(onNoNode, 1), guide(keepOff, 1).checked(runsAsBefore))
}

// everywhere are the steps from one node to all of them, with features and without.
func everywhere(mode string, nodes int) (steps []step) {
	steps = append(steps, guide(oneNode, 0), guide(oneNode, 1).checked(isServed))
	for n := range nodes - 1 {
		steps = append(steps, guide(batches, 0), guide(batches, 1))
		if n == 0 && mode != "nftables" {
			// The first batch goes back, and is migrated again.
			steps = append(steps, guide(rollBack, 1), guide(batches, 0), guide(batches, 1))
		}
	}
	return append(steps, plugin, guide(features, 0), guide(features, 1))
}

// forGood are the steps to a cluster without kube-proxy, and to one where it can come back.
func forGood(nodes int) []step {
	steps := []step{guide(keepOff, 0), guide(onNoNode, 0)}
	for range nodes {
		steps = append(steps, guide(batches, 0))
	}
	return append(steps, guide(batches, 1), guide(remove, 0).checked(leavesNothing), guide(remove, 1))
}

// onNode is what a reader does who repeats a command for another node.
func onNode(n int) step {
	return step{section: "", set: map[string]string{"node": fmt.Sprintf("node%d", n)}}
}

// renewed is not a block: all connections end, and others begin. Before the way back, that
// is in IPVS of kube-ipvs; after it, outside of IPVS.
var renewed = step{section: "clients end their connections and open others"}

// sourcesKept is not a block. It begins to clean up the selected nodes, on which processes have
// cluster IPs as the source of their connections. The cleanup keeps these addresses; it cannot end
// before the connections do.
func sourcesKept(nodes string) step {
	return step{commands: `for name in $(kubectl get nodes --selector '` + nodes + `' --output jsonpath='{.items[*].metadata.name}'); do
  sed -e "s,NODE_NAME,$name," -e "s,ghcr.io/kube-ipvs/kube-ipvs:.*,$image:$version," deploy/cleanup.yaml | kubectl apply --filename -
  until { kubectl --namespace kube-system logs kube-ipvs-cleanup-$name || true; kubectl --namespace kube-system logs --previous kube-ipvs-cleanup-$name || true; } 2>&1 |
    grep 'connections of this node have the source'; do sleep 1; done
done`}
}

// plugin is not a block: pluginWorks runs the commands of commands.
var plugin = step{section: "kubectl ipvs", page: commands}

// Steps returns the steps from kube-proxy in a mode to kube-ipvs and back. The short ones
// end when one node has been there and back.
func steps(mode string, nodes int, short bool, values map[string]string) []step {
	steps := canary(mode, values)
	if short && mode == "nftables" {
		return append(steps, guide(onNoNode, 1), guide(keepOff, 1).checked(runsAsBefore))
	}
	if short {
		return append(steps, onNode(1), guide(cleanUp, 0), guide(onNoNode, 1), guide(keepOff, 1).checked(runsAsBefore))
	}
	steps = append(steps, everywhere(mode, nodes)...)
	steps = append(steps, back(mode, nodes)...)
	if mode == "iptables" {
		steps = append(steps, forGood(nodes)...)
	}
	return steps
}

// direct are the steps to all nodes and back, without going back on the way.
func direct(mode string, nodes int, values map[string]string) []step {
	steps := []step{
		{page: migrate, section: prepare, index: 0, set: values},
		guide(prepare, 1),
		guide(keepOff, 0),
		guide(onNoNode, 0).checked(runsNowhere),
		guide(oneNode, 0),
		guide(oneNode, 1).checked(isServed),
	}
	for range nodes - 1 {
		steps = append(steps, guide(batches, 0), guide(batches, 1))
	}
	steps = append(steps, plugin, guide(features, 0))
	return append(steps, back(mode, nodes)...)
}

// passes: preflight has looked at the node, and found no error.
func passes(_ context.Context, _ *Walk, printed string) error {
	if bad := regexp.MustCompile(`(?m)^error .*`).FindString(printed); bad != "" || !strings.Contains(printed, "OK ") {
		return fmt.Errorf("preflight found %q", bad)
	}
	return nil
}

func prints(wants ...string) func(context.Context, *Walk, string) error {
	return func(_ context.Context, _ *Walk, printed string) error {
		for _, want := range wants {
			if !strings.Contains(printed, want) {
				return fmt.Errorf("did not print %q", want)
			}
		}
		return nil
	}
}

// runsNowhere: no pod of kube-ipvs is left, once those that are being deleted have ended, and
// kube-proxy serves all nodes.
func runsNowhere(ctx context.Context, w *Walk, _ string) error {
	out, err := w.shell(ctx, `kubectl --namespace kube-system wait pods --selector app.kubernetes.io/name=kube-ipvs --for=delete --timeout=1m >/dev/null 2>&1 || true
		kubectl --namespace kube-system get pods --selector app.kubernetes.io/name=kube-ipvs --output name
		kubectl --namespace kube-system get daemonset kube-proxy --output jsonpath='ready {.status.numberReady} of {.status.desiredNumberScheduled}'`)
	if want := fmt.Sprintf("ready %d of %[1]d", w.Config.Nodes); err == nil && strings.TrimSpace(out) != want {
		return fmt.Errorf("got %q, want %q", out, want)
	}
	return err
}

// isClean: the cleanup of many nodes has ended on each, and has left none of its pods.
func isClean(nodes int) func(context.Context, *Walk, string) error {
	return func(_ context.Context, _ *Walk, printed string) error {
		if ended := strings.Count(printed, " condition met"); ended != nodes || !strings.Contains(printed, "No resources found") {
			return fmt.Errorf("the cleanup ended on %d of %d nodes", ended, nodes)
		}
		return nil
	}
}

// runsAsBefore: kube-proxy's DaemonSet runs on nodes with and without the label.
func runsAsBefore(ctx context.Context, w *Walk, _ string) error {
	out, err := w.shell(ctx, `kubectl --namespace kube-system get daemonset kube-proxy --output jsonpath='{.spec.template.spec.affinity}'`)
	if err == nil && strings.TrimSpace(out) != "" {
		return fmt.Errorf("kube-proxy's affinity is %s", out)
	}
	return err
}

// isServed checks the output of the guide's verification, and that it is kube-ipvs that
// made the virtual servers: kube-proxy was not in IPVS mode before, or its process is gone.
func isServed(_ context.Context, _ *Walk, printed string) error {
	for _, want := range []string{"kube-ipvs v", "OK       kube-ipvs ", "ready"} {
		if !strings.Contains(strings.ReplaceAll(printed, "Kube-ipvs", "kube-ipvs"), want) {
			return fmt.Errorf("did not print %q", want)
		}
	}
	if bad := regexp.MustCompile(`(?m)^(warning|error) .*`).FindString(printed); bad != "" {
		return fmt.Errorf("printed %q", bad)
	}
	return nil
}

// leavesNothing: kube-ipvs runs on nodes without the label, too, and on no node is anything
// left of kube-proxy's modes.
func leavesNothing(ctx context.Context, w *Walk, _ string) error {
	selector, err := w.shell(ctx, `kubectl --namespace kube-system get daemonset kube-ipvs --output jsonpath='{.spec.template.spec.nodeSelector}'`)
	if err != nil || strings.Contains(selector, "kube-ipvs") {
		return fmt.Errorf("kube-ipvs runs only on nodes with %q: %w", selector, err)
	}
	for n := range w.Config.Nodes {
		out, err := w.onNode(ctx, n+1, "iptables-save | grep -e KUBE-SEP -e KUBE-SVC; nft list tables | grep kube-proxy; true")
		if err != nil || strings.TrimSpace(out) != "" {
			return fmt.Errorf("node%d has %q: %w", n+1, out, err)
		}
	}
	return nil
}
