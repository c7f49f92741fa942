package nat

import (
	"errors"
	"slices"
	"strings"
)

// quotes is whether a position in a rule is within double quotes, where a backslash escapes the
// next character.
type quotes struct{ quoted, escaped bool }

// scan moves the position past text.
func (q *quotes) scan(text string) {
	for i := range len(text) {
		switch {
		case q.escaped:
			q.escaped = false
		case q.quoted && text[i] == '\\':
			q.escaped = true
		case text[i] == '"':
			q.quoted = !q.quoted
		}
	}
}

// Words splits a rule as iptables-restore does: at blanks, except within double quotes,
// where a backslash escapes the next character.
func Words(rule string) ([]string, error) {
	out := make([]string, 0, strings.Count(rule, " ")+1)
	for i := 0; i < len(rule); {
		if isBlank(rule[i]) {
			i++
			continue
		}
		word, n, err := firstWord(rule[i:])
		if err != nil {
			return nil, err
		}
		out = append(out, word)
		i += n
	}
	return out, nil
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' }

// firstWord returns the word that a text begins with, and its length in the text. It copies only
// words with quotes in them or escaped characters.
func firstWord(text string) (word string, length int, err error) {
	end := strings.IndexAny(text, " \t\"")
	if end < 0 {
		return text, len(text), nil
	}
	if text[end] != '"' {
		return text[:end], end, nil
	}
	if end == 0 {
		n := strings.IndexAny(text[1:], `"\`) + 1
		if n > 0 && text[n] == '"' && (n+1 == len(text) || isBlank(text[n+1])) {
			return text[1:n], n + 1, nil
		}
	}
	var q quotes
	var b strings.Builder
	b.WriteString(text[:end])
	for length = end; length < len(text) && (q.quoted || !isBlank(text[length])); length++ {
		before := q
		q.scan(text[length : length+1])
		if before.escaped || q == before {
			b.WriteByte(text[length])
		}
	}
	if q.quoted {
		return "", 0, errors.New("unterminated quote")
	}
	return b.String(), length, nil
}

// target returns the chain or extension that a rule jumps or goes to, or "".
func target(r Rule) string {
	if to := Arguments(r, "-j", "-g"); len(to) > 0 {
		return to[0]
	}
	return ""
}

// Arguments returns the words after one of the options. A rule that cannot be split has
// none: another program may have one, and check rejects one of ours.
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
