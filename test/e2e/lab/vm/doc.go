// Package vm runs a command on a kernel that supports nodes: one with IPVS, dummy
// interfaces, ipset and loadable modules, whatever the machine's kernel supports. It
// builds a small image from the distribution's packages, boots it in QEMU, runs the
// command there and returns its exit code. If the machine's kernel suffices, the command
// runs on it directly, in new network and mount namespaces.
//
// The package needs nothing beyond the standard library, so that the runner is
// compiled in seconds.
package vm
