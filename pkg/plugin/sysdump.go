package plugin

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/redact"
)

// logTail limits the log of a node, in lines.
const logTail = "20000"

// sysdump collects the archives of all nodes, their logs, and the cluster's view of the
// DaemonSet in one archive.
func (o *options) sysdump() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "sysdump",
		Short: "Write an archive with everything that a bug report needs, from all nodes",
		Long:  "sysdump runs \"kube-ipvs sysdump\" on all nodes, or on those of --node, and adds the logs\nof the pods and the cluster's view of the DaemonSet. It contains no secrets.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			pods, err := o.podsOfAll(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			now := time.Now().UTC()
			if output == "" {
				output = "kube-ipvs-sysdump-" + now.Format("20060102T150405Z") + ".tar.gz"
			}
			files := make([]map[string][]byte, len(pods)+1)
			files[len(pods)] = o.clusterFiles(cmd.Context())
			o.each(cmd.ErrOrStderr(), pods, func(i int, p pod) { files[i] = o.nodeFiles(cmd.Context(), p) })
			if err := write(output, strings.TrimSuffix(filepath.Base(output), ".tar.gz"), now, files); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), output)
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "the file to write; default: kube-ipvs-sysdump-TIME.tar.gz")
	o.addTimeout(cmd, 5*time.Minute)
	return cmd
}

func (o *options) nodeFiles(ctx context.Context, p pod) map[string][]byte {
	limited, cancel := o.within(ctx)
	defer cancel()
	files := map[string][]byte{}
	var archive, problems bytes.Buffer
	if code, err := o.exec(limited, &archive, &problems, p, "sysdump", "-o", "-"); err != nil || code != 0 || archive.Len() == 0 {
		files[p.node+"/error.txt"] = redact.Secrets(fmt.Appendf(nil, "sysdump exited with %d, %v\n%s", code, err, problems.String()))
	}
	if archive.Len() > 0 {
		files[p.node+"/node.tar.gz"] = archive.Bytes()
	}
	for name, more := range map[string][]string{"log.txt": nil, "log-before.txt": {"--previous"}} {
		files[p.node+"/"+name] = o.text(ctx, append([]string{"logs", "-n", o.namespace, p.name, "-c", o.container, "--tail", logTail}, more...)...)
	}
	return files
}

// clusterFiles returns kubectl's output about the DaemonSet, its pods, and Events about
// Services.
func (o *options) clusterFiles(ctx context.Context) map[string][]byte {
	return map[string][]byte{
		"version.txt":    o.text(ctx, "version"),
		"nodes.txt":      o.text(ctx, "get", "nodes", "-o", "wide"),
		"pods.txt":       o.text(ctx, "get", "pods", "-n", o.namespace, "-l", o.selector, "-o", "wide"),
		"daemonsets.txt": o.text(ctx, "get", "daemonsets", "-n", o.namespace, "-l", o.selector, "-o", "wide"), // not as YAML, which would include the environment
		"events.txt":     o.text(ctx, "get", "events.events.k8s.io", "-A", "--field-selector", "reportingController="+event.Controller),
	}
}

// text returns the output of kubectl, including errors, without secrets. The archives of the
// nodes contain none.
func (o *options) text(ctx context.Context, args ...string) []byte {
	ctx, cancel := o.within(ctx)
	defer cancel()
	var out bytes.Buffer
	if _, err := o.kubectl.Run(ctx, &out, &out, args...); err != nil {
		fmt.Fprintln(&out, err)
	}
	return redact.Secrets(out.Bytes())
}

func write(output, folder string, now time.Time, files []map[string][]byte) error {
	var archive bytes.Buffer
	z := gzip.NewWriter(&archive)
	t := tar.NewWriter(z)
	var errs []error
	for _, of := range files {
		for name, text := range of {
			if len(text) == 0 {
				continue
			}
			errs = append(errs, t.WriteHeader(&tar.Header{Name: folder + "/" + name, Mode: 0o644, Size: int64(len(text)), ModTime: now}))
			_, err := t.Write(text)
			errs = append(errs, err)
		}
	}
	if err := errors.Join(append(errs, t.Close(), z.Close())...); err != nil {
		return err
	}
	return os.WriteFile(output, archive.Bytes(), 0o600)
}
