package plan_test

import (
	"net/netip"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
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

func parseLink(index int, name string, addresses []string) routing.Link {
	return testscenario.NewLink(index, name, addresses...)
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err)
	}
	return n
}
