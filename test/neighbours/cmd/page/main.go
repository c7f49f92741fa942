// Command page writes docs/neighbours.md: page SEEN RESULTS VERSION. It first writes
// summaries of the results in the directory SEEN to the directory RESULTS, and then the
// page from all summaries there.
package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/test/neighbours"
)

func main() {
	err := run(os.Args[1], os.Args[2], os.Args[3])
	if err != nil {
		fmt.Fprintln(os.Stderr, "page:", err)
		os.Exit(1)
	}
}

func run(seen, kept, version string) error {
	err := each(seen, func(file string, r neighbours.Result) error {
		data, err := json.MarshalIndent(neighbours.Summarize(r), "", "\t")
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(kept, filepath.Base(file)), append(data, '\n'), 0o644)
	})
	if err != nil {
		return err
	}
	var all []neighbours.Summary
	err = each(kept, func(_ string, s neighbours.Summary) error {
		all = append(all, s)
		return nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b neighbours.Summary) int {
		return cmp.Or(cmp.Compare(a.Kernel, b.Kernel), a.Order-b.Order)
	})
	return neighbours.WritePage(os.Stdout, version, all)
}

// each decodes the files of a directory.
func each[T any](dir string, do func(file string, value T) error) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return err
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var value T
		if err := json.Unmarshal(data, &value); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if err := do(file, value); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}
