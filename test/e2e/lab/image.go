package lab

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// ImageConfig is the part of an image's configuration that tests use.
type ImageConfig struct{ Entrypoint, Env []string }

// imageFile is the file with an image's configuration.
type imageFile struct{ Config ImageConfig }

// imageManifest is the part of an index and of a manifest that tests use.
type imageManifest struct {
	Config    blobReference
	Layers    []blobReference
	Manifests []struct {
		blobReference
		Platform struct{ Architecture string }
	}
}

type blobReference struct{ Digest string }

// UnpackImage unpacks the container image of kube-ipvs, which `make lab-image` builds, into a
// folder, and returns its configuration.
func UnpackImage(t testing.TB, root string) ImageConfig {
	t.Helper()
	blobs := t.TempDir()
	archive, err := os.Open(filepath.Join(os.Getenv("LAB_CACHE"), "container", "lab.tar"))
	if err != nil {
		t.Fatalf("%v: make lab-image makes it", err)
	}
	defer archive.Close()
	untar(t, archive, blobs)
	read := func(path string, out any) {
		text, err := os.ReadFile(filepath.Join(blobs, path))
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, out); err != nil {
			t.Fatal(err)
		}
	}
	blob := func(b blobReference) string {
		return filepath.Join("blobs", strings.ReplaceAll(b.Digest, ":", "/"))
	}
	var top, index, manifest imageManifest
	read("index.json", &top)
	read(blob(top.Manifests[0].blobReference), &index)
	for _, m := range index.Manifests {
		if m.Platform.Architecture == runtime.GOARCH {
			read(blob(m.blobReference), &manifest)
		}
	}
	for _, l := range manifest.Layers {
		file, err := os.Open(filepath.Join(blobs, blob(l)))
		if err != nil {
			t.Fatal(err)
		}
		unzipped, err := gzip.NewReader(file)
		if err != nil {
			t.Fatal(err)
		}
		untar(t, unzipped, root)
		file.Close()
	}
	var file imageFile
	read(blob(manifest.Config), &file)
	return file.Config
}

func untar(t testing.TB, r io.Reader, root string) {
	t.Helper()
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil {
			err = unpackFile(h, in, filepath.Join(root, h.Name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func unpackFile(h *tar.Header, content io.Reader, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return os.MkdirAll(path, 0o755)
	case tar.TypeSymlink:
		return os.Symlink(h.Linkname, path)
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, os.FileMode(h.Mode).Perm())
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.Copy(file, content)
	return err
}
