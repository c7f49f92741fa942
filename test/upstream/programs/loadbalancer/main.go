// Command loadbalancer is the cloud of a cluster that has none, as Services of type
// LoadBalancer see it: it gives them addresses, and routes these from where it runs to
// the nodes that answer their health checks. Packets stay as they are, as those of a
// balancer do that status.loadBalancer calls "VIP".
package main

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/cloud-provider/controllers/service"
	controllersmetrics "k8s.io/component-base/metrics/prometheus/controllers"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "loadbalancer:", err)
		os.Exit(1)
	}
}

func run() error {
	kubeconfig := flag.String("kubeconfig", "", "file to reach the API server with")
	ranges := flag.String("ranges", "", "prefixes to take addresses from, one of each family at most, with commas between")
	sources := flag.String("sources", "", "addresses that packets to them leave this machine with, in the same way")
	flag.Parse()
	families, err := parseFamilies(*ranges, *sources)
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return serve(ctx, client, newCloud(ctx, families))
}

// workers is how many Services are looked after at once.
const workers = 2

// serve runs the controller that cloud providers share, which has the finalizer, the
// status and what Nodes there are, over this cloud.
func serve(ctx context.Context, client kubernetes.Interface, c *cloud) error {
	factory := informers.NewSharedInformerFactory(client, 0)
	controller, err := service.New(c, client, factory.Core().V1().Services(), factory.Core().V1().Nodes(),
		"cluster", utilfeature.DefaultFeatureGate)
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	controller.Run(ctx, workers, controllersmetrics.NewControllerManagerMetrics("loadbalancer"))
	return nil
}

// parseFamilies reads both flags: the first prefix goes with the first address.
func parseFamilies(ranges, sources string) (families []*family, err error) {
	prefixes, addresses := strings.Split(ranges, ","), strings.Split(sources, ",")
	if len(prefixes) != len(addresses) {
		return nil, fmt.Errorf("-ranges has %d entries and -sources %d", len(prefixes), len(addresses))
	}
	for i := range prefixes {
		f := &family{}
		if f.prefix, err = netip.ParsePrefix(prefixes[i]); err != nil {
			return nil, fmt.Errorf("-ranges: %w", err)
		}
		if f.source, err = netip.ParseAddr(addresses[i]); err != nil {
			return nil, fmt.Errorf("-sources: %w", err)
		}
		if f.prefix.Addr().Is4() != f.source.Is4() {
			return nil, fmt.Errorf("-sources: %s and %s are not of one family", f.prefix, f.source)
		}
		f.last = f.prefix.Masked().Addr()
		families = append(families, f)
	}
	return families, nil
}
