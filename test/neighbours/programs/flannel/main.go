// Command flannel sets up a node's VXLAN network with flannel's own backend, in the
// caller's network namespace, and keeps it: flannel NODE OTHER, with the numbers of
// both nodes. What its daemon would learn from the API server follows from the
// numbers: node N has 192.168.50.1N and fd00:50::1N, and pods in 10.244.N.0/24 and
// fd00:244:N::/64.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"github.com/flannel-io/flannel/pkg/backend"
	"github.com/flannel-io/flannel/pkg/backend/vxlan"
	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/lease"
	"github.com/flannel-io/flannel/pkg/subnet"
	"github.com/flannel-io/flannel/pkg/trafficmngr/iptables"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "flannel:", err)
		os.Exit(1)
	}
}

func run(own, other string) error {
	link, err := net.InterfaceByName("eth0")
	if err != nil {
		return err
	}
	v4, v6 := addresses(own)
	external := &backend.ExternalInterface{Iface: link, IfaceName: link.Name, IfaceAddr: v4, IfaceV6Addr: v6, ExtAddr: v4, ExtV6Addr: v6}
	b, err := vxlan.New(&leases{own, other}, external)
	if err != nil {
		return err
	}
	network, err := b.RegisterNetwork(context.Background(), &sync.WaitGroup{}, config())
	if err != nil {
		return err
	}
	if err := traffic(network.Lease()); err != nil {
		return err
	}
	fmt.Println("registered")
	network.Run(context.Background())
	return nil
}

// traffic has flannel write its rules for forwarding and masquerading (--ip-masq), and
// look for them every minute: every 5 s, as by default, is more than an emulated
// processor can do beside its work.
func traffic(own *lease.Lease) error {
	const resync = 60
	ctx, c := context.Background(), config()
	manager := &iptables.IPTablesManager{}
	if err := manager.Init(ctx); err != nil {
		return err
	}
	if err := manager.SetupAndEnsureMasqRules(ctx, c.Network, own.Subnet, c.Network, c.IPv6Network, own.IPv6Subnet, c.IPv6Network, own, resync, false); err != nil {
		return err
	}
	manager.SetupAndEnsureForwardRules(ctx, c.Network, c.IPv6Network, resync)
	return nil
}

func addresses(node string) (v4, v6 net.IP) {
	return net.ParseIP("192.168.50.1" + node), net.ParseIP("fd00:50::1" + node)
}

func config() *subnet.Config {
	return &subnet.Config{
		EnableIPv4: true, EnableIPv6: true, BackendType: "vxlan",
		Network: network4("10.244.0.0/16"), IPv6Network: network6("fd00:244::/32"),
		Backend: json.RawMessage(`{"Type": "vxlan"}`),
	}
}

func network4(text string) ip.IP4Net {
	_, n, err := net.ParseCIDR(text)
	if err != nil {
		panic(err)
	}
	return ip.FromIPNet(n)
}

func network6(text string) ip.IP6Net {
	_, n, err := net.ParseCIDR(text)
	if err != nil {
		panic(err)
	}
	return ip.FromIP6Net(n)
}

// leases are the two nodes'.
type leases struct{ own, other string }

// macs are the hardware addresses of a node's VXLAN interfaces.
func macs(node string) (v4, v6 string) { return "02:f1:00:00:04:0" + node, "02:f1:00:00:06:0" + node }

func (l *leases) lease(node string, attrs lease.LeaseAttrs) lease.Lease {
	return lease.Lease{
		EnableIPv4: true, EnableIPv6: true, Attrs: attrs,
		Subnet: network4("10.244." + node + ".0/24"), IPv6Subnet: network6("fd00:244:" + node + "::/64"),
	}
}

func (l *leases) AcquireLease(_ context.Context, attrs *lease.LeaseAttrs) (*lease.Lease, error) {
	own := l.lease(l.own, *attrs)
	return &own, nil
}

// WatchLeases tells of the other node once.
func (l *leases) WatchLeases(ctx context.Context, receiver chan []lease.LeaseWatchResult) error {
	v4, v6 := addresses(l.other)
	mac4, mac6 := macs(l.other)
	data := func(mac string) json.RawMessage {
		return json.RawMessage(fmt.Sprintf(`{"VNI": 1, "VtepMAC": %q}`, mac))
	}
	other := l.lease(l.other, lease.LeaseAttrs{
		PublicIP: ip.FromIP(v4), PublicIPv6: ip.FromIP6(v6), BackendType: "vxlan", BackendData: data(mac4), BackendV6Data: data(mac6),
	})
	receiver <- []lease.LeaseWatchResult{{Events: []lease.Event{{Type: lease.EventAdded, Lease: other}}}}
	<-ctx.Done()
	return ctx.Err()
}

func (l *leases) GetStoredMacAddresses(context.Context) (string, string) { return macs(l.own) }
func (l *leases) GetStoredPublicIP(context.Context) (string, string)     { return "", "" }
func (l *leases) Name() string                                           { return "leases of two nodes" }

func (l *leases) GetNetworkConfig(context.Context) (*subnet.Config, error) { return config(), nil }
func (l *leases) RenewLease(context.Context, *lease.Lease) error           { return nil }

func (l *leases) CompleteLease(context.Context, *lease.Lease, *sync.WaitGroup) error { return nil }

func (l *leases) WatchLease(context.Context, ip.IP4Net, ip.IP6Net, chan []lease.LeaseWatchResult) error {
	return errors.ErrUnsupported
}

func (l *leases) HandleSubnetFile(string, *subnet.Config, bool, ip.IP4Net, ip.IP6Net, int) error {
	return nil
}
