package main

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra/doc"
)

var update = flag.Bool("update", false, "write docs/man")

// TestManPages checks that docs/man matches the commands.
func TestManPages(t *testing.T) {
	folder := filepath.Join("..", "..", "docs", "man")
	if *update {
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
		writeManPages(t, folder)
		return
	}
	want := t.TempDir()
	writeManPages(t, want)
	if diff := cmp.Diff(readPages(t, want), readPages(t, folder)); diff != "" {
		t.Errorf("docs/man is stale, make docs writes it (-want +got):\n%s", diff)
	}
}

// writeManPages writes a page for each command except the generated "completion". The
// pages have no date, which would make them stale the next day.
func writeManPages(t *testing.T, folder string) {
	t.Helper()
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := newCommand(nil)
	cmd.DisableAutoGenTag = true
	never := time.Unix(0, 0).UTC()
	if err := doc.GenManTree(cmd, &doc.GenManHeader{Section: "8", Source: "kube-ipvs", Manual: "kube-ipvs", Date: &never}, folder); err != nil {
		t.Fatal(err)
	}
	for name, text := range readPages(t, folder) {
		undated := strings.Replace(text, `"Jan 1970"`, `""`, 1)
		if err := os.WriteFile(filepath.Join(folder, name), []byte(undated), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func readPages(t *testing.T, folder string) map[string]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		out[filepath.Base(file)] = string(text)
	}
	return out
}
