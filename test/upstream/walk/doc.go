// Package walk runs the commands of the migration guide, as they are printed, on a
// cluster with real kubelets, while clients hold connections open.
package walk
