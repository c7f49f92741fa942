//go:build e2e

package neighbours

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// inDebian returns a script that runs another one in Debian's root file system, with the
// node's /run and a read-only /sys, so that no program waits for udev.
func inDebian(script string) string {
	root := path("debian")
	return strings.Join([]string{
		"set -e; d=/tmp/debian.$$; mkdir -p $d; mount -t tmpfs tmpfs $d; mkdir $d/up $d/work $d/root",
		"mount -t overlay overlay -o lowerdir=" + root + ",upperdir=$d/up,workdir=$d/work $d/root; r=$d/root",
		"mkdir -p $r/proc $r/sys $r/dev $r/run $r/tmp $r/root $r/var/lib $r/var/log",
		"mount -t proc proc $r/proc; mount -t sysfs -o ro sys $r/sys; mount --bind /dev $r/dev; mount --bind /run $r/run",
		`printf 'root:x:0:0:root:/root:/bin/sh\nsystemd-network:x:998:998::/:/bin/sh\nmessagebus:x:997:997::/:/bin/sh\n' >$r/etc/passwd`,
		`printf 'root:x:0:\nsystemd-network:x:998:\nmessagebus:x:997:\n' >$r/etc/group`,
		"[ -e $r/bin/sh ] || ln -s dash $r/bin/sh",
		"for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do ln -sf xtables-nft-multi $r/usr/sbin/$name; done",
		"cat >$d/root/script <<'SCRIPT'\n" + script + "\nSCRIPT",
		"exec chroot $r /bin/sh -e /script",
	}, "\n")
}

// startDebian runs a script in Debian until ready returns nil.
func (s *side) startDebian(script string, ready func(*lab.Process) error) *lab.Process {
	s.t.Helper()
	return s.Node.StartProgram(ready, "sh", "-c", inDebian("export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C\n"+script))
}

// logs waits for a word in the log.
func logs(word string) func(*lab.Process) error {
	return func(p *lab.Process) error {
		if !strings.Contains(p.Log(), word) {
			return fmt.Errorf("no %q in its log yet", word)
		}
		return nil
	}
}

// ordinary returns the set-up of a node with pods on a bridge and a Debian program.
func ordinary(key string, order int, title, what, missing string, start func(*side)) setup {
	return setup{
		key: key, plan: ordinaryPlan, Result: Result{Order: order, Title: title, What: what, Missing: missing},
		build: func(s *side) { s.addBridgePods(s.plan); start(s) },
		restart: func(s *side) {
			s.neighbour.Terminate()
			start(s)
		},
	}
}

const networkdConfig = `mkdir -p /etc/systemd/network /run/systemd/netif
cat >/etc/systemd/network/10-uplink.network <<'END'
[Match]
Name=eth0
[Network]
Address=192.168.50.11/24
Address=fd00:50::11/64
Gateway=192.168.50.1
Gateway=fd00:50::1
IPv6AcceptRA=no
END
exec env SYSTEMD_LOG_LEVEL=info SYSTEMD_LOG_TARGET=console /lib/systemd/systemd-networkd`

// TestNeighbourNetworkd tests systemd-networkd, which deletes foreign policy rules and
// routes when it starts.
func TestNeighbourNetworkd(t *testing.T) {
	u := ordinary("networkd", 50, "systemd-networkd",
		"Debian's systemd-networkd 252 with a .network file for the uplink, and its defaults: `ManageForeignRoutes` and `ManageForeignRoutingPolicyRules` are on.",
		"Its reload by D-Bus; DHCP.",
		func(s *side) { s.neighbour = s.startDebian(networkdConfig, logs("eth0: Gained carrier")) })
	u.started = u.restart
	u.run(t)
}

const keepalivedConfig = `cat >/tmp/keepalived.conf <<'END'
vrrp_instance lan {
    state MASTER
    interface eth0
    virtual_router_id 51
    priority 200
    advert_int 1
    virtual_ipaddress {
        192.168.50.200/24
    }
}
virtual_server 192.168.50.200 8080 {
    lb_algo rr
    lb_kind NAT
    protocol TCP
    real_server 10.244.1.3 8001 {
    }
}
END
exec keepalived --dont-fork --log-console --log-detail --no-syslog -f /tmp/keepalived.conf`

