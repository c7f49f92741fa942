// Command helm renders deploy/chart with Helm's engine to standard output. It is a
// separate module, so that kube-ipvs does not depend on Helm.
package main

import (
	"errors"
	"fmt"
	"log"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"helm.sh/helm/v3/pkg/strvals"
)

const usage = `usage: helm CHART [-f=FILE] [NAME=VALUE ...] render the chart
       helm lint CHART [NAME=VALUE ...]     check it as "helm lint --strict" does
       helm package CHART VERSION DIR       write CHART-VERSION.tgz, with that appVersion`

// namespace is where the chart is rendered to.
const namespace = "kube-system"

func main() {
	log.SetFlags(0)
	out, err := run(os.Args[1:])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(out)
}

func run(args []string) (string, error) {
	switch {
	case len(args) == 0:
		return "", errors.New(usage)
	case args[0] == "lint" && len(args) > 1:
		return "", lintChart(args[1], args[2:])
	case args[0] == "package" && len(args) == 4:
		return packageChart(args[1], args[2], args[3])
	}
	files, err := render(args[0], args[1:])
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		// Only "helm test" applies the files in templates/tests.
		if strings.HasSuffix(name, ".yaml") && filepath.Base(filepath.Dir(name)) != "tests" && strings.TrimSpace(files[name]) != "" {
			out.WriteString("---\n" + files[name] + "\n")
		}
	}
	return out.String(), nil
}

// render returns the rendered templates by name.
func render(path string, settings []string) (map[string]string, error) {
	chart, err := loader.Load(path)
	if err != nil {
		return nil, err
	}
	values, err := parse(settings)
	if err != nil {
		return nil, err
	}
	all, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{Name: "kube-ipvs", Namespace: namespace}, nil)
	if err != nil {
		return nil, err
	}
	return engine.Engine{Strict: true}.Render(chart, all)
}

// parse reads settings as --set does, and files as --values does.
func parse(settings []string) (map[string]any, error) {
	values := map[string]any{}
	for _, s := range settings {
		if name, ok := strings.CutPrefix(s, "-f="); ok {
			file, err := chartutil.ReadValuesFile(name)
			if err != nil {
				return nil, err
			}
			maps.Copy(values, file)
			continue
		}
		if err := strvals.ParseInto(s, values); err != nil {
			return nil, err
		}
	}
	return values, nil
}

func lintChart(path string, settings []string) error {
	values, err := parse(settings)
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range lint.All(path, values, namespace, true).Messages {
		if m.Severity > support.InfoSev {
			errs = append(errs, m)
		}
	}
	return errors.Join(errs...)
}

// packageChart writes the chart with a version, which is the program's as well, and
// returns the archive's name. The image's tag is that version.
func packageChart(path, version, dir string) (string, error) {
	chart, err := loader.Load(path)
	if err != nil {
		return "", err
	}
	chart.Metadata.Version = strings.TrimPrefix(version, "v")
	chart.Metadata.AppVersion = version
	name, err := chartutil.Save(chart, dir)
	return name + "\n", err
}
