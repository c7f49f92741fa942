package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strings"
)

// contents is what the image of an architecture contains.
type contents struct {
	architecture, manifest string
	// packages are the control files of Debian's packages.
	packages []string
	program  *debug.BuildInfo
}

// Where images have them.
const (
	packagesFolder = "var/lib/dpkg/status.d/"
	programFile    = "usr/local/bin/kube-ipvs"
)

// readArchive reads the images of an OCI archive.
func readArchive(file string) (images []contents, err error) {
	blobs, err := readBlobs(file)
	if err != nil {
		return nil, err
	}
	read := func(digest string, into any) error {
		blob, ok := blobs["blobs/"+strings.Replace(digest, ":", "/", 1)]
		if !ok {
			return fmt.Errorf("%s has no blob %s", file, digest)
		}
		if raw, ok := into.(*[]byte); ok {
			*raw = blob
			return nil
		}
		return json.Unmarshal(blob, into)
	}
	var index references
	if err := json.Unmarshal(blobs["index.json"], &index); err != nil {
		return nil, fmt.Errorf("%s: index.json: %w", file, err)
	}
	for len(index.Manifests) > 0 {
		next := index.Manifests[0]
		index.Manifests = index.Manifests[1:]
		var m references
		if err := read(next.Digest, &m); err != nil {
			return nil, err
		}
		index.Manifests = append(index.Manifests, m.Manifests...)
		if len(m.Layers) == 0 {
			continue
		}
		image := contents{architecture: next.Platform.Architecture, manifest: next.Digest}
		for _, layer := range m.Layers {
			var blob []byte
			if err := read(layer.Digest, &blob); err != nil {
				return nil, err
			}
			if err := image.add(blob); err != nil {
				return nil, fmt.Errorf("%s: layer %s: %w", file, layer.Digest, err)
			}
		}
		if image.program == nil || len(image.packages) == 0 {
			return nil, fmt.Errorf("%s: the image for %s has no program, or no list of packages", file, image.architecture)
		}
		images = append(images, image)
	}
	return images, nil
}

// references are those of an index and of a manifest.
type references struct {
	Manifests, Layers []struct {
		Digest   string
		Platform struct{ Architecture string }
	}
}

func readBlobs(file string) (map[string][]byte, error) {
	archive, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer archive.Close()
	blobs := map[string][]byte{}
	return blobs, eachFile(archive, func(name string, content io.Reader) (err error) {
		blobs[name], err = io.ReadAll(content)
		return err
	})
}

// eachFile calls a function for each regular file of a tar archive.
func eachFile(archive io.Reader, do func(name string, content io.Reader) error) error {
	for in := tar.NewReader(archive); ; {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		if err := do(path.Clean(header.Name), in); err != nil {
			return fmt.Errorf("%s: %w", header.Name, err)
		}
	}
}

func (c *contents) add(layer []byte) error {
	unzipped, err := gzip.NewReader(bytes.NewReader(layer))
	if err != nil {
		return err
	}
	return eachFile(unzipped, func(name string, content io.Reader) error {
		switch {
		case name == programFile:
			program, err := io.ReadAll(content)
			if err != nil {
				return err
			}
			c.program, err = buildinfo.Read(bytes.NewReader(program))
			return err
		case strings.HasPrefix(name, packagesFolder):
			control, err := io.ReadAll(content)
			c.packages = append(c.packages, string(control))
			return err
		}
		return nil
	})
}

// imageDocument lists the packages of an image, the program, and what it is built from.
func imageDocument(image contents, version string) (document, error) {
	d := documentOf(image.program, version)
	program := d.Metadata.Component
	program.PURL = purl(program.Name, version)
	d.Metadata.Component = component{
		Type: "container", Name: "kube-ipvs", Version: version,
		PURL: "pkg:oci/kube-ipvs@" + strings.ReplaceAll(image.manifest, ":", "%3A") + "?arch=" + image.architecture,
	}
	packages := map[string]component{}
	for _, control := range image.packages {
		fields := fieldsOf(control)
		name, version, architecture := fields["Package"], fields["Version"], fields["Architecture"]
		if name == "" || version == "" {
			return d, fmt.Errorf("a package without name or version: %q", control)
		}
		packages[name] = component{
			Type: "library", Name: name, Version: version,
			PURL: "pkg:deb/debian/" + strings.ReplaceAll(name, "+", "%2B") + "@" + escapeVersion(version) + "?arch=" + architecture,
		}
	}
	for _, name := range slices.Sorted(maps.Keys(packages)) {
		d.Components = append(d.Components, packages[name])
	}
	d.Components = append(d.Components, program)
	return d, nil
}

// escapeVersion escapes what a package URL has another meaning for.
func escapeVersion(version string) string {
	return strings.NewReplacer("+", "%2B", ":", "%3A", "~", "~").Replace(version)
}

// fieldsOf returns the fields of a control file that have one line.
func fieldsOf(control string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(control) {
		if name, value, ok := strings.Cut(line, ": "); ok && !strings.HasPrefix(line, " ") {
			fields[name] = strings.TrimSpace(value)
		}
	}
	return fields
}
