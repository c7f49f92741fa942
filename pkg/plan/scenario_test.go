package plan_test

import (
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	testscenario "github.com/kube-ipvs/kube-ipvs/test/scenario"
)

type scenario = testscenario.Scenario

// load reads a scenario of testdata.
func load(t testing.TB, name string) *scenario {
	t.Helper()
	s, err := testscenario.Load(filepath.Join("testdata", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func defaultConfig() plan.Config { return testscenario.DefaultConfig() }

func prefixes(list []string) []netip.Prefix { return testscenario.Prefixes(list) }
