package nat

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// fakeRestore executes an input of iptables-restore --noflush. As in the real program,
// a table takes effect at its COMMIT, so a fault does not affect the tables before it.
func fakeRestore(rules ruleset, input string, validate func(Table, *table) error) error {
	var name Table
	var t *table
	for i, line := range strings.Split(input, "\n") {
		var err error
		switch {
		case line == "" || line[0] == '#':
		case line[0] == '*':
			name = Table(line[1:])
			if rules[name] == nil {
				err = fmt.Errorf("no table %s: %w", name, unix.ENOENT)
				break
			}
			t = rules[name].clone()
		case t == nil:
			err = errors.New("outside of any table")
		case line == "COMMIT":
			if err = validate(name, t); err == nil {
				rules[name], t = t, nil
			}
		default:
			err = t.command(line)
		}
		if err != nil {
			return &refusal{number: errnoOf(err), line: i + 1, text: line, output: err.Error()}
		}
	}
	if t != nil {
		return fmt.Errorf("table %s has no COMMIT: %w", name, unix.EINVAL)
	}
	return nil
}

func errnoOf(err error) unix.Errno {
	var n unix.Errno
	errors.As(err, &n)
	return n
}

// command executes one line of a table.
func (t *table) command(line string) error {
	if line[0] == ':' {
		return t.declare(line[1:])
	}
	fields := strings.SplitN(line, " ", 3)
	if len(fields) < 2 {
		return fmt.Errorf("no chain: %w", unix.EINVAL)
	}
	chain, rest := fields[1], strings.Join(fields[2:], "")
	if _, ok := t.chains[chain]; !ok {
		return fmt.Errorf("no chain/target/match by that name: %w", unix.ENOENT)
	}
	if _, err := Words(rest); err != nil {
		return fmt.Errorf("%w: %w", err, unix.EINVAL)
	}
	switch fields[0] {
	case "-A":
		t.chains[chain] = append(t.chains[chain], Rule(rest))
	case "-I":
		return t.insert(chain, rest)
	case "-D":
		return t.remove(chain, Rule(rest))
	case "-F":
		t.chains[chain] = nil
	case "-X":
		return t.removeChain(chain)
	default:
		return fmt.Errorf("unexpected %s: %w", fields[0], unix.EINVAL)
	}
	return nil
}

// declare creates or flushes a chain, or sets the policy of a base chain.
func (t *table) declare(line string) error {
	fields := strings.Fields(line)
	switch {
	case len(fields) < 2 || !chainName.MatchString(fields[0]):
		return fmt.Errorf("not a chain: %w", unix.EINVAL)
	case t.policies[fields[0]] != "" && fields[1] != "-":
		t.policies[fields[0]] = fields[1]
	case t.policies[fields[0]] == "":
		t.chains[fields[0]] = nil
	}
	return nil
}

// insert parses "[position] rule"; positions start at 1.
func (t *table) insert(chain, rest string) error {
	at := 1
	if first, rule, ok := strings.Cut(rest, " "); ok {
		if n, err := strconv.Atoi(first); err == nil {
			at, rest = n, rule
		}
	}
	if at < 1 || at > len(t.chains[chain])+1 {
		return fmt.Errorf("index of insertion too big: %w", unix.E2BIG)
	}
	t.chains[chain] = slices.Insert(t.chains[chain], at-1, Rule(rest))
	return nil
}

func (t *table) remove(chain string, rule Rule) error {
	i := slices.Index(t.chains[chain], rule)
	if i < 0 {
		return fmt.Errorf("bad rule (does a matching rule exist in that chain?): %w", unix.ENOENT)
	}
	t.chains[chain] = slices.Delete(t.chains[chain], i, i+1)
	return nil
}

func (t *table) removeChain(chain string) error {
	if t.policies[chain] != "" {
		return fmt.Errorf("base chains cannot be deleted: %w", unix.EINVAL)
	}
	if len(t.chains[chain]) > 0 {
		return fmt.Errorf("chain %s: %w", chain, unix.ENOTEMPTY)
	}
	for _, name := range t.names() {
		if slices.ContainsFunc(t.chains[name], func(r Rule) bool { return target(r) == chain }) {
			return fmt.Errorf("chain %s, from %s: %w", chain, name, unix.EMLINK)
		}
	}
	delete(t.chains, chain)
	return nil
}
