package reconcile

import (
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// TestConflictsAreReportedOnce adds and removes owners. A conflict is reported once, when
// it begins.
func TestConflictsAreReportedOnce(t *testing.T) {
	c := newConflicts()
	k := key(ip.TCP, "10.96.0.1:80")
	for i, step := range []struct {
		owners   string // a letter each
		losers   int
		reported []string // loser and winner
	}{
		{"a", 0, nil},
		{"ab", 1, []string{"ba"}},
		{"ab", 1, nil},
		{"abc", 2, []string{"ca"}},
		{"ac", 1, nil},
		{"c", 0, nil},
		{"ac", 1, []string{"ca"}},
		{"bac", 2, []string{"ab", "cb"}},
		{"", 0, nil},
	} {
		var owners []types.NamespacedName
		for _, letter := range step.owners {
			owners = append(owners, types.NamespacedName{Name: string(letter)})
		}
		c.update(k, owners)
		var reported []string
		for _, begun := range c.begun() {
			reported = append(reported, begun.Loser.Name+begun.Winner.Name)
		}
		if !slices.Equal(reported, step.reported) || c.losers != step.losers {
			t.Errorf("step %d, %q: %d losers, reported %v, want %+v", i, step.owners, c.losers, reported, step)
		}
	}
	if s := fmt.Sprint(len(c.active), len(c.reported), len(c.changed)); s != "0 0 0" {
		t.Errorf("kept %s", s)
	}
}

// A conflict that ended before take was called is not reported.
func TestEndedConflictIsNotReported(t *testing.T) {
	c := newConflicts()
	a, b := types.NamespacedName{Name: "a"}, types.NamespacedName{Name: "b"}
	k := key(ip.TCP, "10.96.0.1:80")
	c.update(k, []types.NamespacedName{a, b})
	c.update(k, []types.NamespacedName{b})
	c.update(fwm(7), []types.NamespacedName{a, b})
	if reported := c.begun(); len(reported) > 0 || c.losers != 0 {
		t.Errorf("%v, %d losers", reported, c.losers)
	}
}
