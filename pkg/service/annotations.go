package service

// AnnotationPrefix begins the names of our annotations.
const AnnotationPrefix = "kube-ipvs.io/"

// Annotations that override how the node distributes the connections of a Service.
const (
	// AnnotationScheduler on a Service names its IPVS scheduler, such as mh.
	AnnotationScheduler = AnnotationPrefix + "scheduler"
	// AnnotationSchedulerFlags on a Service lists the scheduler's flags, such as
	// "mh-port,mh-fallback". The default is ipvs.DefaultFlags.
	AnnotationSchedulerFlags = AnnotationPrefix + "scheduler-flags"
	// AnnotationWeights on a Service lists the weights of the endpoints in a zone or on
	// a node, such as "zone-a=3,zone-b=1,node/worker-7=5". The node takes precedence
	// over the zone. All other endpoints have weight 1.
	AnnotationWeights = AnnotationPrefix + "weights"
)

// AnnotationMasquerade set to "true" masquerades external traffic of the Service even
// under externalTrafficPolicy: Local. The endpoints see the node instead of the client
// and reply through it. Without it, pods with a route of their own to the client
// (macvlan, a second interface) reply directly, and the client rejects the reply.
const AnnotationMasquerade = AnnotationPrefix + "masquerade"

// AnnotationIPMode set to "Proxy" leaves the Service's LoadBalancer IPs to the cloud,
// as if all had this ipMode in the Service's status; see corev1.LoadBalancerIPMode.
// "VIP" has no effect.
const AnnotationIPMode = AnnotationPrefix + "ip-mode"

// AnnotationOnePacket set to "true" schedules each UDP datagram by itself, even those
// from one client port (kubernetes#110814). It is for traffic without replies, such as
// syslog: IPVS keeps no connection that would restore the Service's address in a reply
// (ip_vs_update_conntrack in net/netfilter/ipvs/ip_vs_nfct.c).
const AnnotationOnePacket = AnnotationPrefix + "one-packet"

// AnnotationMaxConnections limits the connections of each endpoint, counted by each node
// for each address and port of the Service. An endpoint at the limit gets no new
// connections until a quarter of them have ended. Closed connections count as long as
// IPVS tracks them. If all endpoints are at the limit, new connections are refused.
const AnnotationMaxConnections = AnnotationPrefix + "max-connections"

// AnnotationSNATSources on a Node maps interfaces without an address of their own, by name
// or MAC address, to the ENI's primary address, one per family:
// "eth1=10.12.192.10,eth1=fd00:12:192::10,02:00:00:00:00:01=10.12.193.10".
const AnnotationSNATSources = AnnotationPrefix + "snat-sources"
