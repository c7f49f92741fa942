package docs

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// TestDependabotKnowsTheModules checks that updates are proposed for each Go module.
func TestDependabotKnowsTheModules(t *testing.T) {
	text, err := os.ReadFile("../.github/dependabot.yml")
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Updates []struct {
			Ecosystem   string   `json:"package-ecosystem"`
			Directories []string `json:"directories"`
		} `json:"updates"`
	}
	if err := yaml.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	var directories []string
	for _, update := range config.Updates {
		if update.Ecosystem == "gomod" {
			directories = append(directories, update.Directories...)
		}
	}
	found := 0
	for _, pattern := range []string{"", "*", "*/*", "*/*/*", "*/*/*/*"} {
		modules, err := filepath.Glob(filepath.Join("..", pattern, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		for _, module := range modules {
			directory, err := filepath.Rel("..", filepath.Dir(module))
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(directory, ".cache") {
				continue
			}
			found++
			if !slices.ContainsFunc(directories, func(d string) bool {
				ok, _ := filepath.Match(d, filepath.Join("/", directory))
				return ok
			}) {
				t.Errorf("dependabot.yml lacks /%s", directory)
			}
		}
	}
	if found < 5 {
		t.Errorf("found %d modules", found)
	}
}
