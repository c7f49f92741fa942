package config

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write docs/reference/flags.md")

// TestFlagReference keeps docs/reference/flags.md at what the flags are.
func TestFlagReference(t *testing.T) {
	page := filepath.Join("..", "..", "docs", "reference", "flags.md")
	want := flagReference()
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
		t.Errorf("docs/reference/flags.md is stale, make docs writes it (-want +got):\n%s", diff)
	}
}

func flagReference() string {
	var page strings.Builder
	page.WriteString("# Flags\n\nMade from the code by `make docs`. What kube-ipvs does with kube-proxy's\nflags is what kube-proxy does. Beside `--config` only those of the first two\nsections, and logging's, count.\n")
	sections := NewOptions().Flags()
	for _, s := range []struct{ name, title string }{
		{"general", "What to do"},
		{"own", "kube-ipvs's own"},
		{"kube-proxy", "kube-proxy's"},
		{"logging", "Logging"},
		{"ignored", "Accepted, without effect"},
	} {
		fmt.Fprintf(&page, "\n## %s\n\n| flag | default | |\n|---|---|---|\n", s.title)
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

// inCell has a text stand in one cell of a table.
func inCell(text string) string {
	return strings.NewReplacer("\n", " ", "|", "\\|", "<", "&lt;").Replace(text)
}
