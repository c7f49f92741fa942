package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// annotation is the name of an annotation in the code, without service.AnnotationPrefix.
var annotation = regexp.MustCompile(`AnnotationPrefix \+ "([a-z-]+)"`)

// TestAnnotationReference checks that the page names each annotation of the code.
func TestAnnotationReference(t *testing.T) {
	page, err := os.ReadFile("reference/annotations.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	err = filepath.WalkDir("../pkg", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range annotation.FindAllStringSubmatch(string(text), -1) {
			found++
			if name := service.AnnotationPrefix + match[1]; !strings.Contains(string(page), "`"+name+"`") {
				t.Errorf("%s: %s is not in docs/reference/annotations.md", path, name)
			}
		}
		return err
	})
	if err != nil || found < 8 {
		t.Fatalf("%d annotations, %v", found, err)
	}
}
