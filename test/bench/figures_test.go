package bench

import (
	"encoding/xml"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/performance/dataplane.md and its drawings")

// TestPage fails if the page or a drawing is stale.
func TestPage(t *testing.T) {
	figures, err := LoadFigures("instructions/figures.json")
	if err != nil {
		t.Fatal(err)
	}
	floors, err := LoadFigures("instructions/floors.json")
	if err != nil {
		t.Fatal(err)
	}
	untracked, err := LoadFigures("instructions/untracked.json")
	if err != nil {
		t.Fatal(err)
	}
	page, err := figures.Page(floors, untracked)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"dataplane.md": page, "dataplane.svg": figures.SVG(), "dataplane-ablation.svg": figures.AblationSVG()} {
		path := filepath.Join("../../docs/performance", name)
		if *update {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s is not what the figures give (%v): go test ./test/bench -run '^TestPage$' -update", path, err)
		}
	}
}

func sampleFigures() *Figures {
	f := &Figures{Facts: map[string]string{}}
	put := func(subject, variant string, value int) {
		f.Put(Figure{Services: 10, World: "default", Subject: subject, Variant: variant, Path: "ClusterIP", Workload: "TCP connection", Value: value})
	}
	put(Direct, "", 200000)
	put("floor", "", 250000)
	put(KubeIPVS, "", 300000)
	put(KubeIPVS, "without <a>", 299000)
	return f
}

// A later figure replaces an earlier one with the same key, also after saving and
// loading.
func TestFiguresAreReplaced(t *testing.T) {
	f := sampleFigures()
	f.Put(Figure{Services: 10, World: "default", Subject: "floor", Path: "ClusterIP", Workload: "TCP connection", Value: 260000})
	path := filepath.Join(t.TempDir(), "figures.json")
	if err := f.Save(path); err != nil {
		t.Fatal(err)
	}
	read, err := LoadFigures(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(read.List) != 4 {
		t.Errorf("%d figures, want 4: %v", len(read.List), read.List)
	}
	if over, ok := read.Over(read.List[1]); !ok || over != 60000 {
		t.Errorf("the floor is %d (%v) over the direct path, want 60000", over, ok)
	}
}

func TestFigureTables(t *testing.T) {
	f := sampleFigures()
	all := func(Figure) bool { return true }
	for _, line := range []string{"| direct | 200,000 |", "| floor | +50,000 |", "| kube-ipvs, without <a> | +99,000 |"} {
		if table := f.Table(all); !strings.Contains(table, line+"\n") {
			t.Errorf("no line %q in\n%s", line, table)
		}
	}
	if table := f.Saved(all); !strings.Contains(table, "| without <a> | −1,000 |\n") {
		t.Error(table)
	}
	if table := f.InFloors(); !strings.Contains(table, "| default | ClusterIP | kube-ipvs | +100,000 / +50,000, 2.00 |\n") {
		t.Error(table)
	}
	for _, drawing := range []string{f.SVG(), f.AblationSVG()} {
		decoder := xml.NewDecoder(strings.NewReader(drawing))
		for {
			if _, err := decoder.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("%v in\n%s", err, drawing)
			}
		}
	}
}
