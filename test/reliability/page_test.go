package reliability

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/reliability.md")

const page = "../../docs/reliability.md"

// The page contains exactly what was recorded.
func TestPage(t *testing.T) {
	want, err := Page("figures")
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(page); err != nil || string(got) != want {
		t.Errorf("%s is not what the figures make of it (make reliability-page): %v", page, err)
	}
}

// Recorded figures appear on a later page. Ordinary test runs record nothing.
func TestRecord(t *testing.T) {
	folder := t.TempDir()
	t.Setenv("LAB_OUT", folder)
	kills := Figure{Name: "kills", Value: 1000, Shows: "at random times"}
	t.Setenv("RELIABILITY", "")
	Begin(t, Crash, "lab")(kills)
	if files, _ := filepath.Glob(folder + "/*"); files != nil {
		t.Errorf("outside of make reliability there came %q", files)
	}
	t.Setenv("RELIABILITY", "v1.2.3")
	Begin(t, Crash, "lab")(kills, Figure{Name: "longest gap", Value: 1.234, Unit: "s"})
	text, err := Page(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| kills | 1,000 | at random times |", "| longest gap | 1.23 s |  |", "`TestRecord`", "v1.2.3, Linux ", "Not measured."} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
