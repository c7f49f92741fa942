package plan

import (
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// TestOmittedRulesByCause omits three rules that lack one extension. One of them is replaced by
// another rule; the other two must stay a group.
func TestOmittedRulesByCause(t *testing.T) {
	omitted := []nat.OmittedRule{
		{Rule: "-m ipvs --ipvs -j A", Lacks: "-m ipvs"},
		{Rule: "-m ipvs --ipvs -j B", Lacks: "-m ipvs", Instead: "-j B"},
		{Rule: "-m ipvs --ipvs -j C", Lacks: "-m ipvs"},
		{Rule: "-j REDIRECT", Lacks: "-j REDIRECT"},
	}
	single, groups := byCause(omitted)
	if len(single) != 2 || single[0].Instead == "" || single[1].Lacks != "-j REDIRECT" || len(groups) != 1 || len(groups["-m ipvs"]) != 2 {
		t.Errorf("single %+v, groups %+v", single, groups)
	}
}
