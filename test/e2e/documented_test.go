//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// documented compares the output of a command that the docs show with its real output,
// line by line. "..." stands for any lines. If the docs show several outputs of the
// command, only those with part in one of their lines are compared. It returns their
// number.
func documented(t *testing.T, command, part, output string) (found int) {
	t.Helper()
	for _, name := range []string{"reference/commands.md", "guides/scenarios.md"} {
		page, err := os.ReadFile(filepath.Join(os.Getenv("LAB_SRC"), "docs", name))
		if err != nil {
			t.Fatal(err)
		}
		for _, shown := range shownOf(string(page), command) {
			if !strings.Contains(shown, part) {
				continue
			}
			found++
			if line, same := sameText(shown, output); !same {
				t.Errorf("docs/%s shows output of %q that differs from this line on: %q\nshown:\n%s\nprinted:\n%s", name, command, line, shown, output)
			}
		}
	}
	return found
}

// shownOf returns the outputs below a command in a page, up to the next command or the
// end of the block.
func shownOf(page, command string) []string {
	var out []string
	for _, rest := range strings.Split(page, "\n$ "+command+"\n")[1:] {
		shown, _, _ := strings.Cut(rest, "\n```")
		shown, _, _ = strings.Cut(shown, "\n$ ")
		out = append(out, shown)
	}
	return out
}

// counts matches counts of connections at the end of a line.
var counts = regexp.MustCompile(`(:\d+ +\d+) +\d+ +\d+$`)

// sameText reports whether all shown lines were printed, and returns the first one that
// was not.
func sameText(shown, printed string) (string, bool) {
	lines := strings.Split(printed, "\n")
	gap := false
	for line := range strings.Lines(shown) {
		line = plain(line)
		if line == "..." {
			gap = true
			continue
		}
		for gap && len(lines) > 0 && plain(lines[0]) != line {
			lines = lines[1:]
		}
		if len(lines) == 0 || plain(lines[0]) != line {
			return line, false
		}
		lines, gap = lines[1:], false
	}
	return "", true
}

func plain(line string) string {
	return counts.ReplaceAllString(strings.TrimRight(line, " \n"), "$1")
}
