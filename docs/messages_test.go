package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestErrorMessagesAreExplained checks that the troubleshooting guide has each message that
// the program logs as an error.
func TestErrorMessagesAreExplained(t *testing.T) {
	guide, err := os.ReadFile("guides/troubleshoot.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, root := range []string{"../pkg", "../cmd"} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if message := errorMessage(n); message != "" {
					found++
					if !strings.Contains(string(guide), `"`+message+`"`) {
						t.Errorf("%s logs an error that the troubleshooting guide does not explain: %s", path, message)
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found < 20 {
		t.Errorf("found %d messages", found)
	}
}

// errorMessage returns the message of a call of klog's Error or ErrorS, or "".
func errorMessage(n ast.Node) string {
	call, ok := n.(*ast.CallExpr)
	if !ok || len(call.Args) < 2 {
		return ""
	}
	called, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || called.Sel.Name != "Error" && called.Sel.Name != "ErrorS" {
		return ""
	}
	literal, ok := call.Args[1].(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return ""
	}
	message, err := strconv.Unquote(literal.Value)
	if err != nil {
		return ""
	}
	return message
}
