// Command image makes kube-ipvs's container image, for several architectures in
// one OCI archive, out of the distribution's packages and programs that are built
// already. It needs no container engine, and nothing is downloaded when the image
// runs.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	cache := flag.String("cache", "", "folder for unpacked packages, of which those of the same name are not fetched again")
	out := flag.String("out", "", "the archive to write")
	version := flag.String("version", "", "the version")
	tag := flag.String("tag", "", "the image's tag; default: the version")
	commit := flag.String("commit", "", "what the programs were built from")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "image -cache DIR -out FILE -version VERSION -commit COMMIT ARCHITECTURE=PROGRAM...")
		flag.PrintDefaults()
	}
	flag.Parse()

	var images []image
	for _, arg := range flag.Args() {
		architecture, program, ok := strings.Cut(arg, "=")
		if !ok {
			return fmt.Errorf("%q: is not ARCHITECTURE=PROGRAM", arg)
		}
		made, err := newImage(ctx, *cache, architecture, program)
		if err != nil {
			return fmt.Errorf("%s: %w", architecture, err)
		}
		made.labels = map[string]string{
			"org.opencontainers.image.title":    "kube-ipvs",
			"org.opencontainers.image.version":  *version,
			"org.opencontainers.image.revision": *commit,
			"org.opencontainers.image.licenses": "Apache-2.0",
		}
		images = append(images, made)
	}
	file, err := os.Create(*out)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := writeArchive(file, tagOf(cmp.Or(*tag, *version)), images); err != nil {
		return err
	}
	return file.Close()
}

// newImage has two layers, so that a new version of the program is all that a node
// fetches which has the packages.
func newImage(ctx context.Context, cache, architecture, program string) (image, error) {
	root, err := packageRoot(ctx, cache, architecture)
	if err != nil {
		return image{}, err
	}
	packages, err := newLayer("Debian packages: "+strings.Join(packages, " "), tree{"": root})
	if err != nil {
		return image{}, err
	}
	own, err := newLayer("kube-ipvs", tree{"usr/local/bin/kube-ipvs": program})
	return image{architecture: architecture, layers: []layer{packages, own}}, err
}

// tagOf makes a tag of a version, which may have a "+" that tags may not.
func tagOf(version string) string { return strings.ReplaceAll(version, "+", "-") }
