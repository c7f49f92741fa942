package health

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

var (
	web = types.NamespacedName{Namespace: "shop", Name: "web"}
	api = types.NamespacedName{Namespace: "shop", Name: "api"}
)

// bench is a HealthChecks on an in-memory network.
type bench struct {
	*HealthChecks
	*network
	journal
	proxyHealthy atomic.Bool

	refusedMu sync.Mutex
	refused   []string // Services, addresses and errors of ports that could not be bound
}

func (b *bench) refuse(name types.NamespacedName, address string, err error) {
	b.refusedMu.Lock()
	defer b.refusedMu.Unlock()
	b.refused = append(b.refused, fmt.Sprint(name, " ", address, ": ", err))
}

func ignore(types.NamespacedName, string, error) {}

// onBench runs a test in a synctest bubble.
func onBench(t *testing.T, test func(*testing.T, *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bench{network: newNetwork()}
		b.proxyHealthy.Store(true)
		b.HealthChecks = NewHealthChecks(b.journal.context(t.Context()), b.proxyHealthy.Load, b.refuse)
		b.HealthChecks.listen = b.network.listen
		defer b.Close()
		test(t, b)
	})
}

func (b *bench) set(name types.NamespacedName, port uint16, local int) {
	b.Set(name, plan.HealthCheck{Port: port, ReadyHere: local})
	synctest.Wait()
}

func (b *bench) remove(name types.NamespacedName) {
	b.Delete(name)
	synctest.Wait()
}

func (b *bench) wantListening(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, b.network.addresses()); diff != "" {
		t.Errorf("listening (-want +got):\n%s", diff)
	}
}

// wantAnswer sends a request to a port on all addresses.
func (b *bench) wantAnswer(t *testing.T, port, code int, name types.NamespacedName, local int) {
	t.Helper()
	got, header, body := b.get(t, fmt.Sprintf("http://0.0.0.0:%d/", port))
	if got != code || header.Get(weightHeader) != fmt.Sprint(local) || header.Get("Content-Type") != "application/json" {
		t.Errorf("port %d answers %d with %v, want %d with weight %d", port, got, header, code, local)
	}
	var read checkBody
	if err := json.Unmarshal([]byte(body), &read); err != nil {
		t.Fatal(err)
	}
	want := checkBody{serviceBody{name.Namespace, name.Name}, local, b.proxyHealthy.Load()}
	if diff := cmp.Diff(want, read); diff != "" {
		t.Errorf("body of port %d (-want +got):\n%s", port, diff)
	}
}

func TestAnswers(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.set(web, 30001, 2)
		b.wantAnswer(t, 30001, http.StatusOK, web, 2)
		b.set(web, 30001, 0)
		b.wantAnswer(t, 30001, http.StatusServiceUnavailable, web, 0)
		b.set(web, 30001, 1)
		b.proxyHealthy.Store(false)
		b.wantAnswer(t, 30001, http.StatusServiceUnavailable, web, 1)
		_, _, body := b.get(t, "http://0.0.0.0:30001/any/path")
		want := `{"service":{"namespace":"shop","name":"web"},"localEndpoints":1,"serviceProxyHealthy":false}`
		if body != want {
			t.Errorf("body %s, want %s", body, want)
		}
		b.want(t, 0, "")
	})
}

func TestEveryAddress(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		set := func(addresses ...netip.Addr) {
			b.Set(web, plan.HealthCheck{Port: 30001, ReadyHere: 1, Restricted: true, Addresses: addresses})
			synctest.Wait()
		}
		set(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"))
		b.wantListening(t, "192.0.2.1:30001", "[2001:db8::1]:30001")
		set(netip.MustParseAddr("192.0.2.2"))
		b.wantListening(t, "192.0.2.2:30001")
		set()
		b.wantListening(t)
		set(netip.MustParseAddr("192.0.2.2"))
		b.wantListening(t, "192.0.2.2:30001")
		set()
		b.set(web, 30001, 1)
		b.wantListening(t, "0.0.0.0:30001")
		b.remove(web)
		b.wantListening(t)
	})
}

func TestChangeOfPort(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.set(web, 30001, 1)
		b.set(web, 30002, 1)
		b.wantListening(t, "0.0.0.0:30002")
		b.wantAnswer(t, 30002, http.StatusOK, web, 1)
		b.set(web, 0, 1)
		b.wantListening(t)
		b.remove(web)
		b.remove(api)
	})
}

// A Service that is deleted and created again keeps its port, and no failure to bind it
// is reported meanwhile.
func TestDeletedAndCreatedAgain(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.set(web, 30001, 1)
		for range 10 {
			b.Delete(web)
			b.Set(web, plan.HealthCheck{Port: 30001, ReadyHere: 3})
		}
		b.Delete(web)
		b.Set(api, plan.HealthCheck{Port: 30001, ReadyHere: 4})
		synctest.Wait()
		b.wantAnswer(t, 30001, http.StatusOK, api, 4)
		b.want(t, 0, "")
	})
}

