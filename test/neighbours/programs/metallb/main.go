// Command metallb announces addresses in the caller's network namespace by layer 2,
// with the announcer of MetalLB's speaker: metallb ADDRESS...
//
// The module's name is below MetalLB's, whose announcer is internal to it.
package main

import (
	"fmt"
	"net"
	"os"
	"time"

	"github.com/go-kit/log"
	"go.universe.tf/metallb/internal/layer2"
	"k8s.io/apimachinery/pkg/util/sets"
)

func main() {
	announcer, err := layer2.New(log.NewLogfmtLogger(log.NewSyncWriter(os.Stderr)), nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, "metallb:", err)
		os.Exit(1)
	}
	// Addresses are announced on interfaces that are known by then.
	for len(announcer.GetInterfaces()) == 0 {
		time.Sleep(10 * time.Millisecond)
	}
	for _, address := range os.Args[1:] {
		announcer.SetBalancer(address, layer2.NewIPAdvertisement(net.ParseIP(address), true, sets.Set[string]{}))
	}
	fmt.Println("announcing")
	select {}
}
