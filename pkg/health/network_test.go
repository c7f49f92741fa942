package health

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"
)

var errTaken = errors.New("address already in use")

// network is an in-memory network that works in a synctest bubble.
type network struct {
	mu        sync.Mutex
	listeners map[string]*listener
	taken     map[string]bool // by another program
	tries     map[string]int  // attempts to listen
}

func newNetwork() *network {
	return &network{listeners: map[string]*listener{}, taken: map[string]bool{}, tries: map[string]int{}}
}

func (n *network) take(address string, taken bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taken[address] = taken
}

func (n *network) tried(address string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.tries[address]
}

// addresses returns the addresses that are listened on.
func (n *network) addresses() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []string
	for address := range n.listeners {
		all = append(all, address)
	}
	slices.Sort(all)
	return all
}

func (n *network) listen(_, address string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tries[address]++
	if n.taken[address] || n.listeners[address] != nil {
		return nil, errTaken
	}
	l := &listener{network: n, address: address, accept: make(chan net.Conn), closed: make(chan struct{})}
	n.listeners[address] = l
	return l, nil
}

func (n *network) dial(ctx context.Context, _, address string) (net.Conn, error) {
	n.mu.Lock()
	l := n.listeners[address]
	n.mu.Unlock()
	if l == nil {
		return nil, errors.New("connection refused")
	}
	client, server := net.Pipe()
	select {
	case l.accept <- server:
		return client, nil
	case <-l.closed:
		return nil, errors.New("connection reset")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// get sends a request as a client.
func (n *network) get(t *testing.T, url string) (code int, header http.Header, body string) {
	t.Helper()
	return get(t, &http.Client{Transport: &http.Transport{DialContext: n.dial, DisableKeepAlives: true}}, url)
}

func get(t *testing.T, client *http.Client, url string) (code int, header http.Header, body string) {
	t.Helper()
	r, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, r.Header, strings.TrimSpace(string(b))
}

// listener is a listener of an in-memory network.
type listener struct {
	network *network
	address string
	accept  chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() {
		l.network.mu.Lock()
		defer l.network.mu.Unlock()
		delete(l.network.listeners, l.address)
		close(l.closed)
	})
	return nil
}

func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }

// pass advances the time, and waits for what happens meanwhile.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// onLoopback listens on any port of the loopback interface, and returns its address.
func onLoopback(listening chan<- string) listenFunc {
	return func(network, _ string) (net.Listener, error) {
		l, err := net.Listen(network, "127.0.0.1:0")
		if err == nil {
			listening <- l.Addr().String()
		}
		return l, err
	}
}

// journal collects log lines.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) context(ctx context.Context) context.Context {
	return klog.NewContext(ctx, funcr.New(func(_, args string) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.lines = append(j.lines, args)
	}, funcr.Options{}))
}

// count returns the number of lines that have all the words.
func (j *journal) count(words ...string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for _, line := range j.lines {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			n++
		}
	}
	return n
}

func (j *journal) want(t *testing.T, n int, words ...string) {
	t.Helper()
	if got := j.count(words...); got != n {
		t.Errorf("%d lines with %q, want %d, in\n%s", got, words, n, strings.Join(j.lines, "\n"))
	}
}
