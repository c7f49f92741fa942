// Command sbom writes the components of a program as a CycloneDX document: its modules
// with versions and checksums, and Go; and those of a container image, which are Debian's
// packages besides. It reads them from the program and the image themselves, so they
// cannot differ, and its output is reproducible.
package main

import (
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

const usage = `usage: sbom PROGRAM VERSION OUT
       sbom image ARCHIVE VERSION OUT   of each image in an OCI archive; in OUT, ARCH stands for the architecture`

func run(args []string) error {
	if len(args) == 4 && args[0] == "image" {
		return writeImages(args[1], args[2], args[3])
	}
	if len(args) != 3 {
		return errors.New(usage)
	}
	info, err := buildinfo.ReadFile(args[0])
	if err != nil {
		return err
	}
	return write(documentOf(info, args[1]), args[2])
}

func writeImages(archive, version, out string) error {
	images, err := readArchive(archive)
	if err != nil {
		return err
	}
	for _, image := range images {
		d, err := imageDocument(image, version)
		if err != nil {
			return err
		}
		if err := write(d, strings.ReplaceAll(out, "ARCH", image.architecture)); err != nil {
			return err
		}
	}
	return nil
}

func write(d document, out string) error {
	text, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(text, '\n'), 0o644)
}

// document is the part of a CycloneDX bill of materials that is used here.
type document struct {
	Format     string      `json:"bomFormat"`
	Spec       string      `json:"specVersion"`
	Version    int         `json:"version"`
	Metadata   metadata    `json:"metadata"`
	Components []component `json:"components"`
}

type metadata struct {
	Component component `json:"component"`
}

type component struct {
	Type    string `json:"type"`
	Name    string `json:"name"`
	Version string `json:"version"`
	PURL    string `json:"purl"`
	Hashes  []hash `json:"hashes,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

func documentOf(info *debug.BuildInfo, version string) document {
	d := document{Format: "CycloneDX", Spec: "1.6", Version: 1}
	d.Metadata.Component = component{Type: "application", Name: info.Main.Path, Version: version, PURL: purl(info.Main.Path, version)}
	d.Components = []component{{Type: "library", Name: "std", Version: info.GoVersion, PURL: purl("std", strings.TrimPrefix(info.GoVersion, "go"))}}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		d.Components = append(d.Components, component{Type: "library", Name: m.Path, Version: m.Version, PURL: purl(m.Path, m.Version), Hashes: hashes(m.Sum)})
	}
	return d
}

func purl(path, version string) string { return "pkg:golang/" + path + "@" + version }

// hashes decodes a checksum of go.sum: "h1:" and, in base64, a SHA-256 of the checksums
// of the module's files.
func hashes(sum string) []hash {
	text, ok := strings.CutPrefix(sum, "h1:")
	digest, err := base64.StdEncoding.DecodeString(text)
	if !ok || err != nil {
		return nil
	}
	return []hash{{"SHA-256", hex.EncodeToString(digest)}}
}
