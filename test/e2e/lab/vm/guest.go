package vm

import (
	"fmt"
	"sort"
	"strings"
)

// Where the guest mounts the host's shares.
const (
	guestSource = "/src"
	guestCache  = "/cache"
	guestOut    = "/out"
	guestShared = "/shared"
)

// runScript is the shell script that the guest runs: modules to remove, environment,
// directory, command.
func runScript(dir string, env map[string]string, without, command []string) []byte {
	var script strings.Builder
	for _, module := range without {
		fmt.Fprintf(&script, "file=$(modinfo -n %s) && rm \"$file\" || exit 126\n", quote(module))
	}
	if len(without) > 0 {
		script.WriteString("depmod || exit 126\n")
	}
	names := make([]string, 0, len(env))
	for name := range env {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		fmt.Fprintf(&script, "export %s=%s\n", name, quote(env[name]))
	}
	fmt.Fprintf(&script, "cd %s || exit 126\nexec", quote(dir))
	for _, word := range command {
		script.WriteString(" " + quote(word))
	}
	script.WriteString("\n")
	return []byte(script.String())
}

// quote quotes s as one word for a POSIX shell.
func quote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
