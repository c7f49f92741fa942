package plan_test

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A plan depends only on its input: the package imports nothing that can access the
// kernel, the API or the clock. Imports of this module are not checked; only their
// plain values are used.
func TestPure(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range parsed.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if !pure(path) {
				t.Errorf("%s imports %s", file, path)
			}
		}
	}
}

func pure(path string) bool {
	if strings.HasPrefix(path, "github.com/kube-ipvs/kube-ipvs/pkg/") {
		return slices.Contains([]string{"ip", "ipset", "ipvs", "nft", "nat", "routing", "service", "sysctl"}, filepath.Base(path))
	}
	return slices.Contains([]string{"cmp", "fmt", "hash/fnv", "maps", "math/bits", "net/netip", "slices", "strings", "k8s.io/apimachinery/pkg/util/sets"}, path)
}

func TestPureRefuses(t *testing.T) {
	for _, path := range []string{
		"time", "os", "os/exec", "net", "syscall", "context", "math/rand", "golang.org/x/sys/unix",
		"github.com/vishvananda/netlink", "k8s.io/client-go/rest", "k8s.io/api/core/v1",
		"github.com/kube-ipvs/kube-ipvs/pkg/reconcile", "github.com/kube-ipvs/kube-ipvs/pkg/source/apiserver",
	} {
		if pure(path) {
			t.Errorf("%s counts as pure", path)
		}
	}
}
