package metrics

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics"
)

// Description describes a metric for the reference.
type Description struct {
	Name   string
	Type   string // counter, gauge or histogram
	Labels []string
	Help   string
}

// described parses the text of a prometheus.Desc, whose fields are not exported.
var described = regexp.MustCompile(`fqName: "([^"]*)", help: "(?:\[[A-Z]+\] )?(.*?)",.* variableLabels: \{([^}]*)\}`)

// Describe returns the descriptions of all metrics, in the order of this file.
func Describe() ([]Description, error) {
	registry := metrics.NewKubeRegistry()
	r := newRecorder()
	var out []Description
	for _, m := range r.all() {
		if err := registry.Register(m); err != nil {
			return nil, err
		}
		descriptions := make(chan *prometheus.Desc, 1)
		m.Describe(descriptions)
		parts := described.FindStringSubmatch((<-descriptions).String())
		if parts == nil {
			return nil, fmt.Errorf("metric %s has no description", m.FQName())
		}
		d := Description{Name: parts[1], Type: typeOf(m), Help: strings.ReplaceAll(parts[2], `\"`, `"`)}
		if parts[3] != "" {
			d.Labels = strings.Split(parts[3], ",")
		}
		out = append(out, d)
	}
	for _, d := range []description{connections, packets, bytes, leftOut} {
		out = append(out, Description{Name: d.name, Type: d.kind, Labels: d.labels, Help: d.help})
	}
	return out, nil
}

func typeOf(m metrics.Registerable) string {
	switch m.(type) {
	case *metrics.Counter, *metrics.CounterVec:
		return "counter"
	case *metrics.Histogram, *metrics.HistogramVec:
		return "histogram"
	}
	return "gauge"
}
