// Package cluster brings up a real cluster on one machine, without a container
// engine: its nodes are QEMU guests with kubelet, containerd and the reference CNI
// plugins, its control plane are processes beside them. Everything lives in one
// network namespace of its own and ends with one process.
package cluster
