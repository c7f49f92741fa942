package main

import (
	"flag"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/hack/oci"
)

var update = flag.Bool("update", false, "write testdata")

const kmod = "Package: kmod\nVersion: 30+20221128-1\nArchitecture: amd64\nDescription: tools\n Version: of nothing\n"

// TestSample keeps the document that test/sbom checks against the schema.
func TestSample(t *testing.T) {
	d, err := imageDocument(contents{
		architecture: "amd64", manifest: "sha256:" + strings.Repeat("0a", 32),
		packages: []string{kmod, "Package: libstdc++6\nVersion: 1:12.2.0-14~deb12u1\nArchitecture: amd64\n"},
		program: &debug.BuildInfo{GoVersion: "go1.26.0", Main: debug.Module{Path: "github.com/kube-ipvs/kube-ipvs"}, Deps: []*debug.Module{
			{Path: "k8s.io/api", Version: "v0.36.3", Sum: "h1:" + strings.Repeat("A", 43) + "="},
		}},
	}, "v1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	out, golden := filepath.Join(t.TempDir(), "out"), filepath.Join("testdata", "image.cdx.json")
	if *update {
		out = golden
	}
	if err := write(d, out); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("-update writes it (-want +got):\n%s", diff)
	}
}

// TestArchive reads what is in an archive, for both architectures, from both layers.
func TestArchive(t *testing.T) {
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	if err := os.MkdirAll(filepath.Join(root, packagesFolder), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, packagesFolder, "kmod"), []byte(kmod), 0o644); err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable() // any program of Go's has what is read
	if err != nil {
		t.Fatal(err)
	}
	packages, err := oci.NewLayer("packages", oci.Tree{"": root})
	if err != nil {
		t.Fatal(err)
	}
	own, err := oci.NewLayer("program", oci.Tree{programFile: program})
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(dir, "image.tar")
	layers := []oci.Layer{packages, own}
	writeArchive(t, archive, oci.Image{Architecture: "amd64", Layers: layers}, oci.Image{Architecture: "arm64", Layers: layers})
	images, err := readArchive(archive)
	if err != nil {
		t.Fatal(err)
	}
	if len(images) != 2 || images[0].architecture != "amd64" || images[1].architecture != "arm64" {
		t.Fatalf("%+v", images)
	}
	for _, image := range images {
		d, err := imageDocument(image, "v1.2.3")
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"std", "kmod", "github.com/kube-ipvs/kube-ipvs"} {
			if !slices.ContainsFunc(d.Components, func(c component) bool { return c.Name == want && c.Version != "" }) {
				t.Errorf("%s: no component %s in %+v", image.architecture, want, d.Components)
			}
		}
	}
	// Without the list of packages, the document would be short of most of them.
	writeArchive(t, archive, oci.Image{Architecture: "amd64", Layers: layers[1:]})
	if _, err := readArchive(archive); err == nil {
		t.Error("an image without a list of packages was accepted")
	}
}

func writeArchive(t *testing.T, path string, images ...oci.Image) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := oci.WriteArchive(file, "r.example/kube-ipvs", "v1", images); err != nil {
		t.Fatal(err)
	}
}
