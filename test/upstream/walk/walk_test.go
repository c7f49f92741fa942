package walk

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const source = "../../.."

var testValues = map[string]string{
	"image": "r.example/kube-ipvs", "version": "v9", "server": "https://192.0.2.1:6443", "cidr": "10.0.0.0/8,fd00::/8",
	"node": "node1", "batch": "1",
}

// TestEveryBlockIsRun: each block of the guides is a step of a walk, or notRun says why
// not, and each step is in its page.
func TestEveryBlockIsRun(t *testing.T) {
	all := installation(testValues)
	for _, mode := range []string{"iptables", "ipvs", "nftables"} {
		all = append(all, steps(mode, 3, false, testValues)...)
	}
	run := map[string]bool{}
	for _, s := range all {
		if s.page == "" || s.replace == false && s.page == commands {
			continue
		}
		block, err := find(source, s)
		if err != nil {
			t.Error(err)
			continue
		}
		if _, err := s.text(block); err != nil {
			t.Error(err)
		}
		run[block.String()] = true
	}
	excused := 0
	for _, page := range []string{readme, install, migrate, commands, kubeadm, eks, ack, k3s, upgrade, alerts, trouble} {
		blocks, err := Blocks(source, page)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range blocks {
			_, ok := notRun[fmt.Sprintf("%s %s %d", b.Page, b.Section, b.Index)]
			if ok {
				excused++
			}
			if run[b.String()] == ok {
				t.Errorf("%s: run is %v, and notRun has it: %v\n%s", b, run[b.String()], ok, b.Text)
			}
		}
	}
	if excused != len(notRun) {
		t.Errorf("%d of %d blocks of notRun are in the pages", excused, len(notRun))
	}
}

func TestParse(t *testing.T) {
	page := "# Title\n\n    a\n    b=1  # why\n\ntext\n\n    c | grep d    # nothing\n\n```\n    shown\n```\n\n## Next\n\n    e\n"
	var got []string
	for _, b := range parse("p.md", page) {
		got = append(got, strings.Join([]string{b.String(), b.Section, string(rune('0' + b.Index)), b.Text}, "|"))
	}
	want := []string{"p.md:3|Title|0|a\nb=1  # why\n", "p.md:8|Title|1|c | grep d    # nothing\n", "p.md:16|Next|0|e\n"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestText(t *testing.T) {
	block := &Block{Text: "b=1  # why\nc | grep d    # nothing\n"}
	text, err := (&step{set: map[string]string{"b": `x\,y`}}).text(block)
	if err != nil {
		t.Fatal(err)
	}
	if want := "b='x\\,y'  # why\nprinted=$(c | grep d) || true; "; !strings.HasPrefix(text, want) {
		t.Errorf("got %s", text)
	}
	if _, err := (&step{set: map[string]string{"z": "1"}}).text(block); err == nil {
		t.Error("an assignment that is not in the page was taken")
	}
}

func TestSpans(t *testing.T) {
	got := spans("Run `kubectl get pods\n  NODE | grep x`, `kube-ipvs get` and `kubectl logs POD --previous`.")
	if want := []string{"kubectl get pods node2"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestParseLog(t *testing.T) {
	states := map[string]state{}
	log := "held a 3\nnew a 10\nfailed a 10\nfailed a 10\nheld a 6\nnoise\nheld b 3\nbroken b 4\n"
	broken := parseLog("external", log, states)
	if want := []string{"external to b after 4 requests"}; !slices.Equal(broken, want) {
		t.Errorf("broken %q, want %q", broken, want)
	}
	if got, want := states["external to a"], (state{held: 6, fresh: 10, failed: 2}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
