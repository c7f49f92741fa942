package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/plugin"
)

// Commands of the program and of the kubectl plugin in a page: in a block, or in a code
// span. What precedes them is the start of a command or the "--" of kubectl.
var (
	invocation = regexp.MustCompile("(?m)(?:^ *(?:\\$ )?|`|-- |; |\\$\\()(kube-ipvs|kubectl ipvs)((?: [^`\\n|;>)]*)?)")
	bareFlag   = regexp.MustCompile("`(--[a-z0-9-]+)[`= ]")
)

// othersFlags are flags of other programs that pages name alone: of kubelet, aws,
// iptables, Helm and kube-controller-manager.
var othersFlags = []string{
	"--node-labels", "--preserve", "--ctstate", "--set", "--endpoint-updates-batch-period", "--max-endpoints-per-slice",
}

// TestDocumentedFlags checks that every command of the program that a page shows, and
// every flag that it names, exists.
func TestDocumentedFlags(t *testing.T) {
	program, pluginCommand := newCommand(nil), plugin.New(nil)
	invocations, flags := 0, 0
	for page, text := range pagesForUsers(t) {
		text = strings.ReplaceAll(text, "\\\n", " ")
		for _, match := range invocation.FindAllStringSubmatch(text, -1) {
			root := program
			if match[1] != "kube-ipvs" {
				root = pluginCommand
			}
			invocations++
			if problem := unknown(root, program, strings.Fields(match[2])); problem != "" {
				t.Errorf("%s: %q: %s", page, strings.TrimSpace(match[1]+match[2]), problem)
			}
		}
		for _, match := range bareFlag.FindAllStringSubmatch(text, -1) {
			flags++
			name := strings.TrimPrefix(match[1], "--")
			if !slices.Contains(othersFlags, match[1]) && !hasFlag(program, name) && !hasFlag(pluginCommand, name) {
				t.Errorf("%s: no command has the flag %s", page, match[1])
			}
		}
	}
	if invocations < 50 || flags < 100 {
		t.Errorf("found %d commands and %d flags", invocations, flags)
	}
}

// pagesForUsers returns the text of all pages for users, by name.
func pagesForUsers(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, root := range []string{"README.md", "CONTRIBUTING.md", "docs", "deploy/chart/README.md", "test"} {
		err := filepath.WalkDir(filepath.Join("../..", root), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".md" {
				return err
			}
			text, err := os.ReadFile(path)
			out[strings.TrimPrefix(path, "../../")] = string(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// unknown returns what the program does not have of a command line. Commands that the
// plugin passes on have the flags of the program.
func unknown(root, program *cobra.Command, args []string) string {
	if i := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "#") }); i >= 0 {
		args = args[:i]
	}
	cmd, rest, err := root.Find(args)
	if err != nil {
		return err.Error()
	}
	passedOn, _, _ := program.Find(args)
	for _, a := range rest {
		a = strings.Trim(strings.TrimRight(a, ",.:"), "\"'[]")
		name, _, _ := strings.Cut(strings.TrimLeft(a, "-"), "=")
		switch {
		case !strings.HasPrefix(a, "-") || a == "-" || a == "--":
			continue
		case strings.HasPrefix(a, "--") && (has(cmd, name) || has(passedOn, name)):
			continue
		case !strings.HasPrefix(a, "--") && (hasShort(cmd, name) || hasShort(passedOn, name)):
			continue
		}
		return "there is no flag " + a
	}
	return ""
}

func has(cmd *cobra.Command, name string) bool {
	return name == "help" || cmd.Flags().Lookup(name) != nil || cmd.InheritedFlags().Lookup(name) != nil
}

func hasShort(cmd *cobra.Command, name string) bool {
	return name != "" && (cmd.Flags().ShorthandLookup(name[:1]) != nil || cmd.InheritedFlags().ShorthandLookup(name[:1]) != nil)
}

// hasFlag reports whether a command or one below it has the flag.
func hasFlag(cmd *cobra.Command, name string) bool {
	return has(cmd, name) || slices.ContainsFunc(cmd.Commands(), func(c *cobra.Command) bool { return hasFlag(c, name) })
}
