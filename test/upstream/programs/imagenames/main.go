// Command imagenames prints the names of the images that upstream's tests run, as
// e2e.test --list-images does. It compiles in seconds, e2e.test in minutes.
package main

import (
	"fmt"

	"k8s.io/kubernetes/test/utils/image"
)

func main() {
	for _, config := range image.GetImageConfigs() {
		fmt.Println(config.GetE2EImage())
	}
}
