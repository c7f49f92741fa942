package docs

import (
	"os"
	"path/filepath"
	"regexp"
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

// TestWorkflowsArePinned checks that each action and each container of a workflow has a
// digest, which cannot be moved as a tag can.
func TestWorkflowsArePinned(t *testing.T) {
	files, err := filepath.Glob("../.github/workflows/*")
	if err != nil || len(files) == 0 {
		t.Fatalf("found %d workflows: %v", len(files), err)
	}
	foreign := regexp.MustCompile(`(?m)^[ -]*(?:uses|container|image): *([^\s{]+)`)
	pinned := regexp.MustCompile(`@([0-9a-f]{40}|sha256:[0-9a-f]{64})$`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found := foreign.FindAllStringSubmatch(string(text), -1)
		if len(found) == 0 {
			t.Errorf("%s: no action found", file)
		}
		for _, match := range found {
			if !pinned.MatchString(match[1]) && !strings.HasPrefix(match[1], "./") {
				t.Errorf("%s: %s has no digest", file, match[1])
			}
		}
	}
}

// TestPullRequestsCannotWrite checks that no job that builds a pull request may write to the
// repository.
func TestPullRequestsCannotWrite(t *testing.T) {
	files, err := filepath.Glob("../.github/workflows/*")
	if err != nil || len(files) == 0 {
		t.Fatalf("found %d workflows: %v", len(files), err)
	}
	jobs := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var workflow struct {
			On   map[string]any `json:"true"` // "on" is a boolean in YAML 1.1
			Jobs map[string]struct {
				If          string            `json:"if"`
				Permissions map[string]string `json:"permissions"`
			} `json:"jobs"`
		}
		if err := yaml.Unmarshal(text, &workflow); err != nil {
			t.Fatal(err)
		}
		if _, ok := workflow.On["pull_request"]; !ok {
			continue
		}
		for name, job := range workflow.Jobs {
			jobs++
			for _, what := range []string{"contents", "packages", "id-token"} {
				if job.Permissions[what] == "write" && job.If != "github.ref == 'refs/heads/main'" {
					t.Errorf("%s: pull requests run the job %s with %s: write", file, name, what)
				}
			}
		}
	}
	if jobs < 4 {
		t.Errorf("found %d jobs of pull requests", jobs)
	}
}
