// Command image builds kube-ipvs's container image, for several architectures in one
// OCI archive, from the distribution's packages and from programs that have been built.
// It needs no container engine, and nothing is downloaded when the image runs.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/hack/oci"
)

// repository is the name under which releases push the image, and which the manifests
// use.
const repository = "ghcr.io/kube-ipvs/kube-ipvs"

// program is the program's path in the image.
const program = "usr/local/bin/kube-ipvs"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	cache := flag.String("cache", "", "folder for unpacked packages; packages that it contains are not downloaded again")
	out := flag.String("out", "", "the archive to write")
	version := flag.String("version", "", "the version")
	tag := flag.String("tag", "", "the image's tag; default: the version")
	commit := flag.String("commit", "", "what the programs were built from")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "image -cache DIR -out FILE -version VERSION -commit COMMIT ARCHITECTURE=PROGRAM...")
		flag.PrintDefaults()
	}
	flag.Parse()

	var images []oci.Image
	for _, arg := range flag.Args() {
		architecture, file, ok := strings.Cut(arg, "=")
		if !ok {
			return fmt.Errorf("%q: is not ARCHITECTURE=PROGRAM", arg)
		}
		made, err := newImage(ctx, *cache, architecture, file)
		if err != nil {
			return fmt.Errorf("%s: %w", architecture, err)
		}
		made.Labels = labels(*version, *commit)
		images = append(images, made)
	}
	archive, err := os.Create(*out)
	if err != nil {
		return err
	}
	defer archive.Close()
	if err := oci.WriteArchive(archive, repository, tagOf(cmp.Or(*tag, *version)), images); err != nil {
		return err
	}
	return archive.Close()
}

// home is where the sources and the documentation are.
const home = "https://github.com/kube-ipvs/kube-ipvs"

// labels tell people and registries what an image is. None depends on the time, so that
// an image can be built again.
func labels(version, commit string) map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":         "kube-ipvs",
		"org.opencontainers.image.description":   "IPVS Service proxy for Kubernetes, a replacement for kube-proxy",
		"org.opencontainers.image.version":       version,
		"org.opencontainers.image.revision":      commit,
		"org.opencontainers.image.licenses":      "Apache-2.0",
		"org.opencontainers.image.url":           home,
		"org.opencontainers.image.source":        home,
		"org.opencontainers.image.documentation": home + "/tree/main/docs",
	}
}

// newImage has two layers, so that nodes which have the packages only pull the program
// of a new version.
func newImage(ctx context.Context, cache, architecture, file string) (oci.Image, error) {
	root, err := packageRoot(ctx, cache, architecture)
	if err != nil {
		return oci.Image{}, err
	}
	packages, err := oci.NewLayer("Debian packages: "+strings.Join(packages, " "), oci.Tree{"": root})
	if err != nil {
		return oci.Image{}, err
	}
	own, err := oci.NewLayer("kube-ipvs", oci.Tree{program: file})
	return oci.Image{Architecture: architecture, Layers: []oci.Layer{packages, own}, Entrypoint: []string{"/" + program}}, err
}

// tagOf returns the tag of a version. Tags cannot contain "+".
func tagOf(version string) string { return strings.ReplaceAll(version, "+", "-") }
