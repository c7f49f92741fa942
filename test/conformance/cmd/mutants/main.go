// Command mutants builds kube-ipvs once for each mutation, into a folder. Each program is
// named after its mutation's number.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/kube-ipvs/kube-ipvs/test/conformance"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: mutants folder   (in the checkout's root)")
		os.Exit(2)
	}
	if err := build(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func build(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for i, m := range conformance.Mutations {
		if err := buildOne(filepath.Join(dir, strconv.Itoa(i)), m); err != nil {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
	}
	return nil
}

// buildOne compiles kube-ipvs with the mutated file in place of the original, which it
// does not change.
func buildOne(program string, m conformance.Mutation) error {
	original, err := filepath.Abs(filepath.Join("pkg/plan", m.File))
	if err != nil {
		return err
	}
	source, err := os.ReadFile(original)
	if err != nil {
		return err
	}
	broken, err := m.Apply(string(source))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutant-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	replacement, overlay := filepath.Join(dir, m.File), filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(replacement, []byte(broken), 0o644); err != nil {
		return err
	}
	text, err := json.Marshal(map[string]map[string]string{"Replace": {original: replacement}})
	if err != nil {
		return err
	}
	if err := os.WriteFile(overlay, text, 0o644); err != nil {
		return err
	}
	cmd := exec.Command("go", "build", "-overlay", overlay, "-ldflags", "-s -w", "-o", program, "./cmd/proxy")
	cmd.Stderr = os.Stderr
	return cmd.Run()
}
