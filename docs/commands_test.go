package docs

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/upstream/walk"
)

// commandPages are the pages whose indented blocks are copied to a shell.
func commandPages(t *testing.T) []string {
	t.Helper()
	pages := []string{"README.md"}
	for _, pattern := range []string{"docs/guides/*.md", "docs/reference/*.md"} {
		found, err := filepath.Glob(filepath.Join("..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, page := range found {
			pages = append(pages, strings.TrimPrefix(page, "../"))
		}
	}
	return pages
}

// output is the beginning of blocks that show output or the content of a file.
var output = regexp.MustCompile(`^(SET-UP |--- |# kustomization.yaml|# cluster.yaml|\[\w+\]\n)`)

// commandBlocks calls a function with each block of commands of all pages.
func commandBlocks(t *testing.T, do func(*walk.Block)) {
	t.Helper()
	count := 0
	for _, page := range commandPages(t) {
		blocks, err := walk.Blocks("..", page)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range blocks {
			if !output.MatchString(b.Text) {
				count++
				do(b)
			}
		}
	}
	if count < 40 {
		t.Errorf("found %d blocks", count)
	}
}

// TestCommandsParse checks the syntax of all blocks of commands.
func TestCommandsParse(t *testing.T) {
	commandBlocks(t, func(b *walk.Block) {
		cmd := exec.Command("bash", "-n")
		cmd.Stdin = strings.NewReader(b.Text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s\n%s", b, err, out, b.Text)
		}
	})
}

var (
	value    = regexp.MustCompile(`--set(?:-string)?[= ]([A-Za-z][A-Za-z0-9.-]*)=`)
	path     = regexp.MustCompile(`(?:^|[\s'"])((?:deploy|docs|test|hack)/[\w./*-]*\w)`)
	makeCall = regexp.MustCompile("(?:^    |[`;] *|\n    |&& )make ([a-z0-9-]+)")
)

// TestDocumentedValues checks that the chart has each value that a page sets.
func TestDocumentedValues(t *testing.T) {
	text, err := os.ReadFile("../deploy/chart/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, page := range append(commandPages(t), "deploy/chart/README.md") {
		text, err := os.ReadFile(filepath.Join("..", page))
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range value.FindAllStringSubmatch(string(text), -1) {
			found++
			if !inSchema(schema, strings.Split(match[1], ".")) {
				t.Errorf("%s: the chart has no value %s", page, match[1])
			}
		}
	}
	if found < 30 {
		t.Errorf("found %d values", found)
	}
}

// inSchema reports whether an object of the schema may have a value at a path.
func inSchema(schema map[string]any, path []string) bool {
	if len(path) == 0 {
		return true
	}
	properties, _ := schema["properties"].(map[string]any)
	if below, ok := properties[path[0]].(map[string]any); ok {
		return inSchema(below, path[1:])
	}
	// An object without properties takes any.
	allowed, ok := schema["additionalProperties"].(bool)
	return properties == nil && (!ok || allowed)
}

// TestHelmUpgrades checks that upgrades start from the new chart's defaults. With
// --reuse-values a value cannot be removed (nodeSelector.kube-ipvs=null has no effect), and
// a new chart renders without its new defaults.
func TestHelmUpgrades(t *testing.T) {
	commandBlocks(t, func(b *walk.Block) {
		if strings.Contains(b.Text, "--reuse-values") {
			t.Errorf("%s: use --reset-then-reuse-values\n%s", b, b.Text)
		}
	})
}

// TestHelmInstallsOnce checks that a page installs the release once: the name is then in
// use, and another block of the page has to change the release instead.
func TestHelmInstallsOnce(t *testing.T) {
	first := map[string]*walk.Block{}
	commandBlocks(t, func(b *walk.Block) {
		if !strings.Contains(b.Text, "helm install kube-ipvs ") {
			return
		}
		if other := first[b.Page]; other != nil {
			t.Errorf("%s installs kube-ipvs, as %s does: use helm upgrade --install --reset-then-reuse-values", b, other)
		}
		first[b.Page] = b
	})
	if len(first) < 5 {
		t.Errorf("%d pages install kube-ipvs", len(first))
	}
}

// TestCommandsNameFiles checks that files of the repository exist that a command names.
func TestCommandsNameFiles(t *testing.T) {
	commandBlocks(t, func(b *walk.Block) {
		for _, match := range path.FindAllStringSubmatch(b.Text, -1) {
			if found, err := filepath.Glob(filepath.Join("..", match[1])); err != nil || len(found) == 0 {
				t.Errorf("%s: there is no %s", b, match[1])
			}
		}
	})
}

// TestMakeTargets checks that the Makefile has each target that a page names.
func TestMakeTargets(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, page := range append(commandPages(t), "CONTRIBUTING.md", "RELEASE.md", "test/e2e/README.md", "test/upstream/README.md", "docs/differences.md", "docs/reliability.md") {
		text, err := os.ReadFile(filepath.Join("..", page))
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range makeCall.FindAllStringSubmatch(string(text), -1) {
			found++
			if !regexp.MustCompile(`(?m)^([\w -]* )?` + match[1] + `( [\w -]*)?:`).Match(makefile) {
				t.Errorf("%s: the Makefile has no target %s", page, match[1])
			}
		}
	}
	if found < 30 {
		t.Errorf("found %d targets", found)
	}
}
