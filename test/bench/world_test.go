//go:build e2e

package bench

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// countedService is a Service whose exchanges are measured. All serve TCP and UDP on
// servicePort with one endpoint.
type countedService struct {
	name      string
	vip       addressPair
	nodePorts [2]uint16 // of TCP and UDP
	balancer  addressPair
	local     bool // externalTrafficPolicy
	ranges    []string
	endpoint  addressPair
	onNode    bool // the endpoint is on the node that is measured
}

// world is a set of Services and features besides the ClusterIPs.
type world struct {
	name     string
	services []*countedService
	eni      bool
	paths    []path
	subjects []string // by name
	onlyTCP  bool
}

var (
	plainService = &countedService{name: "plain", vip: pair("10.96.0.30", "fd00:10:96::30"), endpoint: serverPair, onNode: true}
	portService  = &countedService{name: "port", vip: pair("10.96.0.31", "fd00:10:96::31"), nodePorts: [2]uint16{30080, 30081}, endpoint: serverPair, onNode: true}
	lbService    = &countedService{name: "balanced", vip: pair("10.96.0.32", "fd00:10:96::32"), nodePorts: [2]uint16{30082, 30083},
		balancer: pair("203.0.113.32", "fd00:203::32"), endpoint: serverPair, onNode: true}
	localService = &countedService{name: "local", vip: pair("10.96.0.33", "fd00:10:96::33"), nodePorts: [2]uint16{30084, 30085},
		balancer: pair("203.0.113.33", "fd00:203::33"), endpoint: serverPair, onNode: true, local: true}
	rangesService = &countedService{name: "ranges", vip: pair("10.96.0.34", "fd00:10:96::34"), nodePorts: [2]uint16{30086, 30087},
		balancer: pair("203.0.113.34", "fd00:203::34"), endpoint: serverPair, onNode: true,
		ranges: []string{"192.168.60.0/24", "198.51.100.0/24", "fd00:60::/64"}}
	remoteService = &countedService{name: "remote", vip: pair("10.96.0.35", ""), nodePorts: [2]uint16{30088, 30089},
		balancer: pair("203.0.113.35", ""), endpoint: remotePair}
	eniService = &countedService{name: "eni", vip: pair("10.96.0.36", ""), nodePorts: [2]uint16{30090, 30091},
		balancer: pair("203.0.113.36", ""), endpoint: eniPodPair, onNode: true}
)

// Paths that are measured in several worlds.
var (
	clusterIPPath  = path{name: "ClusterIP", from: fromPod, service: plainService}
	clusterIP6Path = path{name: "ClusterIP, IPv6", from: fromPod, service: plainService, family: 1}
	nodePortPath   = path{name: "NodePort", from: fromOutside, service: portService, kind: byNodePort, masqueraded: true}
	nodePort6Path  = path{name: "NodePort, IPv6", from: fromOutside, service: portService, kind: byNodePort, family: 1, masqueraded: true}
	balancerPath   = path{name: "load balancer", from: fromOutside, service: lbService, kind: byBalancer, masqueraded: true}
	localPath      = path{name: "Local", from: fromOutside, service: localService, kind: byBalancer}
	rangesPath     = path{name: "source ranges", from: fromOutside, service: rangesService, kind: byBalancer, masqueraded: true}
	balancer6Path  = path{name: "load balancer, IPv6", from: fromOutside, service: lbService, kind: byBalancer, family: 1, masqueraded: true}
	local6Path     = path{name: "Local, IPv6", from: fromOutside, service: localService, kind: byBalancer, family: 1}
	ranges6Path    = path{name: "source ranges, IPv6", from: fromOutside, service: rangesService, kind: byBalancer, family: 1, masqueraded: true}
	eniOutPath     = path{name: "from an ENI's pod", from: fromENIPod, service: remoteService, kind: byBalancer, masqueraded: true}
	eniInPath      = path{name: "to an ENI's pod", from: fromOutside, service: eniService, kind: byBalancer, masqueraded: true}
)

// Paths that the feature of a world does not affect.
var clusterIPElsewhere, nodePortElsewhere = elsewhere(clusterIPPath), elsewhere(nodePortPath)

func elsewhere(p path) path {
	p.elsewhere = true
	return p
}

// defaultWorld has no feature except node ports.
const defaultWorld = "default"

// Names of subjects.
const (
	bareName  = "bare IPVS"
	floorName = leastIPVS
	// floorAgainName is the floor, measured again after all other subjects to show the
	// drift.
	floorAgainName = "floor, again"
	portName       = "kube-ipvs, by port"
	fwmarkName     = "kube-ipvs, reply routing"
	ipvsName       = "kube-proxy, ipvs"
	iptName        = "kube-proxy, iptables"
	nftName        = "kube-proxy, nftables"
)

