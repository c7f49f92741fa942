package vm

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// A guest whose kernel has no 9p gets a copy of the shares in its memory: the checkout,
// the output directory and, of the cache, what tests need. In the end it returns the
// output directory as a tar archive.

// bakedCache lists the parts of the cache that such a guest gets.
var bakedCache = []string{
	"e2e/e2e.test", "e2e/neighbours.test", "peers/kube-proxy", "peers/kubectl", "peers/helm", "peers/seccomp", "peers/previous",
	"neighbours/aws", "neighbours/flannel", "neighbours/metallb", "neighbours/debian", "container/lab.tar",
}

// bakedFiles is the archive's name in the output directory.
const bakedFiles = "files.tar"

// bakedParameter is the parameter for the init script.
const bakedParameter = " lab.baked"

type baked struct{ initrd string }

// bake writes an initial file system for this guest only.
func (g *guest) bake() (_ *baked, err error) {
	file, err := os.CreateTemp(g.out, "initrd-")
	if err != nil {
		return nil, err
	}
	b := &baked{initrd: file.Name()}
	defer func() {
		if err = errors.Join(err, file.Close()); err != nil {
			b.remove()
		}
	}()
	plain, err := os.Open(g.image.initrd)
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	if _, err := io.Copy(file, plain); err != nil {
		return nil, err
	}
	archive := &cpioWriter{w: file}
	for _, tree := range []struct{ from, to string }{{g.source, guestSource}, {g.out, guestOut}} {
		if err := archive.addTree(tree.from, tree.to, g.leftOut); err != nil {
			return nil, err
		}
	}
	for _, name := range bakedCache {
		from := filepath.Join(g.cache, name)
		if _, err := os.Lstat(from); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := archive.add(guestCache[1:]+"/"+filepath.Dir(name), 0o40755, nil); err != nil {
			return nil, err
		}
		if err := archive.addTree(from, filepath.Join(guestCache, name), g.leftOut); err != nil {
			return nil, err
		}
	}
	if err := archive.add("TRAILER!!!", 0, nil); err != nil {
		return nil, err
	}
	image := *g.image
	image.initrd = b.initrd
	g.image, g.parameters = &image, g.parameters+bakedParameter
	return b, nil
}

// leftOut reports whether the guest does not get a file of the host.
func (g *guest) leftOut(path string) bool {
	return path == filepath.Join(g.source, ".git") || path == g.cache || filepath.Dir(path) == g.out && filepath.Base(path) != "run" && filepath.Base(path) != "kubeconfig"
}

func (b *baked) remove() { os.Remove(b.initrd) }

// fetch unpacks the guest's archive.
func (b *baked) fetch(out string) error {
	file, err := os.Open(filepath.Join(out, bakedFiles))
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	root, err := os.OpenRoot(out)
	if err != nil {
		return err
	}
	defer root.Close()
	for archive := tar.NewReader(file); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("the guest's files: %w", err)
		}
		if header.FileInfo().IsDir() {
			err = root.MkdirAll(filepath.Clean(header.Name), 0o755)
		} else if header.FileInfo().Mode().IsRegular() {
			err = unpackFile(root, filepath.Clean(header.Name), archive)
		}
		if err != nil {
			return err
		}
	}
}

func unpackFile(root *os.Root, name string, content io.Reader) error {
	file, err := root.Create(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	return errors.Join(err, file.Close())
}
