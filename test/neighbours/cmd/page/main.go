// Command page writes docs/neighbours.md from what the tests beside neighbours
// have seen: page DIRECTORY VERSION.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/test/neighbours"
)

func main() {
	results, err := read(os.Args[1])
	if err == nil {
		err = neighbours.WritePage(os.Stdout, os.Args[2], results)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "page:", err)
		os.Exit(1)
	}
}

func read(dir string) ([]neighbours.Result, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	var results []neighbours.Result
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var r neighbours.Result
		if err := json.Unmarshal(data, &r); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		results = append(results, r)
	}
	slices.SortFunc(results, func(a, b neighbours.Result) int { return a.Order - b.Order })
	return results, nil
}
