package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestReleaseCheck checks what the release workflow checks before it publishes: the section
// of the CHANGELOG, and the tags of the chart and of the manifests.
func TestReleaseCheck(t *testing.T) {
	version := appVersion(t)
	for name, c := range map[string]struct {
		version, file, old, new string
		want                    string // "" if nothing is wrong
	}{
		"complete":          {version: version},
		"another version":   {version: "v9.9.9", want: "CHANGELOG.md has no section v9.9.9"},
		"no section":        {version: version, file: "CHANGELOG.md", old: "## " + version, new: "## v0.0.9", want: "CHANGELOG.md has no section " + version},
		"appVersion":        {version: version, file: "deploy/chart/Chart.yaml", old: "appVersion: " + version, new: "appVersion: v0.0.9", want: `lacks "appVersion: ` + version},
		"chart's version":   {version: version, file: "deploy/chart/Chart.yaml", old: "\nversion: ", new: "\nversion: 9", want: `lacks "version: `},
		"base":              {version: version, file: "deploy/base/daemonset.yaml", old: "kube-ipvs:" + version, new: "kube-ipvs:v0.0.9", want: "deploy/base/daemonset.yaml has the image"},
		"generated":         {version: version, file: "deploy/install.yaml", old: "kube-ipvs:" + version, new: "kube-ipvs:v0.0.9", want: "deploy/install.yaml has the image"},
		"cleanup":           {version: version, file: "deploy/cleanup.yaml", old: "kube-ipvs:" + version, new: "kube-ipvs:v0.0.9", want: "deploy/cleanup.yaml has the image"},
		"preflight, no tag": {version: version, file: "deploy/preflight.yaml", old: "kube-ipvs:" + version, new: "kube-ipvs", want: "deploy/preflight.yaml has the image of no version"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for _, file := range []string{
				"hack/release-check", "hack/changelog", "CHANGELOG.md", "deploy/chart/Chart.yaml",
				"deploy/base/daemonset.yaml", "deploy/install.yaml", "deploy/preflight.yaml", "deploy/cleanup.yaml",
			} {
				text := strings.ReplaceAll(read(t, filepath.Join("..", file)), "## Unreleased", "## "+version+" - 2027-01-01")
				if file == c.file {
					if !strings.Contains(text, c.old) {
						t.Fatalf("%s has no %q", file, c.old)
					}
					text = strings.Replace(text, c.old, c.new, 1)
				}
				at := filepath.Join(dir, file)
				if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(at, []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			out, err := exec.Command(filepath.Join(dir, "hack/release-check"), c.version).CombinedOutput()
			if (err == nil) != (c.want == "") || !strings.Contains(string(out), c.want) {
				t.Errorf("%v: %s, want %q", err, out, c.want)
			}
		})
	}
}

func appVersion(t *testing.T) string {
	t.Helper()
	for line := range strings.Lines(read(t, "chart/Chart.yaml")) {
		if v, ok := strings.CutPrefix(line, "appVersion: "); ok {
			return strings.TrimSpace(v)
		}
	}
	t.Fatal("the chart has no appVersion")
	return ""
}
