package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/hack/debian"
	"github.com/kube-ipvs/kube-ipvs/hack/oci"
)

// recipe describes an image for the cluster: Debian packages and programs that are built
// here.
type recipe struct {
	packages []string
	// built programs by their path in the image.
	programs map[string]string
	links    map[string]string
	files    map[string]string
	// dirs are empty directories.
	dirs []string

	entrypoint, command []string
}

// judged are the images that upstream's tests run, by name without registry and version,
// which the tests define.
func judged(programs string) map[string]recipe {
	return map[string]recipe{
		"pause": {
			programs:   map[string]string{"pause": filepath.Join(programs, "pause")},
			entrypoint: []string{"/pause"},
		},
		"agnhost": {
			packages: []string{
				"bash", "bind9-dnsutils", "conntrack", "coreutils", "curl", "dash", "grep", "hostname", "iperf",
				"iproute2", "netbase", "netcat-openbsd", "procps", "sed", "util-linux", "wget",
			},
			// The key and certificate are for servers that have none.
			programs: map[string]string{
				"agnhost":       filepath.Join(programs, "agnhost"),
				"localhost.crt": filepath.Join(programs, "localhost.crt"),
				"localhost.key": filepath.Join(programs, "localhost.key"),
			},
			links: map[string]string{
				"agnhost-2": "agnhost", "usr/bin/sh": "dash", "usr/bin/nc": "nc.openbsd",
				"usr/local/bin/iperf": "/usr/bin/iperf",
			},
			dirs:       []string{"uploads"},
			entrypoint: []string{"/agnhost"}, command: []string{"pause"},
		},
		"busybox": {
			packages: []string{"busybox-static"}, links: map[string]string{"usr/bin/sh": "busybox"},
			command: []string{"sh"},
		},
		"distroless-iptables": {
			packages: []string{"conntrack", "coreutils", "dash", "debianutils", "grep"},
			links:    map[string]string{"usr/bin/sh": "dash"}, command: []string{"sh"},
		},
		"regression-issue-74839": {
			programs:   map[string]string{"regression-issue-74839": filepath.Join(programs, "regression-issue-74839")},
			entrypoint: []string{"/regression-issue-74839"},
		},
	}
}

// kubeProxy is the image of the peer. The image of kube-ipvs is built elsewhere, as for
// its users.
func kubeProxy(peers string) recipe {
	return recipe{
		packages:   []string{"iptables", "nftables", "kmod", "ipset", "conntrack"},
		programs:   map[string]string{"usr/local/bin/kube-proxy": filepath.Join(peers, "kube-proxy")},
		links:      iptablesLinks(),
		entrypoint: []string{"/usr/local/bin/kube-proxy"},
	}
}

// files of the checkout that the image contains.
func (r recipe) inputs() (files []string) {
	for _, file := range r.programs {
		files = append(files, file)
	}
	return files
}

// key identifies the result of the recipe with its current inputs.
func (r recipe) key(name string) (string, error) {
	inputs := r.inputs()
	slices.Sort(inputs)
	return digest(inputs, name, fmt.Sprint(r.packages, r.links, r.files, r.dirs, r.entrypoint, r.command), imageFormat)
}

// imageFormat must be increased when the code that builds images changes its result.
const imageFormat = "1"

// build builds the archive of an image in dir, unless it exists, and returns its path.
func (r recipe) build(ctx context.Context, dir, name string) (string, error) {
	key, err := r.key(name)
	if err != nil {
		return "", fmt.Errorf("image %s: %w", name, err)
	}
	archive := filepath.Join(dir, shortName(name)+"-"+key+".tar")
	if _, err := os.Stat(archive); err == nil {
		return archive, nil
	}
	work, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	root := filepath.Join(work, "root")
	if err := r.fill(ctx, work, root); err != nil {
		return "", fmt.Errorf("image %s: %w", name, err)
	}
	built := filepath.Join(work, "image.tar")
	if err := r.archive(built, name, root); err != nil {
		return "", fmt.Errorf("image %s: %w", name, err)
	}
	return archive, os.Rename(built, archive)
}

// archive writes the files below root as an image.
func (r recipe) archive(path, name, root string) error {
	layer, err := oci.NewLayer("the lab", oci.Tree{"": root})
	if err != nil {
		return err
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	repository, tag, _ := strings.Cut(name, ":") // no registry's port is in a name
	if err := oci.WriteArchive(file, repository, tag, []oci.Image{{
		Architecture: runtime.GOARCH, Layers: []oci.Layer{layer}, Entrypoint: r.entrypoint, Command: r.command,
	}}); err != nil {
		return err
	}
	return file.Close()
}

// shortName is an image's name without registry and version.
func shortName(name string) string {
	base, _, _ := strings.Cut(path.Base(name), ":")
	return base
}

func (r recipe) fill(ctx context.Context, work, root string) error {
	for _, dir := range append([]string{"tmp"}, r.dirs...) {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	// Not every container runs as root.
	if err := os.Chmod(filepath.Join(root, "tmp"), 0o777|os.ModeSticky); err != nil {
		return err
	}
	if len(r.packages) > 0 {
		if err := debian.Unpack(ctx, filepath.Join(work, "packages"), root, r.packages...); err != nil {
			return err
		}
		if err := mergeUsr(root); err != nil {
			return err
		}
	}
	for name, from := range r.programs {
		if err := copyProgram(from, root, name); err != nil {
			return err
		}
	}
	for name, content := range r.files {
		if err := write(root, name, []byte(content), 0o755); err != nil {
			return err
		}
	}
	return link(root, r.links)
}

// judgedImages returns the images that upstream's tests run and that are built here: full
// name → recipe.
func judgedImages(ctx context.Context, programs string) (map[string]recipe, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(programs, "imagenames")).Output()
	if err != nil {
		return nil, fmt.Errorf("which images the tests run: %w", err)
	}
	made, images := judged(programs), map[string]recipe{}
	for _, name := range strings.Fields(string(out)) {
		if recipe, ok := made[shortName(name)]; ok {
			images[name] = recipe
		}
	}
	if len(images) < len(made) {
		return nil, fmt.Errorf("of %d images that are made here, the tests name only %d", len(made), len(images))
	}
	return images, nil
}

// AgnhostImage returns the name of the image with the servers of upstream's tests, which
// nodes have.
func (c *Config) AgnhostImage(ctx context.Context) (string, error) {
	images, err := judgedImages(ctx, c.programs())
	if err != nil {
		return "", err
	}
	return imageNamed(images, "agnhost"), nil
}
