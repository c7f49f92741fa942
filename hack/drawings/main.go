// Command drawings writes the drawings of the documentation as SVG files. They are
// legible on light and dark backgrounds: each has a background of its own, whose color
// follows the reader's color scheme.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: drawings DIR")
		os.Exit(2)
	}
	for name, draw := range drawings {
		if err := os.WriteFile(filepath.Join(os.Args[1], name), []byte(draw()), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "drawings:", err)
			os.Exit(1)
		}
	}
}

// drawings are the files, by name.
var drawings = map[string]func() string{
	"eni-path.svg":     eniPath,
	"packet-path.svg":  packetPath,
	"architecture.svg": architecture,
	"vip-claims.svg":   vipClaims,
}
