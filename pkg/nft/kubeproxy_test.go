package nft

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// tables is the fake or the kernel, with kube-proxy's tables in both families.
type tables interface {
	Observe() (KubeProxy, error)
	Apply([]KubeProxyChange) []KubeProxyFailure
}

var proxyTables = map[string]func(t *testing.T) tables{
	"fake": func(*testing.T) tables { return NewFakeKubeProxy(ip.Families...) },
}

func TestKubeProxyTables(t *testing.T) {
	for name, make := range proxyTables {
		t.Run(name, func(t *testing.T) {
			s := make(t)
			observe := func(want KubeProxy) {
				t.Helper()
				got, err := s.Observe()
				if diff := cmp.Diff(want, got); err != nil || diff != "" {
					t.Errorf("%v\n%s", err, diff)
				}
			}
			apply := func(changes []KubeProxyChange) {
				t.Helper()
				if failures := s.Apply(changes); len(failures) > 0 {
					t.Error(failures)
				}
			}
			observe(KubeProxy{ip.IPv4: true, ip.IPv6: true})
			apply([]KubeProxyChange{{ip.IPv6}})
			observe(KubeProxy{ip.IPv4: true})
			apply([]KubeProxyChange{{ip.IPv6}}) // is deleted already, which succeeds
			apply(KubeProxy{ip.IPv4: true}.Removals())
			observe(KubeProxy{})
		})
	}
}
