package vm

import (
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// libraryDirs are the directories in which packages install shared libraries.
var libraryDirs = []string{
	"lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64", "lib", "usr/lib",
}

// neededLibraries finds the libraries that ELF files need, directly or indirectly, in the
// packages unpacked in root: soname → path.
func neededLibraries(root string, files []string) (map[string]string, error) {
	found := map[string]string{}
	for queue := files; len(queue) > 0; queue = queue[1:] {
		names, err := importedLibraries(queue[0])
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if found[name] != "" {
				continue
			}
			path, err := findIn(root, libraryDirs, name)
			if err != nil {
				return nil, fmt.Errorf("library of %s: %w", queue[0], err)
			}
			found[name] = path
			queue = append(queue, path)
		}
	}
	return found, nil
}

// importedLibraries returns the sonames that an ELF file needs, including its program
// interpreter. Other files need none.
func importedLibraries(path string) ([]string, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	binary, err := elf.NewFile(file)
	if err != nil {
		return nil, nil
	}
	names, err := binary.ImportedLibraries()
	if err != nil {
		return nil, fmt.Errorf("libraries of %s: %w", path, err)
	}
	if section := binary.Section(".interp"); section != nil {
		interpreter, err := section.Data()
		if err != nil {
			return nil, fmt.Errorf("interpreter of %s: %w", path, err)
		}
		names = append(names, filepath.Base(strings.TrimRight(string(interpreter), "\x00")))
	}
	return names, nil
}

// findIn returns the path of a file in one of the directories under root.
func findIn(root string, dirs []string, name string) (string, error) {
	for _, dir := range dirs {
		path := filepath.Join(root, dir, name)
		if _, err := os.Lstat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is in none of the unpacked packages", name)
}
