package nat

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// kubelet's chains decide, then the number of rules. Rules that cannot be read do not
// count.
func TestDecide(t *testing.T) {
	const hint, canary = ":KUBE-IPTABLES-HINT - [0:0]", ":KUBE-KUBELET-CANARY - [0:0]"
	rules := func(n int) string { return strings.Repeat("-A KUBE-SERVICES -j RETURN\n", n) }
	type back struct {
		mangle [2]string // IPv4, IPv6
		rules  int
		err    error
	}
	noNFT := &refusal{output: "iptables-nft-save: Failed to initialize nft: Protocol not supported"}
	noGeneration := &refusal{output: "iptables-nft-save v1.8.9 (nf_tables): Could not fetch rule set generation id: Invalid argument"}
	for name, test := range map[string]struct {
		nft, legacy back
		noLegacy    bool // the kernel has no legacy tables
		want        Variant
	}{
		"empty":                           {noLegacy: true, want: NFT},
		"empty, with tables of legacy":    {want: NFT},
		"kubelet's in nft":                {nft: back{mangle: [2]string{canary}}, legacy: back{rules: 900}, want: NFT},
		"kubelet's in nft of IPv6":        {nft: back{mangle: [2]string{"", hint}}, legacy: back{rules: 900}, want: NFT},
		"kubelet's in legacy":             {nft: back{rules: 900}, legacy: back{mangle: [2]string{hint}}, want: Legacy},
		"kubelet's in legacy of IPv6":     {nft: back{rules: 900}, legacy: back{mangle: [2]string{"", canary}}, want: Legacy},
		"kubelet's in both":               {nft: back{mangle: [2]string{canary}}, legacy: back{mangle: [2]string{canary}}, want: NFT},
		"more rules in legacy":            {nft: back{rules: 3}, legacy: back{rules: 4}, want: Legacy},
		"more rules in nft":               {nft: back{rules: 4}, legacy: back{rules: 3}, want: NFT},
		"as many in both":                 {nft: back{rules: 4}, legacy: back{rules: 4}, want: NFT},
		"nft cannot be read":              {nft: back{err: errors.New("killed"), rules: 9}, legacy: back{rules: 3}, want: Legacy},
		"no nf_tables":                    {nft: back{err: noNFT}, noLegacy: true, want: Legacy},
		"no nf_tables, rules in legacy":   {nft: back{err: noNFT}, legacy: back{rules: 3}, want: Legacy},
		"nfnetlink without nf_tables":     {nft: back{err: noGeneration}, noLegacy: true, want: Legacy},
		"no nf_tables, kubelet's chains":  {nft: back{err: noGeneration}, legacy: back{mangle: [2]string{hint}}, want: Legacy},
		"a name that only begins so":      {nft: back{mangle: [2]string{":KUBE-IPTABLES-HINTS - [0:0]"}, rules: 1}, legacy: back{rules: 2}, want: Legacy},
		"legacy's tables are not trusted": {legacy: back{mangle: [2]string{canary}}, noLegacy: true, want: NFT},
	} {
		t.Run(name, func(t *testing.T) {
			names := filepath.Join(t.TempDir(), "names")
			if !test.noLegacy {
				if err := os.WriteFile(names, []byte("mangle\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			was := legacyNames
			legacyNames = map[ip.Family]string{ip.IPv4: names, ip.IPv6: names}
			defer func() { legacyNames = was }()
			got, err := decide(func(v Variant, family ip.Family, table Table) (string, error) {
				b := test.nft
				if v == Legacy {
					b = test.legacy
				}
				if b.err != nil {
					return "", b.err
				}
				if table == Mangle {
					return fmt.Sprintf("*mangle\n%s\nCOMMIT\n", b.mangle[map[ip.Family]int{ip.IPv4: 0, ip.IPv6: 1}[family]]), nil
				}
				if family == ip.IPv4 {
					return "*nat\n" + rules(b.rules) + "COMMIT\n", nil
				}
				return "", nil
			})
			other := map[Variant]Variant{NFT: Legacy, Legacy: NFT}[test.want]
			supported := test.nft.err != error(noNFT) && test.nft.err != error(noGeneration)
			if err != nil || got.Use != test.want || got.Other != other || got.HasOther != supported || got.Why == "" {
				t.Errorf("%v, %+v, want %s", err, got, test.want)
			}
		})
	}
}

// TestDecideWithoutIPv4: nft stays the choice if the kernel supports it for IPv6 only.
func TestDecideWithoutIPv4(t *testing.T) {
	was := legacyNames
	legacyNames = map[ip.Family]string{ip.IPv4: "no file", ip.IPv6: "no file"}
	defer func() { legacyNames = was }()
	got, err := decide(func(_ Variant, family ip.Family, _ Table) (string, error) {
		if family == ip.IPv4 {
			return "", &refusal{output: "iptables-nft-save: Failed to initialize nft: Protocol not supported"}
		}
		return "*mangle\nCOMMIT\n", nil
	})
	if err != nil || got.Use != NFT {
		t.Errorf("%+v, %v, want %s", got, err, NFT)
	}
}

// TestChooseAmongInstalled: the installed programs decide. Those of IPv6 do if none of IPv4 are
// installed, as in an image for nodes that have only IPv6.
func TestChooseAmongInstalled(t *testing.T) {
	for name, test := range map[string]struct {
		programs []string
		want     Variant
		none     bool
	}{
		"nft":                     {programs: []string{"iptables-nft", "ip6tables-nft"}, want: NFT},
		"legacy":                  {programs: []string{"iptables-legacy", "ip6tables-legacy"}, want: Legacy},
		"plain":                   {programs: []string{"iptables"}, want: Default},
		"nft of IPv6":             {programs: []string{"ip6tables-nft"}, want: NFT},
		"legacy of IPv6":          {programs: []string{"ip6tables-legacy"}, want: Legacy},
		"plain of IPv6":           {programs: []string{"ip6tables"}, want: Default},
		"legacy, and nft of IPv6": {programs: []string{"iptables-legacy", "ip6tables-nft"}, want: Legacy},
		"none":                    {none: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for _, p := range test.programs {
				for _, suffix := range []string{"", "-save", "-restore"} {
					if err := os.WriteFile(filepath.Join(dir, p+suffix), nil, 0o755); err != nil {
						t.Fatal(err)
					}
				}
			}
			t.Setenv("PATH", dir)
			if got, err := Choose(); (err != nil) != test.none || got.Use != test.want {
				t.Errorf("%+v, %v, want %q", got, err, test.want)
			}
		})
	}
}

// A family may be left out only if the error says that the node has none.
func TestNoFamily(t *testing.T) {
	for text, want := range map[string]bool{
		"ip6tables-nft-save v1.8.9: Failed to initialize nft: Protocol not supported":                                         true,
		"ip6tables v1.8.9 (legacy): can't initialize ip6tables table `filter': Table does not exist (do you need to insmod?)": true,
		"ip6tables-save: Address family not supported by protocol":                                                            true,
		"# Table `filter' is incompatible, use 'nft' tool.":                                                                   false,
		"Could not fetch rule set generation id: Permission denied (you must be root)":                                        false,
		"Another app is currently holding the xtables lock.":                                                                  false,
		"Error: meta sreg is not an immediate":                                                                                false,
	} {
		if got := NoFamily(programError("", text, errors.New("exit status 1"))); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
	for err, want := range map[error]bool{
		fmt.Errorf("ip6tables: %w", exec.ErrNotFound): true, unix.EAFNOSUPPORT: true,
		errors.New("signal: killed"): false, unix.ENOMEM: false, unix.ENOENT: false,
	} {
		if got := NoFamily(err); got != want {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
}
