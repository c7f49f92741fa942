package main

import (
	"errors"
	"fmt"
	"slices"
)

// short are the specs of a run that takes minutes: one for each of the common uses of
// Services, and the one that deletes all rules. Slow ones are excluded: SCTP, changes of
// a Service's type, terminating endpoints, restarts.
var short = []string{
	"[sig-network] Services should serve a basic endpoint from pods [Conformance]",
	"[sig-network] Services should be able to create a functioning NodePort service [Conformance]",
	"[sig-network] Services should have session affinity work for service with type clusterIP [LinuxOnly] [Conformance]",
	"[sig-network] Services should support externalTrafficPolicy=Local for type=NodePort",
	"[sig-network] Services should fail health check node port if there are only terminating endpoints",
	"[sig-network] Services should be possible to connect to a service via ExternalIP when the external IP is not assigned to a node",
	"[sig-network] Services should preserve source pod IP for traffic thru service cluster IP [LinuxOnly]",
	"[sig-network] Services should allow pods to hairpin back to themselves through services",
	"[sig-network] Services should be rejected when no endpoints exist",
	"[sig-network] Conntrack should be able to preserve UDP traffic when initial unready endpoints get ready",
	"[sig-network] [Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should function for endpoint-Service: http",
	"[sig-network] NoSNAT Should be able to send traffic between Pods without SNAT",
	"[sig-network] Networking should recreate its iptables rules if they are deleted [Disruptive]",
}

// known returns an error for each name that upstream's tests no longer have.
func known(names, applies []string) error {
	var errs []error
	for _, name := range names {
		if !slices.Contains(applies, name) {
			errs = append(errs, fmt.Errorf("there is no spec %q", name))
		}
	}
	return errors.Join(errs...)
}
