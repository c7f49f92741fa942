// Command kube-ipvs is a kube-proxy replacement in IPVS mode: one process per
// node, which programs the kernel so that the node serves Services.
package main

import (
	"os"

	"k8s.io/component-base/cli"
)

func main() {
	os.Exit(cli.Run(newCommand(run)))
}
