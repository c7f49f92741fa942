package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// TestStatus: one line for each component, and an exit code for scripts.
func TestStatus(t *testing.T) {
	state := health.NewServer(time.Minute, noCounter{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", health.ServerName)
		state.ProbeHandler().ServeHTTP(w, r)
	}))
	defer server.Close()
	s := settings{Origin: "a test", Config: config.Config{
		Probes: netip.MustParseAddrPort(server.Listener.Addr().String()), Source: config.Source{Manifests: "/m"},
	}}
	show := func() (string, error) {
		var out strings.Builder
		err := showStatus(t.Context(), &out, "table", &s)
		return out.String(), err
	}
	if text, err := show(); !errors.Is(err, errFound) || !strings.Contains(text, "the first sync is not finished") {
		t.Errorf("before the first sync: %v\n%s", err, text)
	}
	state.Passed(time.Second, 3, 0)
	state.Failing(false, 1, 3)
	state.Held(4, 9, 2)
	text, err := show()
	if err != nil {
		t.Errorf("%v\n%s", err, text)
	}
	for _, want := range []string{"3, 1 of them refused", "4 virtual servers, 9 real servers, 2 of them draining", "the folder /m", "may use the node"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	state.Failing(true, 0, 3)
	if text, err := show(); !errors.Is(err, errFound) || !strings.Contains(text, "not ready") {
		t.Errorf("with refused state of the node: %v\n%s", err, text)
	}
	server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") })
	if text, err := show(); !errors.Is(err, errFound) || !strings.Contains(text, "belongs to another program") {
		t.Errorf("another program's answer: %v\n%s", err, text)
	}
	s.Probes = netip.AddrPort{}
	if text, err := show(); err == nil || errors.Is(err, errFound) || text != "" {
		t.Errorf("without probes: %v\n%s", err, text)
	}
}

// noCounter counts nothing.
type noCounter struct{ health.Counter }

// TestConnectivity connects to listening ports, explains failures, and skips ports that
// cannot be tested.
func TestConnectivity(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	open := netip.MustParseAddrPort(l.Addr().String())
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := netip.MustParseAddrPort(free.Addr().String())
	free.Close()
	svc := func(name string, at netip.AddrPort, protocol ip.Protocol, endpoints ...service.Endpoint) service.Service {
		return service.Service{
			Name: types.NamespacedName{Namespace: "default", Name: name}, ClusterIPs: []netip.Addr{at.Addr()},
			Ports: []service.Port{{Name: "p", Protocol: protocol, Port: at.Port(), Endpoints: endpoints}},
		}
	}
	at := func(a netip.AddrPort) service.Endpoint { return service.Endpoint{Addr: a, Ready: true, Node: "other"} }
	local := svc("local", closed, ip.TCP, at(open))
	local.InternalLocal = true
	o := connectivityOptions{limit: time.Second, parallel: 2}
	s := settings{Config: config.Config{Plan: plan.Config{NodeName: "here"}}}
	rows := map[string]inspect.Connection{}
	for _, r := range o.test(t.Context(), &s, inspect.NamesOf(
		svc("answers", open, ip.TCP, at(open)), svc("deaf", closed, ip.TCP, at(closed)), svc("broken", closed, ip.TCP, at(open)),
		svc("udp", open, ip.UDP, at(open)), svc("empty", open, ip.TCP), local,
	)) {
		rows[r.Service] = r
	}
	for name, want := range map[string][2]string{
		"default/answers:p": {inspect.Answered, ""},
		"default/deaf:p":    {inspect.Failed, "connection refused; the endpoints do not answer directly either: " + closed.String()},
		"default/broken:p":  {inspect.Failed, "connection refused; the endpoints answer directly"},
		"default/udp:p":     {inspect.Skipped, "not TCP"},
		"default/empty:p":   {inspect.Skipped, "has no endpoint"},
		"default/local:p":   {inspect.Skipped, "internalTrafficPolicy is Local"},
	} {
		if r := rows[name]; r.Result != want[0] || !strings.HasPrefix(r.Why, want[1]) {
			t.Errorf("%s: %+v, want %q", name, r, want)
		}
	}
	o.services = []string{"default/udp"}
	if rows := o.test(t.Context(), &s, inspect.NamesOf(svc("answers", open, ip.TCP, at(open)))); len(rows) != 0 {
		t.Errorf("--service is ignored: %+v", rows)
	}
}

// TestConnectivityServices: an unusable manifest does not keep the others from being tested, and
// a Service that does not exist is an error.
func TestConnectivityServices(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"good.yaml": "{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}}",
		"bad.yaml":  "{apiVersion: v1, kind: Service, metadata: {name: bad}, spec: {clusterIP: 10.96.0.11, ports: [{port: 0}]}}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := settings{Config: config.Config{Source: config.Source{Manifests: dir}}}
	for name, want := range map[string]string{
		"default/web": "<nil>",
		"default/wbe": `--service "default/wbe": no such Service with a cluster IP, want NAMESPACE/NAME`,
		"web":         `--service "web": no such Service with a cluster IP, want NAMESPACE/NAME`,
	} {
		var notes strings.Builder
		o := connectivityOptions{services: []string{name}, output: "table"}
		err := o.run(t.Context(), io.Discard, &notes, &s)
		if fmt.Sprint(err) != want {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
		if !strings.Contains(notes.String(), "spec.ports[0].port") || err == nil && !strings.Contains(notes.String(), "1 not tested") {
			t.Errorf("%s: notes %q", name, notes.String())
		}
	}
	s.Source.Manifests = filepath.Join(dir, "none")
	if err := (&connectivityOptions{output: "table"}).run(t.Context(), io.Discard, io.Discard, &s); err == nil {
		t.Error("a folder that cannot be read is taken for an empty one")
	}
}

// TestDump: secrets in any file are not archived, and the archive lists what could not be
// collected.
func TestDump(t *testing.T) {
	token := "eyJhbGciOiJSUzI1NiJ9abc.eyJpc3MiOiJrdWJlcm5ldGVz.c2lnbmF0dXJl"
	var archive bytes.Buffer
	d := newDump(&archive, "dump", time.Unix(0, 0))
	d.add("a.txt", []byte("token: "+token+"\nserver: https://admin:hunter2@10.0.0.1:6443\n-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nkept\n"), nil)
	d.add("b.txt", nil, errors.New("is not there"))
	if err := d.close(); err != nil {
		t.Fatal(err)
	}
	files := filesOf(t, &archive)
	want := "token: REDACTED\nserver: https://REDACTED@10.0.0.1:6443\nREDACTED\nkept\n"
	if files["dump/a.txt"] != want {
		t.Errorf("%q, want %q", files["dump/a.txt"], want)
	}
	if files["dump/errors.txt"] != "b.txt: is not there\n" || len(files) != 2 {
		t.Errorf("%q", files)
	}
}

func filesOf(t *testing.T, archive io.Reader) map[string]string {
	t.Helper()
	z, err := gzip.NewReader(archive)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(text)
	}
}
