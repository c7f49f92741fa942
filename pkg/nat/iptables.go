package nat

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/coreos/go-iptables/iptables"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// IPTables is the kernel's ruleset of one family, reached with the iptables
// that the distribution gives: nf_tables or legacy. It is safe for concurrent
// use; its calls act on the calling thread's network namespace.
type IPTables struct {
	variant     Variant
	command     string
	saveCmd     string
	restoreCmd  string
	randomFully bool

	engine
}

// find looks for the programs of a variant in the PATH. It fails if one is
// missing or is too old for --wait (1.6.2).
func find(family ip.Family, variant Variant) (*IPTables, error) {
	if err := checkFamily(family); err != nil {
		return nil, err
	}
	name, proto := "iptables", iptables.ProtocolIPv4
	if family == ip.IPv6 {
		name, proto = "ip6tables", iptables.ProtocolIPv6
	}
	path, err := exec.LookPath(name + string(variant))
	if err != nil {
		return nil, fmt.Errorf("%w: install the package iptables, or correct PATH", err)
	}
	found, err := iptables.New(iptables.IPFamily(proto), iptables.Path(path))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if a, b, c := found.GetIptablesVersion(); a < 1 || a == 1 && (b < 6 || b == 6 && c < 2) {
		return nil, fmt.Errorf("%s is version %d.%d.%d: install 1.6.2 or newer", path, a, b, c)
	}
	t := &IPTables{variant: variant, command: path, randomFully: found.HasRandomFully(), engine: engine{family: family}}
	return t, t.findCompanions(path, name, string(variant))
}

// findCompanions takes save and restore from the folder of iptables itself:
// those of another folder could be the other variant.
func (t *IPTables) findCompanions(path, name, variant string) error {
	for cmd, suffix := range map[*string]string{&t.saveCmd: "-save", &t.restoreCmd: "-restore"} {
		found, err := exec.LookPath(filepath.Join(filepath.Dir(path), name+variant+suffix))
		if err != nil {
			return fmt.Errorf("%w: install the package iptables whole", err)
		}
		*cmd = found
	}
	return nil
}

// RandomFully tells whether MASQUERADE and SNAT take --random-fully.
func (t *IPTables) RandomFully() bool { return t.randomFully }

// Observe reads what is ours of the ruleset with one iptables-save. A ruleset
// that cannot be read whole is an error, and the State is then empty.
func (t *IPTables) Observe(own Own) (State, error) { return t.observe(t, own) }

// Apply makes the changes true, those of each table at once or not at all,
// and gives back the changes that were not made. Changes of one table that
// iptables refused share an error, which names the line at fault and wraps
// the errno as far as iptables told it. A chain that another program's rule
// refers to is not deleted (EMLINK); this hinders no other change.
//
// A rule that the kernel or iptables refuses by itself, as it lacks an
// extension or a set, is left out, which is no failure; see State.LeftOut.
func (t *IPTables) Apply(changes []Change) []Failure { return t.apply(t, changes) }

// save lists all tables. Some versions of iptables fail as a whole where they
// cannot list one table; that one is then named in the words of the others.
func (t *IPTables) save() (string, error) {
	if t.variant == Legacy && !hasLegacyTables(t.family) {
		return "", nil
	}
	stdout, stderr, err := kernel.Run(t.saveCmd, "")
	if err == nil {
		return stdout, nil
	}
	if !cannotList(stderr) {
		return "", programError("", stderr, err)
	}
	var out strings.Builder
	for name := range baseChains {
		stdout, stderr, err := kernel.Run(t.saveCmd, "", "-t", string(name))
		switch {
		case err == nil:
			out.WriteString(stdout)
		case cannotList(stderr):
			fmt.Fprintf(&out, "# Table `%s' is incompatible: %s\n", name, oneLine(stderr))
		default:
			return "", programError("", stderr, err)
		}
	}
	return out.String(), nil
}

// cannotList reports whether iptables-nft says that it does not understand a rule.
func cannotList(stderr string) bool {
	return strings.Contains(stderr, "incompatible") || strings.Contains(stderr, "Parsing nftables rule failed") || strings.Contains(stderr, "sreg")
}

// partly lists chain by chain. A base chain that cannot be listed is asked
// whether it has each of the jumps, which then count as standing at its head.
func (t *IPTables) partly(name Table, own Own) (*table, error) {
	out := newTable()
	for _, c := range own.Chains {
		if c.Table == name && c.Family == t.family && !isBase(c.Name) {
			rules, listed, err := t.list(name, c.Name)
			if err != nil {
				return nil, err
			}
			if listed {
				out.chains[c.Name] = rules
			}
		}
	}
	for _, base := range baseChains[name] {
		out.policies[base] = "ACCEPT" // for render; nothing else asks
		rules, listed, err := t.list(name, base)
		if err != nil {
			return nil, err
		}
		if !listed {
			rules = t.jumpsIn(Chain{t.family, name, base}, own.Jumps)
		}
		out.chains[base] = rules
	}
	return out, nil
}

// list gives the rules of a chain. It is false for one that is not there or
// cannot be listed.
func (t *IPTables) list(name Table, chain string) ([]Rule, bool, error) {
	stdout, stderr, err := kernel.Run(t.command, "", "-w", "5", "-t", string(name), "-S", chain)
	if err != nil {
		if err := programError("", stderr, err); kernel.IsTransient(err) || kernel.IsPermission(err) || strings.TrimSpace(stderr) == "" {
			return nil, false, err
		}
		return nil, false, nil
	}
	var rules []Rule
	for line := range strings.Lines(stdout) {
		if rule, ok := strings.CutPrefix(strings.TrimSpace(line), "-A "+chain+" "); ok {
			rules = append(rules, Rule(rule))
		}
	}
	return rules, true, nil
}

func (t *IPTables) jumpsIn(c Chain, jumps []Jump) []Rule {
	var out []Rule
	for _, j := range jumps {
		words, err := Words(string(j.Rule))
		if err != nil || j.Chain != c || slices.Contains(out, j.Rule) || strings.ContainsAny(string(j.Rule), "\r\n\x00") {
			continue
		}
		args := append([]string{"-w", "5", "-t", string(c.Table), "-C", c.Name}, words...)
		if _, _, err := kernel.Run(t.command, "", args...); err == nil {
			out = append(out, j.Rule)
		}
	}
	return out
}

// restore waits 5 s for the lock that the legacy programs share. No interval
// is given: since 1.8.8 the programs ignore it.
func (t *IPTables) restore(input string) error {
	return kernel.Change(strings.Count(input, "COMMIT\n"), func() error {
		_, stderr, err := kernel.Run(t.restoreCmd, input, "--noflush", "-w", "5")
		if err != nil {
			return programError(input, stderr, err)
		}
		return nil
	})
}
