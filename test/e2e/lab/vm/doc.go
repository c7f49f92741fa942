// Package vm gives a command a kernel that can be a node's: one with IPVS,
// dummy interfaces, ipset and loadable modules, whatever the machine itself
// runs. It builds a small image from the distribution's own packages, boots it
// in QEMU, runs the command there and returns its exit code. Where the machine's
// kernel is good enough, the command runs on it directly, in fresh network and
// mount namespaces.
//
// The package needs nothing beyond the standard library, so that the runner is
// compiled in seconds.
package vm
