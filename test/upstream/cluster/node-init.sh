#!/bin/sh
# A node's first process: what a system has mounted, its network, containerd and
# kubelet. /node is shared with the machine around: env says who the node is.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
for dir in /run /tmp /dev/shm; do mount -t tmpfs tmpfs $dir; done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf 2>/dev/null
ln -sfn /proc/self/fd /dev/fd
# What is mounted in a Pod's directory is to be seen in its containers.
mount --make-rshared /
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 node /node
. /node/env

hostname "$NAME"
modprobe -a overlay br_netfilter
ip link set lo up
sysctl -q -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.forwarding=1 \
	net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1 \
	net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0 \
	vm.overcommit_memory=1 vm.panic_on_oom=0 kernel.panic=10 kernel.panic_on_oops=1
[ -f /node/network ] && . /node/network
mkdir -p /etc/cni/net.d
[ -f /node/cni.conflist ] && cp /node/cni.conflist /etc/cni/net.d/10-lab.conflist

containerd --config /etc/containerd/config.toml >/node/containerd.log 2>&1 &
containerd=$!
until ctr version >/dev/null 2>&1; do sleep 0.2; done
for archive in /node/images/*.tar; do
	[ -f "$archive" ] && ctr -n k8s.io images import "$archive" >>/node/import.log 2>&1 || failed=1
done
if [ "$IMPORT" = only ]; then
	[ "$failed" ] || touch /node/imported
	kill $containerd
	wait
	sync
	umount /node
	mount -o remount,ro /
	busybox reboot -f # which ends a guest of the lab
fi

# Some of upstream's tests run commands on nodes.
cp /node/authorized_keys /root/.ssh/ && chmod -R go= /root && dropbear -R -s

# As a system's service manager does, begin again whatever happens.
while :; do
	kubelet --config=/etc/kubelet.yaml --kubeconfig=/node/kubeconfig --hostname-override="$NAME" \
		--node-ip="$ADDRESSES" --v=1 >>/node/kubelet.log 2>&1
	sleep 1
done
