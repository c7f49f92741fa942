// Command helm renders deploy/chart with Helm's own engine, on standard output.
// It is a module of its own, so that Helm is no dependency of the product.
package main

import (
	"fmt"
	"log"
	"maps"
	"os"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/strvals"
)

// Its arguments are the chart, and values such as clusterCIDR=10.244.0.0/16.
func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: helm CHART [NAME=VALUE ...]")
	}
	text, err := render(os.Args[1], os.Args[2:])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(text)
}

func render(path string, settings []string) (string, error) {
	chart, err := loader.Load(path)
	if err != nil {
		return "", err
	}
	values := map[string]any{}
	for _, s := range settings {
		if err := strvals.ParseInto(s, values); err != nil {
			return "", err
		}
	}
	all, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{Name: "kube-ipvs", Namespace: "kube-system"}, nil)
	if err != nil {
		return "", err
	}
	files, err := engine.Engine{Strict: true}.Render(chart, all)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, ".yaml") {
			out.WriteString("---\n" + files[name] + "\n")
		}
	}
	return out.String(), nil
}