// TestNeighbourKeepalived tests keepalived with a VRRP address and a virtual server of
// its own.
func TestNeighbourKeepalived(t *testing.T) {
	onlyLong(t)
	u := ordinary("keepalived", 51, "keepalived",
		"Debian's keepalived 2.2.7 with VRRP on the uplink and a virtual server of its own at the VRRP address.", "A second router; health checks of real servers.",
		func(s *side) {
			s.neighbour = s.startDebian(keepalivedConfig, func(*lab.Process) error {
				if out := s.Node.Exec("ip", "address", "show", "dev", "eth0"); !strings.Contains(out, "192.168.50.200") {
					return fmt.Errorf("no address of VRRP's: %s", out)
				}
				return nil
			})
		})
	u.checks = []check{{name: "keepalived's own virtual server answers", good: []string{"answered by here"}, ask: func(s *side) string {
		s.Eth0.Accept("192.168.50.200")
		return word(s.client("outside").hosts[0].DialFrom(s.ports.next(), deadline, lab.TCP, "192.168.50.200:8080"))
	}}}
	u.run(t)
}

const firewalldConfig = `mkdir -p /run/dbus /etc/firewalld
cat >/tmp/bus.conf <<'END'
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><listen>unix:path=/run/dbus/system_bus_socket</listen><auth>EXTERNAL</auth>
<policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/></policy></busconfig>
END
rm -f /run/dbus/system_bus_socket
dbus-daemon --config-file=/tmp/bus.conf --nofork >/dev/null 2>&1 &
export DBUS_SYSTEM_BUS_ADDRESS=unix:path=/run/dbus/system_bus_socket
mkdir -p /etc/firewalld/zones
cat >/etc/firewalld/zones/public.xml <<'END'
<?xml version="1.0" encoding="utf-8"?>
<zone target="DROP"><short>Public</short><interface name="eth0"/><service name="ssh"/>
<port port="80-81" protocol="tcp"/><port port="80-81" protocol="udp"/>
<port port="30000-32767" protocol="tcp"/><port port="30000-32767" protocol="udp"/><forward/></zone>
END
cat >/etc/firewalld/zones/trusted.xml <<'END'
<?xml version="1.0" encoding="utf-8"?>
<zone target="ACCEPT"><short>Trusted</short><interface name="cni0"/><source address="10.244.0.0/16"/><source address="fd00:244::/32"/><forward/></zone>
END
exec firewalld --nofork --nopid`

// TestNeighbourFirewalld tests firewalld with a zone that drops everything that is not
// allowed.
func TestNeighbourFirewalld(t *testing.T) {
	onlyLong(t)
	ordinary("firewalld", 52, "firewalld, default deny",
		"Debian's firewalld 1.3.3 with its nftables back end. The uplink's zone drops all but the Services' ports and node ports; pods are in the zone “trusted”.",
		"The iptables back end.",
		func(s *side) {
			s.neighbour = s.startDebian(firewalldConfig, func(*lab.Process) error {
				if out := s.Node.Exec("nft", "list", "ruleset"); !strings.Contains(out, "filter_IN_public") || !strings.Contains(out, "30000-32767") {
					return fmt.Errorf("no zone yet")
				}
				return nil
			})
		}).run(t)
}

const ufwConfig = `cp /usr/share/ufw/ufw.conf /etc/ufw/; cp /usr/share/ufw/iptables/*.rules /etc/ufw/
for f in before after; do [ -e /etc/ufw/$f.rules ] || cp /usr/share/ufw/$f*.rules /etc/ufw/; done
cp /usr/share/ufw/*.init /etc/ufw/; touch /etc/ufw/sysctl.conf
sed -i 's,^IPT_SYSCTL=.*,IPT_SYSCTL=,; s,^IPV6=.*,IPV6=yes,' /etc/default/ufw
mkdir -p /lib/ufw /etc/ufw/applications.d
ufw allow from 10.244.0.0/16; ufw allow from fd00:244::/32
for p in tcp udp; do ufw allow proto $p to any port 80:81,30000:32767; done
ufw route allow from 10.244.0.0/16; ufw route allow to 10.244.0.0/16
ufw route allow from fd00:244::/32; ufw route allow to fd00:244::/32
ufw --force enable
echo enabled
exec sleep infinity`

// TestNeighbourUFW tests ufw with its default deny policy.
func TestNeighbourUFW(t *testing.T) {
	onlyLong(t)
	ordinary("ufw", 53, "ufw, default deny",
		"Debian's ufw 0.36.2, with iptables' nft back end: incoming and routed traffic is denied, except to the Services' ports, node ports and pods.", "",
		func(s *side) {
			s.neighbour = s.startDebian(ufwConfig, func(p *lab.Process) error {
				for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
					if out := s.Node.Exec(program, "-S"); !strings.Contains(out, "-P INPUT DROP") || !strings.Contains(out, "-P FORWARD DROP") || !strings.Contains(out, "30000:32767") {
						return fmt.Errorf("%s has no rules of ufw's yet", program)
					}
				}
				return logs("\nenabled")(p)
			})
		}).run(t)
}
