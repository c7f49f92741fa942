package nat

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/coreos/go-iptables/iptables"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// IPTables is the kernel's ruleset of one family, reached with the iptables
// that the distribution gives: nf_tables or legacy. It is safe for concurrent
// use; its calls act on the calling thread's network namespace.
type IPTables struct {
	family      ip.Family
	saveCmd     string
	restoreCmd  string
	randomFully bool

	mu sync.Mutex // one restore at a time: they would wait for each other
}

// New finds the family's programs in the PATH. It fails if one is missing or
// is too old for --wait (1.6.2).
func New(family ip.Family) (*IPTables, error) { return find(family, "") }

// find looks for a variant of the programs: "", "-nft" or "-legacy".
func find(family ip.Family, variant string) (*IPTables, error) {
	if err := checkFamily(family); err != nil {
		return nil, err
	}
	name, proto := "iptables", iptables.ProtocolIPv4
	if family == ip.IPv6 {
		name, proto = "ip6tables", iptables.ProtocolIPv6
	}
	path, err := exec.LookPath(name + variant)
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
	t := &IPTables{family: family, randomFully: found.HasRandomFully()}
	return t, t.findCompanions(path, name, variant)
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
func (t *IPTables) Observe(own Own) (State, error) { return observe(t, t.family, own) }

// Apply makes the changes true, those of each table at once or not at all,
// and gives back the changes that were not made. Changes of one table that
// iptables refused share an error, which names the line at fault and wraps
// the errno as far as iptables told it. A chain that another program's rule
// refers to is not deleted (EMLINK); this hinders no other change.
func (t *IPTables) Apply(changes []Change) []Failure {
	t.mu.Lock()
	defer t.mu.Unlock()
	return apply(t, t.family, changes)
}

func (t *IPTables) save() (string, error) {
	stdout, stderr, err := kernel.Run(t.saveCmd, "")
	if err != nil {
		return "", programError("", stderr, err)
	}
	return stdout, nil
}

// restore waits 5 s for the lock that the legacy programs share. No interval
// is given: since 1.8.8 the programs ignore it.
func (t *IPTables) restore(input string) error {
	_, stderr, err := kernel.Run(t.restoreCmd, input, "--noflush", "-w", "5")
	if err != nil {
		return programError(input, stderr, err)
	}
	return nil
}
