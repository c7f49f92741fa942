package config

import (
	"errors"
	"maps"
	"slices"

	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	zpages "k8s.io/component-base/zpages/features"
)

// allowExternalIPs is kube-proxy's gate of the same name. If it is off, external IPs are not
// served.
const allowExternalIPs featuregate.Feature = "AllowServiceExternalIPs"

// proxyGates are the gates of kube-proxy's own that take effect here.
var proxyGates = map[featuregate.Feature]featuregate.FeatureSpec{
	allowExternalIPs: {Default: true, PreRelease: featuregate.GA},
}

// featureGates returns the gates of this program with their values set, and the names
// of gates that it does not have: Kubernetes sets gates cluster wide, and the set of
// gates changes with each version.
func featureGates(values map[string]bool) (featuregate.FeatureGate, []string, error) {
	gates := featuregate.NewFeatureGate()
	if err := errors.Join(logsapi.AddFeatureGates(gates), zpages.AddFeatureGates(gates), gates.Add(proxyGates)); err != nil {
		return gates, nil, err
	}
	known, unknown := map[string]bool{}, []string(nil)
	all := gates.GetAll()
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if _, ok := all[featuregate.Feature(name)]; ok {
			known[name] = values[name]
		} else {
			unknown = append(unknown, name)
		}
	}
	return gates, unknown, errors.Join(gates.SetFromMap(known))
}
