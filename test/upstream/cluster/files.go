package cluster

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

// mergeUsr moves the packages' files in /bin, /sbin and /lib to /usr, as in an installed
// system: packages are only unpacked here.
func mergeUsr(root string) error {
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		old, merged := filepath.Join(root, dir), filepath.Join(root, "usr", dir)
		if err := os.MkdirAll(merged, 0o755); err != nil {
			return err
		}
		if info, err := os.Lstat(old); err == nil && info.IsDir() {
			if out, err := exec.Command("cp", "-a", old+"/.", merged).CombinedOutput(); err != nil {
				return fmt.Errorf("merge %s: %w: %s", old, err, out)
			}
			if err := os.RemoveAll(old); err != nil {
				return err
			}
		}
		if err := os.Symlink("usr/"+dir, old); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// link creates symbolic links: name → target, with names relative to root.
func link(root string, links map[string]string) error {
	for name, target := range links {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.Symlink(target, path); err != nil {
			return err
		}
	}
	return nil
}

// iptablesLinks are the names of the nft back end's program, which the package's
// installation would create.
func iptablesLinks() map[string]string {
	links := map[string]string{}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, action := range []string{"", "-save", "-restore"} {
			links["usr/sbin/"+family+action] = "xtables-nft-multi"
		}
	}
	return links
}

// write writes a file below root, and creates its directory.
func write(root, name string, content []byte, mode fs.FileMode) error {
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, mode)
}

// copyProgram copies a built program to a path below root.
func copyProgram(from, root, name string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return write(root, name, content, 0o755)
}

// Digest returns a short hash of a file.
func Digest(path string) (string, error) { return digest([]string{path}) }

// digest returns a short hash of texts and of files' contents.
func digest(files []string, texts ...string) (string, error) {
	hash := sha256.New()
	fmt.Fprintf(hash, "%q", texts)
	for _, path := range files {
		file, err := os.Open(path)
		if err != nil {
			return "", err
		}
		_, err = io.Copy(hash, file)
		file.Close()
		if err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(hash.Sum(nil))[:12], nil
}