func TestPortTaken(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.take("0.0.0.0:30001", true)
		b.set(web, 30001, 1)
		pass(time.Minute)
		b.set(web, 30001, 2)
		pass(time.Minute)
		b.want(t, 1, "")
		b.want(t, 1, `"namespace"="shop"`, `"name"="web"`, "30001", errTaken.Error())
		if diff := cmp.Diff([]string{"shop/web 0.0.0.0:30001: address already in use"}, b.refused); diff != "" {
			t.Errorf("refused (-want +got):\n%s", diff)
		}
		if n := b.tried("0.0.0.0:30001"); n < 20 || n > 40 {
			t.Errorf("%d attempts in two minutes", n)
		}

		b.take("0.0.0.0:30001", false)
		pass(lastRetry)
		b.wantAnswer(t, 30001, http.StatusOK, web, 2)
		b.want(t, 1, "Serving the health check node port", "30001")

		b.take("0.0.0.0:30002", true)
		b.set(web, 30002, 1)
		b.remove(web)
		b.wantListening(t)
		if n := len(b.ports); n != 0 {
			t.Errorf("%d ports are remembered", n)
		}
	})
}

// A listener that fails is replaced.
func TestListenerFails(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.set(web, 30001, 1)
		b.listeners["0.0.0.0:30001"].Close()
		pass(firstRetry)
		b.wantAnswer(t, 30001, http.StatusOK, web, 1)
		b.want(t, 1, "retrying")
		b.want(t, 1, "Serving the health check node port")
	})
}

func TestTwoServicesOnePort(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.set(web, 30001, 1)
		b.set(api, 30001, 2)
		b.set(api, 30001, 3)
		b.wantAnswer(t, 30001, http.StatusOK, web, 1)
		b.want(t, 1, "")
		b.want(t, 1, "30001", `"name"="api"`, `"name"="web"`)
		if diff := cmp.Diff([]string{"shop/api :30001: the Service shop/web has this healthCheckNodePort"}, b.refused); diff != "" {
			t.Errorf("refused (-want +got):\n%s", diff)
		}
		b.remove(web)
		b.wantAnswer(t, 30001, http.StatusOK, api, 3)
		b.remove(api)
		b.wantListening(t)
	})
}

// TestTwoServicesOnOtherAddresses: the node's addresses change while two Services have one port.
func TestTwoServicesOnOtherAddresses(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		set := func(address string) {
			for _, name := range []types.NamespacedName{web, api} {
				b.Set(name, plan.HealthCheck{Port: 30001, ReadyHere: 1, Restricted: true, Addresses: []netip.Addr{netip.MustParseAddr(address)}})
			}
			synctest.Wait()
		}
		set("192.0.2.1")
		set("192.0.2.2")
		b.wantListening(t, "192.0.2.2:30001")
		b.remove(web)
		b.wantListening(t, "192.0.2.2:30001")
		b.remove(api)
		b.wantListening(t)
	})
}

// TestSetAndDeleteReturnAtOnce: the proxy's loop must not wait for the network.
func TestSetAndDeleteReturnAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := make(chan struct{})
		h := NewHealthChecks(t.Context(), func() bool { return true }, ignore)
		h.listen = func(_, _ string) (net.Listener, error) {
			<-free
			return nil, errTaken
		}
		began := time.Now()
		h.Set(web, plan.HealthCheck{Port: 30001})
		h.Set(web, plan.HealthCheck{Port: 30002})
		h.Delete(web)
		h.Set(web, plan.HealthCheck{Port: 30002})
		if took := time.Since(began); took > 0 {
			t.Errorf("took %s", took)
		}
		close(free)
		h.Close()
	})
}

func TestClose(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.set(web, 30001, 1)
		b.set(api, 30002, 1)
		b.Close()
		b.wantListening(t)
		b.set(web, 30003, 1)
		b.remove(api)
		b.Close()
		b.wantListening(t)
		b.want(t, 0, "")
	})
}

func TestRealListener(t *testing.T) {
	listening := make(chan string, 1)
	h := NewHealthChecks(t.Context(), func() bool { return true }, ignore)
	h.listen = onLoopback(listening)
	h.Set(web, plan.HealthCheck{Port: 30001, ReadyHere: 1})
	address := <-listening
	if code, _, body := get(t, http.DefaultClient, "http://"+address); code != http.StatusOK {
		t.Errorf("%d: %s", code, body)
	}
	h.Close()
	if c, err := net.Dial("tcp", address); err == nil {
		c.Close()
		t.Error("still listening after Close")
	}
}
