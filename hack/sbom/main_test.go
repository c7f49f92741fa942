package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestEveryModuleIsNamed builds the program and compares the document with what
// `go version -m` finds in it.
func TestEveryModuleIsNamed(t *testing.T) {
	dir := t.TempDir()
	program, out := filepath.Join(dir, "kube-ipvs"), filepath.Join(dir, "sbom.json")
	build := exec.Command("go", "build", "-o", program, "../../cmd/proxy")
	// As it is released; with cgo, everything would be compiled anew.
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if err := run([]string{program, "v1.2.3", out}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var d document
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	named := map[string]component{}
	for _, c := range d.Components {
		named[c.Name] = c
	}
	listing, err := exec.Command("go", "version", "-m", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	modules := 0
	for line := range strings.Lines(string(listing)) {
		words := strings.Fields(line)
		if len(words) != 4 || words[0] != "dep" {
			continue
		}
		modules++
		c := named[words[1]]
		if c.Version != words[2] || len(c.Hashes) != 1 {
			t.Errorf("%s %s is in the program, and %+v in the document", words[1], words[2], c)
		}
	}
	if modules < 20 || len(named) != modules+1 || named["std"].Version == "" {
		t.Errorf("%d modules in the program, %d components in the document", modules, len(named))
	}
	if c := d.Metadata.Component; c.Name != "github.com/kube-ipvs/kube-ipvs" || c.Version != "v1.2.3" {
		t.Errorf("it is about %+v", c)
	}
}
