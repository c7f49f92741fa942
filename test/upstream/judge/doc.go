// Package judge runs Kubernetes' own end-to-end tests against a cluster, one spec
// at a time, so that a run can be stopped and gone on with, and keeps what became
// of each.
package judge
