package ipvs

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func key(protocol ip.Protocol, addrPort string) Key {
	ap := netip.MustParseAddrPort(addrPort)
	return Key{Protocol: protocol, Addr: ap.Addr(), Port: ap.Port()}
}

func mark(family ip.Family, fwmark uint32) Key {
	return Key{Addr: family.Unspecified(), FWMark: fwmark}
}

// service returns a Service with the scheduler and real servers of weight 1, or of the
// weight after "=".
func service(scheduler string, dests ...string) Service {
	s := Service{VirtualServer: VirtualServer{Scheduler: scheduler}, RealServers: map[netip.AddrPort]RealServer{}}
	for _, dest := range dests {
		addr, weight, _ := strings.Cut(dest, "=")
		rs := RealServer{Weight: 1}
		if weight != "" {
			rs.Weight = int(weight[0] - '0')
		}
		s.RealServers[netip.MustParseAddrPort(addr)] = rs
	}
	return s
}

var (
	tcp1 = key(ip.TCP, "10.96.0.1:443")
	tcp2 = key(ip.TCP, "10.96.0.2:443")
	udp1 = key(ip.UDP, "10.96.0.1:443")
	tcp6 = key(ip.TCP, "[fd00:96::1]:443")
)

func TestDiff(t *testing.T) {
	persistent := service("rr", "192.0.2.1:80")
	persistent.Flags, persistent.Timeout = FlagPersistent, 10800
	for _, tc := range []struct {
		name       string
		have, want State
		changes    []string
	}{
		{name: "nothing"},
		{
			name: "equal",
			have: State{tcp1: service("rr", "192.0.2.1:80")},
			want: State{tcp1: service("rr", "192.0.2.1:80")},
		},
		{
			name: "from nothing, sorted",
			want: State{
				tcp6:                 service("rr"),
				mark(ip.IPv4, 0x200): service("rr", "192.0.2.1:0"),
				tcp2:                 service("rr"),
				udp1:                 service("rr"),
				tcp1:                 service("rr", "192.0.2.2:80", "192.0.2.1:81", "192.0.2.1:80"),
			},
			changes: []string{
				"add virtual server TCP 10.96.0.1:443",
				"add real server 192.0.2.1:80 to TCP 10.96.0.1:443",
				"add real server 192.0.2.1:81 to TCP 10.96.0.1:443",
				"add real server 192.0.2.2:80 to TCP 10.96.0.1:443",
				"add virtual server UDP 10.96.0.1:443",
				"add virtual server TCP 10.96.0.2:443",
				"add virtual server TCP [fd00:96::1]:443",
				"add virtual server FWM 0x200 IPv4",
				"add real server 192.0.2.1:0 to FWM 0x200 IPv4",
			},
		},
		{
			name:    "to nothing: real servers go with their virtual server",
			have:    State{tcp2: service("rr", "192.0.2.1:80"), tcp1: service("rr")},
			changes: []string{"delete virtual server TCP 10.96.0.1:443", "delete virtual server TCP 10.96.0.2:443"},
		},
		{
			name: "adds, updates, deletes, in this order over all services",
			have: State{
				tcp1: service("rr", "192.0.2.1:80", "192.0.2.2:80"),
				tcp2: service("rr", "192.0.2.1:80", "192.0.2.2:80"),
				udp1: service("rr", "192.0.2.1:80"),
			},
			want: State{
				tcp1: service("wrr", "192.0.2.2:80=0", "192.0.2.3:80"),
				tcp2: service("rr", "192.0.2.2:80", "192.0.2.3:80"),
				tcp6: service("rr", "[2001:db8::1]:80"),
			},
			changes: []string{
				"add real server 192.0.2.3:80 to TCP 10.96.0.1:443",
				"add real server 192.0.2.3:80 to TCP 10.96.0.2:443",
				"add virtual server TCP [fd00:96::1]:443",
				"add real server [2001:db8::1]:80 to TCP [fd00:96::1]:443",
				"update virtual server TCP 10.96.0.1:443",
				"set weight 0 of real server 192.0.2.2:80 of TCP 10.96.0.1:443",
				"delete real server 192.0.2.1:80 of TCP 10.96.0.1:443",
				"delete real server 192.0.2.1:80 of TCP 10.96.0.2:443",
				"delete virtual server UDP 10.96.0.1:443",
			},
		},
		{
			name:    "persistence",
			have:    State{tcp1: service("rr", "192.0.2.1:80")},
			want:    State{tcp1: persistent},
			changes: []string{"update virtual server TCP 10.96.0.1:443"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			changes := Diff(tc.have, tc.want)
			var got []string
			for _, c := range changes {
				got = append(got, c.String())
			}
			if d := cmp.Diff(tc.changes, got); d != "" {
				t.Error(d)
			}
			fake := NewFake()
			mustApply(t, &fake.client, Diff(nil, tc.have))
			mustApply(t, &fake.client, changes)
			if d := cmp.Diff(tc.want.String(), fake.Dump()); d != "" {
				t.Errorf("applying the changes to have does not give want: %s", d)
			}
		})
	}
}
