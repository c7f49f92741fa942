package manifest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2/ktesting"
)

func TestLoad(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRecorder()
	err := New("testdata/mixed", "n1", "").Load(ctx, r)
	if diff := cmp.Diff([]string{
		"set Node n1",
		"set EndpointSlice default/web-1",
		"set Service default/first",
		"set Service default/last",
		"set Service default/web",
		"set Service kube-system/dns",
		"synced",
	}, r.soFar()); diff != "" {
		t.Error(diff)
	}
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		`testdata/mixed/10-services.yaml: document 2 (line 12): Service default/broken: unknown field "spec.ports[0].nodePrt"`,
		`testdata/mixed/10-services.yaml: document 4 (line 28), item 2: Service kube-system/bad-port: spec.ports[0].port: Invalid value: 70000: must be between 1 and 65535, inclusive`,
		`testdata/mixed/20-others.json: document 1 (line 1), item 1: ignoring Service default/web, which is already defined in testdata/mixed/10-services.yaml: document 1 (line 3)`,
		`testdata/mixed/30-syntax.yml: document 2 (line 6): `,
	}
	got := strings.Split(err.Error(), "\n")
	if len(got) != len(want) {
		t.Fatalf("errors:\n%v", err)
	}
	for i := range want {
		if !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("error %q,\n want %q", got[i], want[i])
		}
	}
}

// TestLoadNoFolder must deliver nothing, least of all Synced.
func TestLoadNoFolder(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRecorder()
	if err := New(filepath.Join(t.TempDir(), "none"), "n1", "").Load(ctx, r); err == nil {
		t.Error("no error")
	}
	if calls := r.soFar(); len(calls) > 0 {
		t.Errorf("calls: %q", calls)
	}
}

// TestLoadUnreadableFile: what the file has is unknown, so the rest is not all there is.
func TestLoadUnreadableFile(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	dir := t.TempDir()
	write(t, dir, "a.yaml", manifestOf("a", "10.0.0.1"))
	link(t, "..data/b.yaml", filepath.Join(dir, "b.yaml"))
	r := newRecorder()
	if err := New(dir, "n1", "").Load(ctx, r); err == nil || !strings.Contains(err.Error(), "cannot read") {
		t.Errorf("error %v", err)
	}
	if diff := cmp.Diff([]string{"set Service default/a"}, r.soFar()); diff != "" {
		t.Error(diff)
	}
}

// TestLoadPipe: a pipe has no content to wait for, and must not block the files.
func TestLoadPipe(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	dir := t.TempDir()
	write(t, dir, "b.yaml", manifestOf("b", "10.0.0.1"))
	pipe := filepath.Join(dir, "a.yaml")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	r, loaded := newRecorder(), make(chan error, 1)
	go func() { loaded <- New(dir, "n1", "").Load(ctx, r) }()
	select {
	case err := <-loaded:
		if want := "cannot read " + pipe + ": not a regular file"; err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the pipe blocks the other files")
	}
	if diff := cmp.Diff([]string{"set Service default/b", "synced"}, r.soFar()); diff != "" {
		t.Error(diff)
	}
}

// one parses a text with one object.
func one(t *testing.T, text string) metav1.Object {
	t.Helper()
	p := parse([]byte(text), "n1")
	if len(p.problems) > 0 {
		t.Fatal(p.problems[0].err)
	}
	if len(p.objects) != 1 || p.objects[0].meta == nil {
		t.Fatalf("objects: %v", p.objects)
	}
	return p.objects[0].meta
}

const (
	serviceHead = "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n"
	sliceHead   = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s-1, labels: {kubernetes.io/service-name: s}}\n"
	nodeHead    = "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\n"
)

