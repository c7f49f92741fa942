package oci

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, path, text string, mode os.FileMode) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func testLayers(t *testing.T) []Layer {
	t.Helper()
	root := t.TempDir()
	write(t, filepath.Join(root, "usr/sbin/tool"), "a tool", 0o755)
	if err := os.Symlink("tool", filepath.Join(root, "usr/sbin/link")); err != nil {
		t.Fatal(err)
	}
	program := write(t, filepath.Join(t.TempDir(), "kube-ipvs"), "a program", 0o755)
	var out []Layer
	for _, from := range []Tree{{"": root}, {"usr/local/bin/kube-ipvs": program}} {
		l, err := NewLayer("test", from)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, l)
	}
	return out
}

var testEntrypoint = []string{"/usr/local/bin/kube-ipvs"}

func testArchive(t *testing.T) []byte {
	t.Helper()
	layers := testLayers(t)
	var out bytes.Buffer
	err := WriteArchive(&out, "docker.io/library/kube-ipvs", "v1", []Image{
		{Architecture: "amd64", Layers: layers, Entrypoint: testEntrypoint}, {Architecture: "arm64", Layers: layers, Entrypoint: testEntrypoint},
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// contents reads a tar archive; a link's content is "> " and its target.
func contents(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	out := map[string]string{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := out[h.Name]; twice || h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%+v: twice, or not root's", h)
		}
		if h.Linkname != "" {
			text = []byte("> " + h.Linkname)
		}
		out[h.Name] = string(text)
	}
}

// TestArchive follows the archive from its index to every layer, checking each
// digest on the way, as whoever imports it does.
func TestArchive(t *testing.T) {
	files := contents(t, bytes.NewReader(testArchive(t)))
	open := func(d descriptor, as any) string {
		text := files["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")]
		if sum := sha256.Sum256([]byte(text)); "sha256:"+hex.EncodeToString(sum[:]) != d.Digest || len(text) != d.Size {
			t.Fatalf("%+v is not what is there: %q", d, text)
		}
		if as != nil {
			if err := json.Unmarshal([]byte(text), as); err != nil {
				t.Fatal(err)
			}
		}
		return text
	}
	var top, index manifest
	if err := json.Unmarshal([]byte(files["index.json"]), &top); err != nil {
		t.Fatal(err)
	}
	open(top.Manifests[0], &index)
	if got := top.Manifests[0].Annotations["io.containerd.image.name"]; got != "docker.io/library/kube-ipvs:v1" {
		t.Errorf("the image's name is %q", got)
	}
	var architectures []string
	for _, d := range index.Manifests {
		architectures = append(architectures, d.Platform.Architecture)
		var m manifest
		var config imageConfig
		open(d, &m)
		open(*m.Config, &config)
		if config.Architecture != d.Platform.Architecture || config.OS != "linux" || !slices.Equal(config.Config.Entrypoint, testEntrypoint) {
			t.Errorf("%+v", config)
		}
		checkLayers(t, &m, &config, open)
	}
	if !slices.Equal(architectures, []string{"amd64", "arm64"}) {
		t.Errorf("architectures %q", architectures)
	}
}

func checkLayers(t *testing.T, m *manifest, config *imageConfig, open func(descriptor, any) string) {
	t.Helper()
	got := map[string]string{}
	for i, d := range m.Layers {
		zip, err := gzip.NewReader(strings.NewReader(open(d, nil)))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(zip)
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(text); "sha256:"+hex.EncodeToString(sum[:]) != config.RootFS.DiffIDs[i] {
			t.Errorf("layer %d has another digest than its configuration says", i)
		}
		for name, content := range contents(t, bytes.NewReader(text)) {
			got[name] = content
		}
	}
	want := map[string]string{"usr/": "", "usr/sbin/": "", "usr/sbin/tool": "a tool", "usr/sbin/link": "> tool", "usr/local/bin/kube-ipvs": "a program"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// The same files make the same archive, whenever.
func TestArchiveIsReproducible(t *testing.T) {
	if !bytes.Equal(testArchive(t), testArchive(t)) {
		t.Error("two archives of the same files differ")
	}
}
