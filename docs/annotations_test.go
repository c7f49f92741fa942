package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// ownName is an annotation, or another name of ours of that form, in the code.
var ownName = regexp.MustCompile(`"(kube-ipvs\.io/[a-z-]+)"`)

// TestAnnotationReference checks that the page names each annotation of the code.
func TestAnnotationReference(t *testing.T) {
	page, err := os.ReadFile("reference/annotations.md")
	if err != nil {
		t.Fatal(err)
	}
	others := map[string]bool{"kube-ipvs.io/kube-ipvs": true} // the controller of Events
	found := 0
	err = filepath.WalkDir("../pkg", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range ownName.FindAllStringSubmatch(string(text), -1) {
			if others[match[1]] {
				continue
			}
			found++
			if !strings.Contains(string(page), "`"+match[1]+"`") {
				t.Errorf("%s: %s is not in docs/reference/annotations.md", path, match[1])
			}
		}
		return err
	})
	if err != nil || found < 5 {
		t.Fatalf("%d annotations, %v", found, err)
	}
}
