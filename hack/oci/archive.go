// Package oci writes container images as archives, without a container engine:
// kube-ipvs's own image, and those that a cluster in the lab runs. It is written by hand,
// because go-containerregistry would add its dependencies (registry clients and
// credential helpers) to the module for what takes 250 lines here.
package oci

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
)

// Media types of the OCI image specification.
const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// searchPath is the PATH of the image's programs.
const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Image is the image of one architecture.
type Image struct {
	Architecture        string
	Layers              []Layer
	Entrypoint, Command []string
	Labels              map[string]string
}

// Layer is a compressed tar archive.
type Layer struct {
	made string // what created the layer
	diff string // digest of the uncompressed layer
	blob []byte
}

// Tree maps names in a layer to files or folders.
type Tree map[string]string

// descriptor refers to a blob.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        *descriptor  `json:"config,omitempty"`
	Layers        []descriptor `json:"layers,omitempty"`
	Manifests     []descriptor `json:"manifests,omitempty"` // of an index
}

type imageConfig struct {
	platform
	Config  containerConfig `json:"config"`
	RootFS  rootFS          `json:"rootfs"`
	History []history       `json:"history"`
}

type containerConfig struct {
	Env        []string
	Entrypoint []string          `json:",omitempty"`
	Cmd        []string          `json:",omitempty"`
	Labels     map[string]string `json:",omitempty"`
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type history struct {
	CreatedBy string `json:"created_by"`
}

// NewLayer writes no times and only root as the owner, so that the same files produce
// the same digest.
func NewLayer(made string, from Tree) (Layer, error) {
	var compressed bytes.Buffer
	sum := sha256.New()
	zip := gzip.NewWriter(&compressed)
	out := tar.NewWriter(io.MultiWriter(zip, sum))
	for _, name := range slices.Sorted(maps.Keys(from)) {
		if err := addTree(out, name, from[name]); err != nil {
			return Layer{}, err
		}
	}
	if err := out.Close(); err != nil {
		return Layer{}, err
	}
	if err := zip.Close(); err != nil {
		return Layer{}, err
	}
	return Layer{made: made, diff: "sha256:" + hex.EncodeToString(sum.Sum(nil)), blob: compressed.Bytes()}, nil
}

// addTree adds a file, or a folder with its contents.
func addTree(out *tar.Writer, name, root string) error {
	return filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		in := path.Join(name, filepath.ToSlash(below))
		if in == "." {
			return nil
		}
		return addFile(out, in, file, entry)
	})
}

func addFile(out *tar.Writer, name, file string, entry fs.DirEntry) error {
	info, err := entry.Info()
	if err != nil {
		return err
	}
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(file); err != nil {
			return err
		}
	}
	from, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	header := &tar.Header{Typeflag: from.Typeflag, Name: name, Linkname: target, Mode: from.Mode, Size: from.Size, Format: tar.FormatPAX}
	if entry.IsDir() {
		header.Name += "/"
	}
	if err := out.WriteHeader(header); err != nil || !info.Mode().IsRegular() {
		return err
	}
	content, err := os.Open(file)
	if err != nil {
		return err
	}
	defer content.Close()
	_, err = io.Copy(out, content)
	return err
}

// archive is an OCI image layout in a tar archive.
type archive struct {
	out  *tar.Writer
	have map[string]bool
}

// WriteArchive writes the images of several architectures as one, under a name with its
// registry and a tag.
func WriteArchive(w io.Writer, name, tag string, images []Image) error {
	a := archive{tar.NewWriter(w), map[string]bool{}}
	if err := a.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	index := manifest{SchemaVersion: 2, MediaType: indexType}
	for _, i := range images {
		d, err := a.image(i)
		if err != nil {
			return err
		}
		index.Manifests = append(index.Manifests, d)
	}
	whole, err := a.document(indexType, index)
	if err != nil {
		return err
	}
	whole.Annotations = map[string]string{
		"io.containerd.image.name":          name + ":" + tag, // for "ctr images import"
		"org.opencontainers.image.ref.name": tag,
	}
	top, err := json.Marshal(manifest{SchemaVersion: 2, MediaType: indexType, Manifests: []descriptor{whole}})
	if err != nil {
		return err
	}
	if err := a.file("index.json", top); err != nil {
		return err
	}
	return a.out.Close()
}

func (a *archive) image(i Image) (descriptor, error) {
	on := platform{Architecture: i.Architecture, OS: "linux"}
	config := imageConfig{platform: on, RootFS: rootFS{Type: "layers"}, Config: containerConfig{
		Env: []string{searchPath}, Entrypoint: i.Entrypoint, Cmd: i.Command, Labels: i.Labels,
	}}
	m := manifest{SchemaVersion: 2, MediaType: manifestType}
	for _, l := range i.Layers {
		d, err := a.blob(layerType, l.blob)
		if err != nil {
			return descriptor{}, err
		}
		m.Layers = append(m.Layers, d)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.diff)
		config.History = append(config.History, history{l.made})
	}
	d, err := a.document(configType, config)
	if err != nil {
		return descriptor{}, err
	}
	m.Config = &d
	d, err = a.document(manifestType, m)
	d.Platform = &on
	return d, err
}

func (a *archive) document(mediaType string, value any) (descriptor, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return descriptor{}, err
	}
	return a.blob(mediaType, text)
}

// blob adds a blob unless it exists.
func (a *archive) blob(mediaType string, content []byte) (descriptor, error) {
	sum := sha256.Sum256(content)
	name := hex.EncodeToString(sum[:])
	d := descriptor{MediaType: mediaType, Digest: "sha256:" + name, Size: len(content)}
	if a.have[name] {
		return d, nil
	}
	a.have[name] = true
	return d, a.file("blobs/sha256/"+name, content)
}

func (a *archive) file(name string, content []byte) error {
	if err := a.out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	_, err := a.out.Write(content)
	return err
}
