// Package deploy has no code: its tests check the manifests and the chart.
package deploy
