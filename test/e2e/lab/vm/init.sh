#!/usr/bin/dash
# The guest's first process: mounts what a system has, reaches the host, runs
# /out/run with its output on the virtio port, leaves its exit code in /out/rc.
export PATH=/usr/bin HOME=/root

fail() {
	echo "lab-init: $*" >/dev/console
	reboot -f
}

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
for dir in /run /tmp /dev/shm /mnt; do mount -t tmpfs tmpfs $dir; done
mkdir -p /run/netns
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t debugfs debug /sys/kernel/debug 2>/dev/null
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
echo /sbin/modprobe >/proc/sys/kernel/modprobe
hostname lab

# A machine with a disk of its own only begins here.
case $(cat /proc/cmdline) in
*lab.root=disk*)
	modprobe -a -q virtio_pci virtio_blk ext4 virtio_net virtio_console 9p 9pnet_virtio overlay
	mount -t ext4 /dev/vda /mnt || fail "cannot mount the disk"
	mkdir -p /mnt/usr/lib/modules
	mount -t tmpfs modules /mnt/usr/lib/modules
	cp -a /usr/lib/modules/. /mnt/usr/lib/modules/
	umount /dev/pts /dev/shm /sys/kernel/debug /sys/fs/cgroup /run /tmp /sys 2>/dev/null
	exec switch_root /mnt /usr/sbin/init
	;;
esac

# sctp is here because namespaces that are older than the module were seen not to
# answer their first associations.
modprobe -a -q virtio_pci virtio_net virtio_console 9p 9pnet_virtio overlay ip_vs ip_vs_rr dummy veth sctp

# Without 9p everything is here already.
case $(cat /proc/cmdline) in
*lab.baked*) baked=yes ;;
*) baked= ;;
esac
share="-t 9p -o trans=virtio,version=9p2000.L,msize=512000"
mkdir -p /shared
if [ -z "$baked" ]; then
	mount $share out /out || fail "cannot mount the output directory"
	mount $share shared /shared || fail "cannot mount the shared directory"
	mount $share,ro,cache=loose cache /cache || fail "cannot mount the cache"
	mkdir /mnt/src /mnt/upper /mnt/work
	mount $share,ro,cache=loose src /mnt/src || fail "cannot mount the source tree"
	mount -t overlay -o lowerdir=/mnt/src,upperdir=/mnt/upper,workdir=/mnt/work overlay /src ||
		fail "cannot overlay the source tree"
fi

ip link set lo up
ip addr add 10.0.2.15/24 dev eth0
ip link set eth0 up
ip route add default via 10.0.2.2

# port NAME prints the device of a virtio port.
port() {
	for name in /sys/class/virtio-ports/*/name; do
		[ "$(cat $name)" = "$1" ] && echo /dev/$(basename $(dirname $name))
	done
}

output=$(port lab.out)
[ -n "$output" ] || fail "no port for the output"

setsid /usr/bin/dash /out/run </dev/null >$output 2>&1
echo $? >/out/rc.new
mv /out/rc.new /out/rc
[ -z "$baked" ] || tar -C /out -cf - . >$(port lab.files) || fail "cannot send the output directory"
reboot -f
