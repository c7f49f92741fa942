package neighbours

import "testing"

// TestCompare checks the verdict on what two programs' clients have seen.
func TestCompare(t *testing.T) {
	saw := func(answered, failed int, endpoints, sources []string) Seen {
		s := Seen{Outcomes: map[string]int{}, Endpoints: endpoints, Sources: sources}
		if answered > 0 {
			s.Outcomes[ok] = answered
		}
		if failed > 0 {
			s.Outcomes["timeout"] = failed
		}
		return s
	}
	here, there := []string{"here 1"}, []string{"here 1", "there 1"}
	client, node := []string{"client"}, []string{"node"}
	for name, c := range map[string]struct {
		proxy, own Seen
		wanted     bool
		want       Verdict
	}{
		"both answer":               {saw(4, 0, there, node), saw(4, 0, there, node), false, Same},
		"only kube-proxy":           {saw(4, 0, there, node), saw(0, 2, nil, nil), false, Worse},
		"only kube-ipvs":            {saw(0, 2, nil, nil), saw(4, 0, there, node), false, Better},
		"kube-proxy sometimes":      {saw(2, 2, here, client), saw(0, 9, nil, nil), false, Worse},
		"both sometimes":            {saw(2, 2, here, client), saw(1, 2, here, client), false, Same},
		"kube-ipvs sometimes":       {saw(4, 0, there, node), saw(3, 1, there, node), false, Worse},
		"none, although it must be": {saw(0, 2, nil, nil), saw(0, 2, nil, nil), true, Missing},
		"the client is lost":        {saw(4, 0, here, client), saw(4, 0, here, node), false, Worse},
	} {
		if got := Compare(Answered, c.proxy, c.own, c.wanted); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
