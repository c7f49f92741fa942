// Package deploy has the dashboard and the alerts of the chart, for tests. Its own tests check the
// manifests and the chart.
package deploy
