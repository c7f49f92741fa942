package config

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/component-base/version/verflag"
)

var update = flag.Bool("update", false, "write docs/reference/flags.md")

// TestFlagReference checks that docs/reference/flags.md matches the flags.
func TestFlagReference(t *testing.T) {
	checkPage(t, "flags.md", flagReference())
}

// checkPage compares a page of docs/reference with what it should be, or writes it.
func checkPage(t *testing.T, name, want string) {
	t.Helper()
	page := filepath.Join("..", "..", "docs", "reference", name)
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("docs/reference/%s is stale, make docs writes it (-want +got):\n%s", name, diff)
	}
}

func flagReference() string {
	var page strings.Builder
	page.WriteString("# Flags\n\nGenerated from the code by `make docs`. kube-proxy's flags mean what they mean\nto kube-proxy. With `--config` they are ignored, as in kube-proxy: only the\nflags of the first two sections, and those of logging, still apply.\n")
	sections := NewOptions().Flags()
	verflag.AddFlags(sections.FlagSet("general")) // as the command does
	for _, s := range []struct{ name, title string }{
		{"general", "General"},
		{"own", "kube-ipvs"},
		{"kube-proxy", "kube-proxy"},
		{"logging", "Logging"},
		{"ignored", "Accepted and ignored"},
	} {
		fmt.Fprintf(&page, "\n## %s\n\n| flag | default | meaning |\n|---|---|---|\n", s.title)
		sections.FlagSet(s.name).VisitAll(func(f *pflag.Flag) {
			text := f.Usage
			if f.Deprecated != "" {
				text += " Deprecated: " + f.Deprecated + "."
			}
			fmt.Fprintf(&page, "| `--%s` | %s | %s |\n", f.Name, inCode(f.DefValue), inCell(text))
		})
	}
	return page.String()
}

func inCode(text string) string {
	if text == "" || text == "[]" {
		return ""
	}
	return "`" + text + "`"
}

// inCell escapes a text for a cell of a table.
func inCell(text string) string {
	return strings.NewReplacer("\n", " ", "|", "\\|", "<", "&lt;").Replace(text)
}

// TestDocumentFlags gives each field that has a flag another value, and checks that the flags
// keep it when they are created for the document, and that they override a file.
func TestDocumentFlags(t *testing.T) {
	var document KubeIPVSConfiguration
	setOwnDefaults(&document)
	o := NewOptions()
	documentFlags(&document).VisitAll(func(f *pflag.Flag) {
		value := another(f)
		if err := errors.Join(f.Value.Set(value), o.flags.document.Set(f.Name, value)); err != nil {
			t.Errorf("%s: %v", f.Name, err)
		}
	})
	text := func(c *KubeIPVSConfiguration) string {
		data, err := json.MarshalIndent(c, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	want := text(&document)
	documentFlags(&document)
	if diff := cmp.Diff(want, text(&document)); diff != "" {
		t.Errorf("the flags changed the document (-before +after):\n%s", diff)
	}
	var file KubeIPVSConfiguration
	setOwnDefaults(&file)
	if err := o.overOwn(&file); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, text(&file)); diff != "" {
		t.Errorf("flags over a file (-want +got):\n%s", diff)
	}
}
