// Package judge runs Kubernetes' own end-to-end tests against a cluster, one spec at a
// time, and records the result of each, so that a run can be stopped and continued.
package judge
