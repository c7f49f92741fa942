package nat

import (
	"errors"
	"slices"
	"strings"
)

var errUnterminated = errors.New("unterminated quote")

// endsInQuotes reports whether a rule ends within double quotes.
func endsInQuotes(rule string) bool {
	_, err := Words(rule)
	return err != nil
}

// Words splits a rule as iptables-restore does: at blanks, except within double quotes,
// where a backslash escapes the next character.
func Words(rule string) ([]string, error) {
	var out []string
	var word strings.Builder
	inWord, quoted, escaped := false, false, false
	for _, r := range rule {
		switch {
		case escaped:
			word.WriteRune(r)
			escaped = false
		case quoted && r == '\\':
			escaped = true
		case r == '"':
			quoted, inWord = !quoted, true
		case !quoted && (r == ' ' || r == '\t'):
			if inWord {
				out = append(out, word.String())
				word.Reset()
				inWord = false
			}
		default:
			word.WriteRune(r)
			inWord = true
		}
	}
	if quoted {
		return nil, errUnterminated
	}
	if inWord {
		out = append(out, word.String())
	}
	return out, nil
}

// target returns the chain or extension that a rule jumps or goes to, or "".
func target(r Rule) string {
	if to := Arguments(r, "-j", "-g"); len(to) > 0 {
		return to[0]
	}
	return ""
}

// Arguments returns the words after one of the options. A rule that cannot be split has
// none; parseSave and check reject such rules.
func Arguments(r Rule, options ...string) []string {
	args, err := Words(string(r))
	if err != nil {
		return nil
	}
	var out []string
	for i := 0; i+1 < len(args); i++ {
		if slices.Contains(options, args[i]) {
			out = append(out, args[i+1])
		}
	}
	return out
}
