package vm

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// writeCPIO writes the directory tree under root as a "newc" archive, the form
// in which the kernel takes an initial file system. Every file belongs to root.
func writeCPIO(w io.Writer, root string) error {
	archive := &cpioWriter{w: w}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil || name == "." {
			return err
		}
		return archive.addPath(name, path, entry)
	})
	if err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	return archive.add("TRAILER!!!", 0, nil)
}

// addTree adds the file or directory tree from as to, except excluded files.
func (c *cpioWriter) addTree(from, to string, leftOut func(path string) bool) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if leftOut(path) {
			if entry.IsDir() {
				return filepath.SkipDir
			}
			return nil
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		return c.addPath(filepath.Join(to, name)[1:], path, entry)
	})
}

type cpioWriter struct {
	w     io.Writer
	inode int
}

func (c *cpioWriter) addPath(name, path string, entry fs.DirEntry) error {
	info, err := entry.Info()
	if err != nil {
		return err
	}
	mode := uint32(info.Mode().Perm())
	switch {
	case info.IsDir():
		return c.add(name, syscall.S_IFDIR|mode, nil)
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		if err != nil {
			return err
		}
		return c.add(name, syscall.S_IFLNK|0o777, []byte(target))
	case info.Mode().IsRegular():
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return c.add(name, syscall.S_IFREG|mode, data)
	}
	return fmt.Errorf("%s: cannot be archived (%s)", name, info.Mode())
}

// add writes one entry: a header of thirteen hexadecimal fields, the name with
// its terminating zero, and the data, each padded to four bytes.
func (c *cpioWriter) add(name string, mode uint32, data []byte) error {
	c.inode++
	head := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name)
	for _, part := range [][]byte{[]byte(head), data} {
		if _, err := c.w.Write(part); err != nil {
			return err
		}
		if _, err := c.w.Write(make([]byte, -len(part)&3)); err != nil {
			return err
		}
	}
	return nil
}
