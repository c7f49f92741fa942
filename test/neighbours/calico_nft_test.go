//go:build e2e

package neighbours

import (
	"fmt"
	"strconv"
	"strings"
)

// calicoBases are the base chains of Felix's nftables data plane that it uses, in its
// one table for each family (felix/nftables/table.go).
const calicoBases = `
	chain raw-PREROUTING { type filter hook prerouting priority -300; jump raw-cali-PREROUTING; }
	chain raw-OUTPUT { type filter hook output priority -300; jump raw-cali-OUTPUT; }
	chain mangle-PREROUTING { type filter hook prerouting priority -150; jump mangle-cali-PREROUTING; }
	chain mangle-POSTROUTING { type filter hook postrouting priority -150; jump mangle-cali-POSTROUTING; }
	chain nat-PREROUTING { type nat hook prerouting priority -100; jump nat-cali-PREROUTING; }
	chain nat-OUTPUT { type nat hook output priority 100; jump nat-cali-OUTPUT; }
	chain nat-POSTROUTING { type nat hook postrouting priority 100; jump nat-cali-POSTROUTING; }
	chain filter-INPUT { type filter hook input priority 0; jump filter-cali-INPUT; }
	chain filter-FORWARD { type filter hook forward priority 0; jump filter-cali-FORWARD; meta mark & 0x10000 == 0x10000 accept; meta mark set mark | 0x10000; }
	chain filter-OUTPUT { type filter hook output priority 0; jump filter-cali-OUTPUT; }
`

// nft returns the ruleset of Felix's nftables data plane. Felix generates both data
// planes from the same rules, so this one is translated from the iptables rules, in the
// way of its match builder.
func (c calico) nft(p plan, family int) string {
	word, kind := []string{"ip", "ip6"}[family], []string{"ipv4_addr", "ipv6_addr"}[family]
	elements := map[string][]string{}
	for line := range strings.Lines(c.sets(p, family)) {
		if words := strings.Fields(line); words[0] == "add" {
			elements[words[1]] = append(elements[words[1]], words[2])
		}
	}
	var sets, declared, rules strings.Builder
	for name, all := range elements {
		fmt.Fprintf(&sets, "\tset %s { type %s; flags interval; elements = { %s } }\n", name, kind, strings.Join(all, ", "))
	}
	table := ""
	for line := range strings.Lines(c.rules(family)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case strings.HasPrefix(line, ":"):
			name, _, _ := strings.Cut(line[1:], " ")
			fmt.Fprintf(&declared, "\tchain %s-%s { }\n", table, name)
		case strings.HasPrefix(line, "-A "):
			words := strings.Fields(line)
			fmt.Fprintf(&rules, "add rule %s calico %s-%s %s\n", word, table, words[1], strings.Join(nftRule(table, word, words[2:]), " "))
		}
	}
	return fmt.Sprintf("table %[1]s calico {\n%[2]s%[3]s}\nflush table %[1]s calico\ntable %[1]s calico {%[4]s}\n%[5]s", word, sets.String(), declared.String(), calicoBases, rules.String())
}

// nftRule translates the iptables syntax that calico.rules uses.
func nftRule(table, word string, words []string) []string {
	var out []string
	not, protocol := "", ""
	next := func() (w string) {
		w, words = words[0], words[1:]
		return w
	}
	link := func(name string) string { return strconv.Quote(strings.ReplaceAll(name, "+", "*")) }
	masked := func(text string) (value, mask uint64) {
		v, m, _ := strings.Cut(text, "/")
		value, _ = strconv.ParseUint(v, 0, 32)
		mask, _ = strconv.ParseUint(m, 0, 32)
		return value, mask
	}
	for len(words) > 0 {
		switch w := next(); w {
		case "-m":
			if next() == "rpfilter" {
				out = append(out, "fib saddr . mark . iif oif 0")
			}
		case "--validmark", "--invert":
		case "!":
			not = "!= "
			continue
		case "-i", "-o":
			out = append(out, map[string]string{"-i": "iifname", "-o": "oifname"}[w], link(next()))
		case "-s":
			out = append(out, word, "saddr", next())
		case "-p":
			if protocol = next(); protocol != "ipv6-icmp" {
				out = append(out, "meta l4proto", protocol)
			}
		case "--icmpv6-type":
			out = append(out, "icmpv6 type", next())
		case "--dports":
			out = append(out, protocol, "dport", strings.ReplaceAll(next(), ":", "-"))
		case "--mark":
			value, mask := masked(next())
			out = append(out, fmt.Sprintf("meta mark & %#x %s %#x", mask, map[string]string{"": "==", "!= ": "!="}[not], value))
		case "--ctstate":
			if state := strings.ToLower(next()); state != "dnat" {
				out = append(out, "ct state", state)
			} else if not != "" {
				out = append(out, "ct status & dnat == 0")
			} else {
				out = append(out, "ct status dnat")
			}
		case "--match-set":
			set := next()
			out = append(out, word, map[string]string{"src": "saddr", "dst": "daddr"}[next()], not+"@"+set)
		case "-j", "-g":
			switch target := next(); target {
			case "ACCEPT", "DROP", "RETURN":
				out = append(out, strings.ToLower(target))
			case "MASQUERADE":
				out = append(out, "masquerade fully-random")
				next()
			case "MARK":
				next()
				value, mask := masked(next())
				out = append(out, fmt.Sprintf("meta mark set mark & %#x ^ %#x", ^mask&0xffffffff, value))
			default:
				out = append(out, map[string]string{"-j": "jump", "-g": "goto"}[w], table+"-"+target)
			}
		default:
			panic("not translated: " + w)
		}
		not = ""
	}
	return out
}
