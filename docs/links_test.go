// Package docs has no code: it is what holds the pages to what they speak of.
package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// TestLinks follows every link between pages, to the heading if it names one.
func TestLinks(t *testing.T) {
	pages := 0
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() && strings.HasPrefix(d.Name(), ".") && len(d.Name()) > 2 {
			return filepath.SkipDir
		}
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		pages++
		text, err := os.ReadFile(path)
		for _, match := range link.FindAllStringSubmatch(string(text), -1) {
			if problem := follow(path, match[1]); problem != "" {
				t.Errorf("%s: %s: %s", path, match[1], problem)
			}
		}
		return err
	})
	if err != nil || pages < 5 {
		t.Fatalf("%d pages, %v", pages, err)
	}
}

// follow tells what is wrong with a link. Those to other places are not asked.
func follow(page, target string) string {
	if strings.Contains(target, "://") {
		return ""
	}
	file, heading, _ := strings.Cut(target, "#")
	path := page
	if file != "" {
		path = filepath.Join(filepath.Dir(page), file)
	}
	text, err := os.ReadFile(path)
	if info, statErr := os.Stat(path); statErr == nil && info.IsDir() {
		err = nil
	}
	switch {
	case err != nil:
		return "there is no such file"
	case heading != "" && !hasHeading(string(text), heading):
		return "there is no such heading"
	}
	return ""
}

var notInAnchor = regexp.MustCompile(`[^a-z0-9 _-]`)

// hasHeading looks for the heading that an anchor is made of.
func hasHeading(text, anchor string) bool {
	for line := range strings.Lines(text) {
		title := strings.TrimLeft(line, "#")
		if title == line {
			continue
		}
		made := notInAnchor.ReplaceAllString(strings.ToLower(strings.TrimSpace(title)), "")
		if strings.ReplaceAll(made, " ", "-") == anchor {
			return true
		}
	}
	return false
}
