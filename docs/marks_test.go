package docs

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
)

// TestMarks: the table of marks in architecture.md has the defaults, and the masks that follow from
// them.
func TestMarks(t *testing.T) {
	page, err := os.ReadFile("architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Marks\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var value, mask uint32
	if _, err := fmt.Sscanf(string(config.DefaultLocalMark), "%v/%v", &value, &mask); err != nil {
		t.Fatal(err)
	}
	const masquerade, cilium = 1 << 14, 0xf00
	claim, reply := uint32(config.DefaultClaimMark), uint32(config.DefaultReplyMark)
	shared := claim | value
	for _, want := range []string{
		fmt.Sprintf("`%#x/%#[1]x`", masquerade),
		fmt.Sprintf("`%#x`", reply),
		fmt.Sprintf("`%#x/%#[1]x`", claim),
		fmt.Sprintf("`%#x/%#x`", claim, shared),
		fmt.Sprintf("`%#x/%#x`", claim|value&-value, shared),
		fmt.Sprintf("`%#x`", value),
		fmt.Sprintf("`%#x`", mask),
		fmt.Sprintf("`%#x`, in policy rules", shared|cilium&^(masquerade|reply)),
		fmt.Sprintf("`%#x` is all bits except", ^(masquerade | reply | claim)),
	} {
		if !strings.Contains(section, want) {
			t.Errorf("architecture.md, Marks: no %s", want)
		}
	}
}
