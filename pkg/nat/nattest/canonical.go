// Package nattest checks that rules are in the form in which iptables prints them. Its
// functions need root and a kernel with iptables and ipset; they are for end-to-end
// tests.
package nattest

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// Rules returns every rule of one family in a state by table, including jumps, each
// once.
func Rules(family ip.Family, state nat.State) map[nat.Table][]nat.Rule {
	out := map[nat.Table][]nat.Rule{}
	add := func(c nat.Chain, r nat.Rule) {
		if c.Family == family && !slices.Contains(out[c.Table], r) {
			out[c.Table] = append(out[c.Table], r)
		}
	}
	for c, rules := range state.Chains {
		for _, r := range rules {
			add(c, r)
		}
	}
	for _, j := range state.Jumps {
		add(j.Chain, j.Rule)
	}
	return out
}

// CheckCanonical writes each rule into a chain of its own, with both variants of
// iptables, and reports each that is refused or that iptables-save prints differently.
// It works in a network namespace that it creates, together with what the rules refer
// to: sets, and chains, which it recognizes by the hyphen in their names.
func CheckCanonical(t *testing.T, family ip.Family, rules map[nat.Table][]nat.Rule) {
	t.Helper()
	for _, variant := range []string{"-nft", "-legacy"} {
		t.Run(strings.TrimPrefix(variant, "-")+" "+family.String(), func(t *testing.T) {
			namespace(t)
			for table, rules := range rules {
				makeSets(t, family, rules)
				check(t, programs{family, variant}, table, rules)
			}
		})
	}
}

func check(t *testing.T, p programs, table nat.Table, rules []nat.Rule) {
	if p.restore(input(table, rules)) != nil {
		rules = accepted(t, p, table, rules)
	}
	saved, err := p.save()
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range rules {
		want := "-A " + scratch(i) + " " + string(r)
		if got := lineOf(saved, table, "-A "+scratch(i)+" "); got != want {
			t.Errorf("table %s, rule\n%s\nis printed as\n%s", table, want, got)
		}
	}
}

// accepted writes each rule by itself, reports those that are refused, and then writes
// the others.
func accepted(t *testing.T, p programs, table nat.Table, rules []nat.Rule) []nat.Rule {
	var out []nat.Rule
	for _, r := range rules {
		if err := p.restore(input(table, []nat.Rule{r})); err != nil {
			t.Errorf("table %s, rule\n%s\nis refused: %v", table, r, err)
			continue
		}
		out = append(out, r)
	}
	if err := p.restore(input(table, out)); err != nil {
		t.Fatal(err)
	}
	return out
}

// scratch returns the name of the chain of a rule.
func scratch(i int) string { return fmt.Sprintf("canonical-%d", i) }

// input declares the scratch chains and the chains that the rules jump to, and writes
// the rules.
func input(table nat.Table, rules []nat.Rule) string {
	var chains []string
	written := ""
	for i, r := range rules {
		chains = append(chains, scratch(i))
		for _, to := range nat.Arguments(r, "-j", "-g") {
			if strings.Contains(to, "-") {
				chains = append(chains, to)
			}
		}
		written += fmt.Sprintf("-A %s %s\n", scratch(i), r)
	}
	slices.Sort(chains)
	declared := ""
	for _, c := range slices.Compact(chains) {
		declared += fmt.Sprintf(":%s - [0:0]\n", c)
	}
	return fmt.Sprintf("*%s\n%s%sCOMMIT\n", table, declared, written)
}

// lineOf returns the line of a table that begins with a prefix, or "".
func lineOf(saved string, table nat.Table, prefix string) string {
	_, block, _ := strings.Cut(saved, "*"+string(table)+"\n")
	block, _, _ = strings.Cut(block, "\nCOMMIT\n")
	for _, line := range strings.Split(block, "\n") {
		if strings.HasPrefix(line, prefix) {
			return line
		}
	}
	return ""
}

// makeSets creates sets of one type: rules are printed the same for all types.
func makeSets(t *testing.T, family ip.Family, rules []nat.Rule) {
	inet := "inet"
	if family == ip.IPv6 {
		inet = "inet6"
	}
	for _, r := range rules {
		for _, set := range nat.Arguments(r, "--match-set", "--map-set", "--add-set") {
			if _, err := run("ipset", "", "create", "-exist", set, "hash:ip,port,ip", "family", inet); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// programs are those of a variant for one family.
type programs struct {
	family  ip.Family
	variant string
}

func (p programs) name() string {
	if p.family == ip.IPv6 {
		return "ip6tables" + p.variant
	}
	return "iptables" + p.variant
}

func (p programs) restore(input string) error {
	_, err := run(p.name()+"-restore", input, "--noflush")
	return err
}

func (p programs) save() (string, error) { return run(p.name()+"-save", "") }

func run(name, input string, args ...string) (string, error) {
	stdout, stderr, err := program.Run(name, input, args...)
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", name, err, stderr)
	}
	return stdout, nil
}

// namespace moves the test into a new network namespace. The thread is never unlocked,
// so that it and the namespace end with the test.
func namespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("new network namespace: %v", err)
	}
}
