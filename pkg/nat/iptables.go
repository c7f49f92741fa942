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
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

// IPTables accesses the kernel's ruleset of one family by the distribution's iptables,
// nf_tables or legacy. It may be used concurrently, and acts on the network namespace
// of the calling thread.
type IPTables struct {
	variant    Variant
	command    string
	saveCmd    string
	restoreCmd string

	engine
}

// find looks for the programs of a variant in the PATH. It returns an error if one is
// missing or too old for --wait (1.6.2).
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
	t := &IPTables{variant: variant, command: path, engine: engine{family: family, watched: variant == NFT}}
	return t, t.findCompanions(path, name, string(variant))
}

// findCompanions finds the save and restore programs in the directory of iptables: those
// of another directory may be of the other variant.
func (t *IPTables) findCompanions(path, name, variant string) error {
	for cmd, suffix := range map[*string]string{&t.saveCmd: "-save", &t.restoreCmd: "-restore"} {
		found, err := exec.LookPath(filepath.Join(filepath.Dir(path), name+variant+suffix))
		if err != nil {
			return fmt.Errorf("%w: install the complete package iptables", err)
		}
		*cmd = found
	}
	return nil
}

// Observe reads our part of the ruleset with one iptables-save. If the ruleset cannot
// be read completely it returns an error and an empty State.
func (t *IPTables) Observe(own Owned) (State, error) { return t.observe(t, own) }

// Apply makes the changes, those of each table atomically, and returns the changes that
// failed. Changes of a table that iptables refused share an error, which names the
// failing line and wraps the errno if iptables reported it. A chain that another
// program's rule refers to is not deleted (EMLINK), without affecting other changes.
//
// A rule that is refused individually, because iptables or the kernel lacks an
// extension or a set, is omitted. That is not a failure; see State.Omitted.
func (t *IPTables) Apply(changes []Change) []Failure { return t.apply(t, changes) }

// Omits reports whether rules are omitted because they are refused. Observe returns these
// rules and retries them.
func (t *IPTables) Omits() bool { return t.omits.Load() }

// save lists all tables. Some versions of iptables fail completely if they cannot list
// one table; save then reports that table in the format of the other versions.
func (t *IPTables) save() (string, error) {
	if t.variant == Legacy && !hasLegacyTables(t.family) {
		return "", nil
	}
	stdout, stderr, err := program.Run(t.saveCmd, "")
	if err == nil {
		return stdout, nil
	}
	if !cannotList(stderr) {
		return "", programError("", stderr, err)
	}
	var out strings.Builder
	for name := range baseChains {
		stdout, stderr, err := program.Run(t.saveCmd, "", "-t", string(name))
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

// cannotList reports whether iptables-nft failed because it cannot parse a rule.
func cannotList(stderr string) bool {
	return strings.Contains(stderr, "incompatible") || strings.Contains(stderr, "Parsing nftables rule failed") || strings.Contains(stderr, "sreg")
}

// CheckNAT returns an error if the kernel has no table nat, as kube-proxy checks at its start. It loads
// the table's module. Observe does not find out with iptables-legacy, which lists only loaded tables.
func (t *IPTables) CheckNAT() error {
	if _, stderr, err := program.Run(t.command, "", "-w", "5", "-t", string(NAT), "-S", "POSTROUTING"); err != nil {
		return programError("", stderr, err)
	}
	return nil
}

// listOwned lists a table chain by chain. For a base chain that cannot be listed it
// checks whether each jump exists, and assumes that those that do are at the head.
func (t *IPTables) listOwned(name Table, own Owned) (*table, error) {
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
		out.policies[base] = "ACCEPT" // for render; not used otherwise
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

// list returns the rules of a chain, or false if it does not exist or cannot be listed.
func (t *IPTables) list(name Table, chain string) ([]Rule, bool, error) {
	stdout, stderr, err := program.Run(t.command, "", "-w", "5", "-t", string(name), "-S", chain)
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
		if _, _, err := program.Run(t.command, "", args...); err == nil {
			out = append(out, j.Rule)
		}
	}
	return out
}

// restore waits 5 s for the lock of the legacy programs. It sets no interval, which
// programs since 1.8.8 ignore.
func (t *IPTables) restore(input string) error {
	return generation.Change(strings.Count(input, "COMMIT\n"), func() error {
		_, stderr, err := program.Run(t.restoreCmd, input, "--noflush", "-w", "5")
		if err != nil {
			return programError(input, stderr, err)
		}
		return nil
	})
}
