package nat

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

// Variant is a back end of iptables: the suffix of its programs' names after
// "iptables". The kernel evaluates the rules of both.
type Variant string

// The variants. Default is the one that the plain name refers to, for systems without
// the other names.
const (
	NFT     Variant = "-nft"
	Legacy  Variant = "-legacy"
	Default Variant = ""
)

func (v Variant) String() string {
	if v == Default {
		return "iptables"
	}
	return "iptables" + string(v)
}

// Choice is the variant that a node uses.
type Choice struct {
	Use Variant
	// Other is the other variant, if its programs are installed and the kernel supports it:
	// kube-proxy may have left rules in it.
	Other    Variant
	HasOther bool
	// Unseen reports that the kernel may have rules of the variant whose programs are
	// not installed.
	Unseen bool
	Why    string
}

// New finds the programs of the variant that the node uses; see Choose.
func New(family ip.Family) (*IPTables, error) {
	choice, err := Choose()
	if err != nil {
		return nil, err
	}
	return Open(family, choice.Use)
}

// Open finds the programs of a variant.
func Open(family ip.Family, v Variant) (*IPTables, error) { return find(family, v) }

// Choose returns the variant that the node's other programs use: the one with kubelet's
// KUBE-IPTABLES-HINT or KUBE-KUBELET-CANARY, else the one with more rules, else nft,
// unless the plain name refers to legacy. If we used another variant than kubelet and
// the CNI plugin, the order of evaluation would depend on which module was loaded
// first.
func Choose() (Choice, error) {
	var missing error
	for _, family := range ip.Families { // those of IPv6 count only if there are none of IPv4
		nft, legacy := hasPrograms(NFT, family), hasPrograms(Legacy, family)
		switch {
		case nft && legacy:
			return decide(savedBy)
		case nft:
			return Choice{Use: NFT, Unseen: legacyInUse(), Why: "the only one installed"}, nil
		case legacy:
			return Choice{Use: Legacy, Unseen: true, Why: "the only one installed"}, nil
		}
		_, err := exec.LookPath(commands[family])
		if err == nil {
			return Choice{Use: Default, Why: "the only one installed"}, nil
		}
		missing = cmp.Or(missing, err)
	}
	return Choice{}, fmt.Errorf("%w: install the package iptables, or correct PATH", missing)
}

// commands are the programs of each family, without their variant.
var commands = map[ip.Family]string{ip.IPv4: "iptables", ip.IPv6: "ip6tables"}

func hasPrograms(v Variant, family ip.Family) bool {
	for _, suffix := range []string{"", "-save", "-restore"} {
		if _, err := exec.LookPath(commands[family] + string(v) + suffix); err != nil {
			return false
		}
	}
	return true
}

// legacyNames are the files that list the existing tables of iptables-legacy. If they are
// empty, the kernel has no legacy rules, and iptables-legacy-save would only load its
// modules.
var legacyNames = map[ip.Family]string{
	ip.IPv4: "/proc/thread-self/net/ip_tables_names",
	ip.IPv6: "/proc/thread-self/net/ip6_tables_names",
}

func legacyInUse() bool {
	return slices.ContainsFunc(ip.Families, hasLegacyTables)
}

func hasLegacyTables(family ip.Family) bool {
	text, err := os.ReadFile(legacyNames[family])
	return len(strings.TrimSpace(string(text))) > 0 || err != nil && !errors.Is(err, os.ErrNotExist)
}

// decide chooses between two installed variants. saved runs a variant's iptables-save for
// one table, or for all (""). A family that cannot be read counts as empty: the caller
// reports the error when it reads the rules.
func decide(saved func(v Variant, family ip.Family, table Table) (string, error)) (Choice, error) {
	var noNFT error
	use := func(v Variant, why string) (Choice, error) {
		other := NFT
		if v == NFT {
			other = Legacy
		}
		return Choice{Use: v, Other: other, HasOther: noNFT == nil, Why: why}, nil
	}
	for _, v := range []Variant{NFT, Legacy} {
		for _, family := range ip.Families {
			if v == Legacy && !hasLegacyTables(family) {
				continue
			}
			text, err := saved(v, family, Mangle)
			switch {
			case v != NFT:
			case err == nil:
				noNFT = nil // the kernel has it for this family
			case family == ip.IPv4 && noBackEnd(err):
				noNFT = err
			}
			if hinted(text) {
				return use(v, "it has kubelet's chains")
			}
		}
	}
	switch {
	case noNFT != nil:
		return use(Legacy, "the kernel has no nf_tables")
	case legacyInUse():
		nft, legacy := count(saved, NFT), count(saved, Legacy)
		if legacy > nft {
			return use(Legacy, fmt.Sprintf("it has %d rules, the other %d", legacy, nft))
		}
		if nft > 0 {
			return use(NFT, fmt.Sprintf("it has %d rules, the other %d", nft, legacy))
		}
	}
	if plainIsLegacy() && legacyInUse() {
		return use(Legacy, "the distribution's default")
	}
	return use(NFT, "no rules indicate another one")
}

func hinted(saved string) bool {
	return strings.Contains(saved, "\n:KUBE-IPTABLES-HINT ") || strings.Contains(saved, "\n:KUBE-KUBELET-CANARY ")
}

func count(saved func(Variant, ip.Family, Table) (string, error), v Variant) int {
	n := 0
	for _, family := range ip.Families {
		if v == Legacy && !hasLegacyTables(family) {
			continue
		}
		text, _ := saved(v, family, "") // not concurrently: in the network namespace of this thread
		n += strings.Count(text, "\n-A ")
	}
	return n
}

func savedBy(v Variant, family ip.Family, table Table) (string, error) {
	var args []string
	if table != "" {
		args = []string{"-t", string(table)}
	}
	stdout, stderr, err := program.Run(commands[family]+string(v)+"-save", "", args...)
	if err != nil {
		return "", programError("", stderr, err)
	}
	return stdout, nil
}

func plainIsLegacy() bool {
	path, err := exec.LookPath("iptables")
	if err != nil {
		return false
	}
	real, err := filepath.EvalSymlinks(path)
	return err == nil && strings.Contains(filepath.Base(real), "legacy")
}

// noBackEnd reports whether an error says that the kernel does not support a program's
// back end. If the kernel lacks nf_tables but has nfnetlink, which also serves sets, it answers
// the first request of iptables-nft with EINVAL.
func noBackEnd(err error) bool {
	var r *refusal
	return errors.As(err, &r) && (strings.Contains(r.output, "Protocol not supported") ||
		strings.Contains(r.output, "Could not fetch rule set generation id: Invalid argument"))
}

// NoFamily reports whether an error of a family's programs means that the node lacks the family:
// no programs, or a kernel without the family or its tables.
func NoFamily(err error) bool {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, unix.EAFNOSUPPORT) || noBackEnd(err) {
		return true
	}
	var r *refusal
	return errors.As(err, &r) && (strings.Contains(r.output, "Table does not exist") || strings.Contains(strings.ToLower(r.output), unix.EAFNOSUPPORT.Error()))
}

// Variant returns the back end.
func (t *IPTables) Variant() Variant { return t.variant }