// TestDefaults compares a terse manifest with the defaults of the API server.
func TestDefaults(t *testing.T) {
	for _, tc := range []struct{ name, terse, full string }{
		{"ClusterIP", serviceHead + "spec: {clusterIP: 10.0.0.1, ports: [{port: 80}]}\n", serviceHead + `spec:
  type: ClusterIP
  clusterIP: 10.0.0.1
  clusterIPs: [10.0.0.1]
  ipFamilies: [IPv4]
  internalTrafficPolicy: Cluster
  sessionAffinity: None
  ports: [{port: 80, protocol: TCP, targetPort: 80}]
`},
		{"dual stack, affinity, named target", serviceHead + "spec: {clusterIPs: ['fd00::1', 10.0.0.1], sessionAffinity: ClientIP, ports: [{port: 80, targetPort: http, protocol: SCTP}]}\n", serviceHead + `spec:
  type: ClusterIP
  clusterIP: "fd00::1"
  clusterIPs: ["fd00::1", 10.0.0.1]
  ipFamilies: [IPv6, IPv4]
  internalTrafficPolicy: Cluster
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 10800}}
  ports: [{port: 80, protocol: SCTP, targetPort: http}]
`},
		{"external IPs", serviceHead + "spec: {clusterIP: 10.0.0.1, externalIPs: [1.2.3.4], ports: [{port: 80}]}\n", serviceHead + `spec:
  type: ClusterIP
  clusterIP: 10.0.0.1
  clusterIPs: [10.0.0.1]
  ipFamilies: [IPv4]
  externalIPs: [1.2.3.4]
  internalTrafficPolicy: Cluster
  externalTrafficPolicy: Cluster
  sessionAffinity: None
  ports: [{port: 80, protocol: TCP, targetPort: 80}]
`},
		{"LoadBalancer without node port", serviceHead + `spec: {type: LoadBalancer, clusterIP: 10.0.0.1, ports: [{port: 80, nodePort: 0}]}
status: {loadBalancer: {ingress: [{ip: 1.2.3.4}, {hostname: lb.example.org}]}}
`, serviceHead + `spec:
  type: LoadBalancer
  allocateLoadBalancerNodePorts: true
  clusterIP: 10.0.0.1
  clusterIPs: [10.0.0.1]
  ipFamilies: [IPv4]
  internalTrafficPolicy: Cluster
  externalTrafficPolicy: Cluster
  sessionAffinity: None
  ports: [{port: 80, protocol: TCP, targetPort: 80}]
status: {loadBalancer: {ingress: [{ip: 1.2.3.4, ipMode: VIP}, {hostname: lb.example.org}]}}
`},
		{"slice", sliceHead + "addressType: IPv6\nports: [{port: 80}, {name: all}]\nendpoints: [{addresses: ['fd00::5']}]\n",
			sliceHead + "addressType: IPv6\nports: [{name: '', port: 80, protocol: TCP}, {name: all, protocol: TCP}]\nendpoints: [{addresses: ['fd00::5'], conditions: {}}]\n"},
		{"node", nodeHead + "spec: {podCIDR: 10.1.0.0/24}\n", nodeHead + "spec: {podCIDR: 10.1.0.0/24, podCIDRs: [10.1.0.0/24]}\n"},
		{"node, the other way", nodeHead + "spec: {podCIDRs: [10.1.0.0/24, 'fd01::/64']}\n", nodeHead + "spec: {podCIDR: 10.1.0.0/24, podCIDRs: [10.1.0.0/24, 'fd01::/64']}\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, want := one(t, tc.terse), one(t, tc.full)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestDefaultsAreFull compares the full manifests of TestDefaults, which use the same
// code, with fixed values.
func TestDefaultsAreFull(t *testing.T) {
	s := one(t, serviceHead+"spec: {clusterIP: 10.0.0.1, sessionAffinity: ClientIP, type: NodePort, ports: [{port: 80}]}\n").(*corev1.Service)
	got := []any{
		s.Namespace, s.Spec.Type, s.Spec.ClusterIPs, s.Spec.IPFamilies, *s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy,
		*s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds, s.Spec.Ports[0].Protocol, s.Spec.Ports[0].TargetPort.IntValue(),
	}
	want := []any{
		"default", corev1.ServiceTypeNodePort, []string{"10.0.0.1"}, []corev1.IPFamily{"IPv4"}, corev1.ServiceInternalTrafficPolicyCluster,
		corev1.ServiceExternalTrafficPolicyCluster, int32(10800), corev1.ProtocolTCP, 80,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	e := one(t, sliceHead+"addressType: IPv4\nports: [{}]\nendpoints: [{addresses: [10.1.0.5]}]\n").(*discoveryv1.EndpointSlice)
	if e.Namespace != "default" || *e.Ports[0].Name != "" || *e.Ports[0].Protocol != corev1.ProtocolTCP || e.Ports[0].Port != nil {
		t.Errorf("slice: %v", e)
	}
	if e.Endpoints[0].Conditions != (discoveryv1.EndpointConditions{}) {
		t.Error("a condition has been set, but unset has a meaning")
	}
}

func TestProblems(t *testing.T) {
	spec := func(s string) string { return serviceHead + "spec: {clusterIP: 10.0.0.1, " + s + "}\n" }
	for _, tc := range []struct{ name, text, want string }{
		{"no kind", "a: b\n", "apiVersion: Required value; kind: Required value"},
		{"no object", "- a\n", "cannot unmarshal array"},
		{"items no list", "apiVersion: v1\nkind: List\nitems: {}\n", "items"},
		{"unknown field", serviceHead + "spce: {}\n", `Service default/s: unknown field "spce"`},
		{"field twice", serviceHead + "spec: {clusterIP: 10.0.0.1, clusterIP: 10.0.0.2}\n", `key "clusterIP" already set`},
		{"wrong type", spec("ports: [{port: http}]"), "spec.ports.port"},
		{"no name", "apiVersion: v1\nkind: Service\nspec: {clusterIP: 10.0.0.1, ports: [{port: 1}]}\n", "metadata.name: Required value"},
		{"headless without name", "apiVersion: v1\nkind: Service\nspec: {clusterIP: None}\n", "metadata.name: Required value"},
		{"name", "apiVersion: v1\nkind: Service\nmetadata: {name: A_b}\nspec: {clusterIP: 10.0.0.1, ports: [{port: 1}]}\n", `metadata.name: Invalid value: "A_b"`},
		{"namespace", "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: x.y}\nspec: {clusterIP: 10.0.0.1, ports: [{port: 1}]}\n", "metadata.namespace: "},
		{"type", spec("type: Magic, ports: [{port: 1}]"), `spec.type: Unsupported value: "Magic"`},
		{"no cluster IP", serviceHead + "spec: {ports: [{port: 1}]}\n", "spec.clusterIP: Required value"},
		{"cluster IP", serviceHead + "spec: {clusterIP: 10.0.0, ports: [{port: 1}]}\n", `spec.clusterIPs[0]: Invalid value: "10.0.0"`},
		{"mapped cluster IP", serviceHead + "spec: {clusterIP: '::ffff:10.0.0.1', ports: [{port: 1}]}\n", "spec.clusterIPs[0]: "},
		{"cluster IPs differ", spec("clusterIPs: [10.0.0.2], ports: [{port: 1}]"), "spec.clusterIPs[0]: "},
		{"cluster IPs of one family", spec("clusterIPs: [10.0.0.1, 10.0.0.2], ports: [{port: 1}]"), "spec.clusterIPs[1]: "},
		{"three cluster IPs", spec("clusterIPs: [10.0.0.1, 'fd00::1', 10.0.0.2], ports: [{port: 1}]"), "spec.clusterIPs: Too many"},
		{"families", spec("ipFamilies: [IPv6], ports: [{port: 1}]"), "spec.ipFamilies[0]: "},
		{"too many families", spec("ipFamilies: [IPv4, IPv6], ports: [{port: 1}]"), "spec.ipFamilies: "},
		{"no port", spec("ports: []"), "spec.ports: Required value"},
		{"port 0", spec("ports: [{port: 0}]"), "spec.ports[0].port: Invalid value: 0"},
		{"protocol", spec("ports: [{port: 1, protocol: tcp}]"), `spec.ports[0].protocol: Unsupported value: "tcp"`},
		{"port name", spec("ports: [{port: 1, name: A}]"), "spec.ports[0].name: "},
		{"ports without name", spec("ports: [{port: 1, name: a}, {port: 2}]"), "spec.ports[1].name: Required value"},
		{"port name twice", spec("ports: [{port: 1, name: a}, {port: 2, name: a}]"), "spec.ports[1].name: Duplicate value"},
		{"port twice", spec("ports: [{port: 1, name: a}, {port: 1, name: b}]"), "spec.ports[1].port: Duplicate value"},
		{"target port", spec("ports: [{port: 1, targetPort: 65536}]"), "spec.ports[0].targetPort: "},
		{"target port name", spec("ports: [{port: 1, targetPort: A--}]"), "spec.ports[0].targetPort: "},
		{"node port", spec("type: NodePort, ports: [{port: 1, nodePort: 65536}]"), "spec.ports[0].nodePort: "},
		{"node port twice", spec("type: NodePort, ports: [{port: 1, name: a, nodePort: 30000}, {port: 2, name: b, nodePort: 30000}]"), "spec.ports[1].nodePort: Duplicate"},
		{"node port of ClusterIP", spec("ports: [{port: 1, nodePort: 30000}]"), "spec.ports[0].nodePort: Forbidden"},
		{"external IP", spec("externalIPs: [127.0.0.1], ports: [{port: 1}]"), "spec.externalIPs[0]: "},
		{"affinity", spec("sessionAffinity: Cookie, ports: [{port: 1}]"), "spec.sessionAffinity: "},
		{"affinity timeout", spec("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}, ports: [{port: 1}]"), "timeoutSeconds: Invalid value: 0"},
		{"internal policy", spec("internalTrafficPolicy: Near, ports: [{port: 1}]"), "spec.internalTrafficPolicy: "},
		{"external policy", spec("type: NodePort, externalTrafficPolicy: Near, ports: [{port: 1}]"), "spec.externalTrafficPolicy: "},
		{"external policy of ClusterIP", spec("externalTrafficPolicy: Local, ports: [{port: 1}]"), "spec.externalTrafficPolicy: "},
		{"distribution", spec("trafficDistribution: Near, ports: [{port: 1}]"), "spec.trafficDistribution: "},
		{"health check port", spec("type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: -1, ports: [{port: 1}]"), "spec.healthCheckNodePort: "},
		{"health check port of Cluster", spec("type: LoadBalancer, healthCheckNodePort: 30000, ports: [{port: 1}]"), "spec.healthCheckNodePort: Forbidden"},
		{"source range", spec("type: LoadBalancer, loadBalancerSourceRanges: [' 10.0.0.0/8 ', x], ports: [{port: 1}]"), "spec.loadBalancerSourceRanges[1]: "},
		{"source range of NodePort", spec("type: NodePort, loadBalancerSourceRanges: [10.0.0.0/8], ports: [{port: 1}]"), "spec.loadBalancerSourceRanges: Forbidden"},
		{"load balancer IP", spec("type: LoadBalancer, ports: [{port: 1}]") + "status: {loadBalancer: {ingress: [{ip: x}]}}\n", "status.loadBalancer.ingress[0].ip: "},
		{"load balancer mode", spec("type: LoadBalancer, ports: [{port: 1}]") + "status: {loadBalancer: {ingress: [{ip: 1.2.3.4, ipMode: Vip}]}}\n", "status.loadBalancer.ingress[0].ipMode: "},

		{"slice without Service", "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a}\naddressType: IPv4\n", "EndpointSlice default/a: metadata.labels[kubernetes.io/service-name]: Required value"},
		{"no address type", sliceHead, "addressType: Required value"},
		{"address type", sliceHead + "addressType: ipv4\n", "addressType: Unsupported value"},
		{"slice port", sliceHead + "addressType: IPv4\nports: [{port: 0}]\n", "ports[0].port: "},
		{"slice port name", sliceHead + "addressType: IPv4\nports: [{name: a, port: 1}, {name: a, port: 2}]\n", "ports[1].name: Duplicate"},
		{"slice protocol", sliceHead + "addressType: IPv4\nports: [{protocol: X}]\n", "ports[0].protocol: "},
		{"no addresses", sliceHead + "addressType: IPv4\nendpoints: [{}]\n", "endpoints[0].addresses: Required value"},
		{"address", sliceHead + "addressType: IPv4\nendpoints: [{addresses: [a]}]\n", "endpoints[0].addresses[0]: "},
		{"address of the other family", sliceHead + "addressType: IPv4\nendpoints: [{addresses: ['fd00::1']}]\n", "must be IPv4"},
		{"loopback", sliceHead + "addressType: IPv4\nendpoints: [{addresses: [127.0.0.1]}]\n", "endpoints[0].addresses[0]: "},
		{"node of endpoint", sliceHead + "addressType: IPv4\nendpoints: [{addresses: [10.1.0.1], nodeName: a_b}]\n", "endpoints[0].nodeName: "},
		{"zone hint", sliceHead + "addressType: IPv4\nendpoints: [{addresses: [10.1.0.1], hints: {forZones: [{name: ' '}]}}]\n", "endpoints[0].hints.forZones[0].name: "},
		{"node hint", sliceHead + "addressType: IPv4\nendpoints: [{addresses: [10.1.0.1], hints: {forNodes: [{name: ''}]}}]\n", "endpoints[0].hints.forNodes[0].name: "},

		{"pod CIDR", nodeHead + "spec: {podCIDR: 10.1.0.0}\n", "Node n1: spec.podCIDRs[0]: "},
		{"pod CIDRs differ", nodeHead + "spec: {podCIDR: 10.1.0.0/24, podCIDRs: [10.2.0.0/24]}\n", "spec.podCIDR: "},
		{"node address", nodeHead + "status: {addresses: [{type: InternalIP, address: x}]}\n", "status.addresses[0].address: "},
		{"node name", "apiVersion: v1\nkind: Node\n", "metadata.name: Required value"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := parse([]byte(tc.text), "n1")
			if len(p.problems) != 1 || len(p.objects) != 0 {
				t.Fatalf("%d problems, %d objects", len(p.problems), len(p.objects))
			}
			if got := p.problems[0].errorf("f.yaml", false).Error(); !strings.Contains(got, tc.want) || !strings.HasPrefix(got, "f.yaml: document 1 (line 1)") {
				t.Errorf("%s\nlacks %s", got, tc.want)
			}
		})
	}
}

func FuzzManifest(f *testing.F) {
	for _, name := range []string{"10-services.yaml", "20-others.json", "30-syntax.yml"} {
		text, err := os.ReadFile(filepath.Join("testdata", "mixed", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(sliceHead + "addressType: IPv4\nports: [null]\nendpoints: [null]\n"))
	f.Add([]byte("apiVersion: v1\nkind: List\nitems: [null, {kind: List, apiVersion: v1, items: [{}]}]\n"))
	f.Add([]byte(serviceHead + "spec: {sessionAffinity: ClientIP, clusterIPs: [''], ports: [null]}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p := parse(text, "n1")
		for _, o := range p.objects {
			if o.meta != nil && o.meta.GetName() != o.key.name.Name {
				t.Errorf("%s is %s", o.key, o.meta.GetName())
			}
		}
		for _, problem := range p.problems {
			if strings.Contains(problem.errorf("f", true).Error(), "\n") {
				t.Errorf("a problem of two lines: %q", problem.err)
			}
		}
	})
}
