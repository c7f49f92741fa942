// Package cluster runs a real cluster on one machine without a container engine. Its
// nodes are QEMU guests with kubelet, containerd and the reference CNI plugins; its
// control plane runs as processes beside them. Everything is in one network namespace and
// ends with one process.
package cluster
