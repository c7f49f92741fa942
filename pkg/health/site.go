// Package health serves the state of the proxy over HTTP to load balancers, the kubelet
// and people.
package health

import (
	"context"
	"net"
	"net/http"
	"time"
)

// Backoff before an address is tried again. The maximum is short because kube-proxy may
// hold the address until it is stopped.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// headerTimeout limits the time to read a request's header, idleTimeout the wait for a
// connection's next request.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 90 * time.Second
)

// listenFunc is net.Listen.
type listenFunc func(network, address string) (net.Listener, error)

// site serves HTTP on one address.
type site struct {
	address  string
	handler  http.Handler
	listen   listenFunc
	hardFail bool        // return an error instead of retrying
	report   func(error) // called once with a failure, and with nil when it is over
}

// run serves until the context ends, and returns when the address is free again. The
// error is nil without hardFail.
func (s *site) run(ctx context.Context) error {
	wait, failing := firstRetry, false
	for ctx.Err() == nil {
		err := s.serve(ctx, func() {
			if failing {
				s.report(nil)
			}
			wait, failing = firstRetry, false
		})
		if ctx.Err() != nil {
			break
		}
		if s.hardFail {
			return err
		}
		if !failing {
			s.report(err)
			failing = true
		}
		sleep(ctx, wait)
		wait = min(2*wait, lastRetry)
	}
	return nil
}

// serve serves once, until the context ends or the listener fails. It calls listening
// when it listens.
func (s *site) serve(ctx context.Context, listening func()) error {
	l, err := s.listen("tcp", s.address)
	if err != nil {
		return err
	}
	listening()
	server := http.Server{Handler: named(s.handler), ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout}
	defer server.Close() // closes connections if the listener has failed
	defer context.AfterFunc(ctx, func() { server.Close() })()
	return server.Serve(l)
}

// ServerName is the Server header of every response. It distinguishes our responses from
// kube-proxy's on the ports that both use.
const ServerName = component

func named(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", ServerName)
		handler.ServeHTTP(w, r)
	})
}

// sleep returns early if the context ends.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