var worlds = []*world{
	{name: defaultWorld, services: []*countedService{plainService, portService},
		paths:    []path{clusterIPPath, nodePortPath, clusterIP6Path, nodePort6Path},
		subjects: []string{Direct, bareName, floorName, KubeIPVS, ipvsName, iptName, nftName, floorAgainName}},
	{name: "ENI", services: []*countedService{plainService, portService, remoteService, eniService}, eni: true,
		paths:    []path{eniOutPath, eniInPath, clusterIPElsewhere, nodePortElsewhere},
		subjects: []string{Direct, floorName, KubeIPVS, fwmarkName, ipvsName, nftName}},
	{name: "Local", services: []*countedService{plainService, portService, localService},
		paths:    []path{localPath, local6Path, clusterIPElsewhere, nodePortElsewhere},
		subjects: []string{Direct, floorName, KubeIPVS, ipvsName, nftName}},
	{name: "load balancer", services: []*countedService{plainService, portService, lbService},
		paths:    []path{balancerPath, balancer6Path, clusterIPElsewhere, nodePortElsewhere},
		subjects: []string{Direct, floorName, KubeIPVS, portName, ipvsName, nftName}},
	{name: "source ranges", services: []*countedService{plainService, portService, rangesService},
		paths:    []path{rangesPath, ranges6Path, clusterIPElsewhere, nodePortElsewhere},
		subjects: []string{Direct, floorName, KubeIPVS, ipvsName}},
	{name: "ClusterIP", services: []*countedService{plainService}, paths: []path{clusterIPPath},
		subjects: []string{Direct, floorName, KubeIPVS}},
}

func countedName(s *countedService) string { return "counted-" + s.name }

// addNode creates the Node object, from which kube-proxy learns the addresses for node
// ports.
func (a *api) addNode() {
	a.t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	created, err := a.client.CoreV1().Nodes().Create(a.t.Context(), node, metav1.CreateOptions{})
	must(a.t, err)
	for _, address := range nodePair.texts() {
		created.Status.Addresses = append(created.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: address})
	}
	_, err = a.client.CoreV1().Nodes().UpdateStatus(a.t.Context(), created, metav1.UpdateOptions{})
	must(a.t, err)
}

// enter creates the world's Services, and leave deletes them.
func (a *api) enter(w *world) {
	a.t.Helper()
	for _, s := range w.services {
		a.addSlices(s)
		a.addService(s)
	}
}

func (a *api) leave(w *world) {
	a.t.Helper()
	for _, s := range w.services {
		must(a.t, a.client.CoreV1().Services(metav1.NamespaceDefault).Delete(a.t.Context(), countedName(s), metav1.DeleteOptions{}))
		for family := range s.endpoint {
			if s.endpoint[family].IsValid() {
				must(a.t, a.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Delete(a.t.Context(), sliceName(s, family), metav1.DeleteOptions{}))
			}
		}
	}
}

func (s *countedService) object() *corev1.Service {
	svc := newService(0)
	svc.Name = countedName(s)
	svc.Spec.ClusterIP, svc.Spec.ClusterIPs = s.vip[0].String(), s.vip.texts()
	if s.vip[1].IsValid() {
		svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
		svc.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
	}
	svc.Spec.Ports = nil
	for i, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: portNames[i], Protocol: protocol, Port: servicePort,
			TargetPort: intstr.FromInt32(targetPort), NodePort: int32(s.nodePorts[i])})
	}
	switch {
	case s.balancer[0].IsValid():
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		svc.Spec.LoadBalancerSourceRanges = s.ranges
	case s.nodePorts[0] != 0:
		svc.Spec.Type = corev1.ServiceTypeNodePort
	}
	if s.local {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	return svc
}

var portNames = [2]string{"tcp", "udp"}

func (a *api) addService(s *countedService) {
	a.t.Helper()
	services := a.client.CoreV1().Services(metav1.NamespaceDefault)
	created, err := services.Create(a.t.Context(), s.object(), metav1.CreateOptions{})
	must(a.t, err)
	for _, address := range s.balancer.texts() {
		created.Status.LoadBalancer.Ingress = append(created.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: address})
	}
	if s.balancer[0].IsValid() {
		_, err = services.UpdateStatus(a.t.Context(), created, metav1.UpdateOptions{})
		must(a.t, err)
	}
}

func sliceName(s *countedService, family int) string {
	return fmt.Sprintf("%s-%d", countedName(s), family)
}

func (a *api) addSlices(s *countedService) {
	a.t.Helper()
	for family, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		if !s.endpoint[family].IsValid() {
			continue
		}
		slice := newSlice(0, 0)
		slice.Name, slice.Labels = sliceName(s, family), map[string]string{discoveryv1.LabelServiceName: countedName(s)}
		slice.AddressType, slice.Ports = kind, nil
		for i, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
			slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: ptr.To(portNames[i]), Protocol: ptr.To(protocol), Port: ptr.To[int32](targetPort)})
		}
		node := "elsewhere"
		if s.onNode {
			node = "node"
		}
		slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{s.endpoint[family].String()}, NodeName: ptr.To(node)}}
		_, err := a.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Create(a.t.Context(), slice, metav1.CreateOptions{})
		must(a.t, err)
	}
}
