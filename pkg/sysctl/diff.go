package sysctl

import (
	"maps"
	"slices"
	"strings"
)

// Diff returns the keys of want whose value in have is missing or different, sorted by
// name. It ignores keys that only have contains: kernel parameters cannot be removed.
func Diff(have, want State) []Change {
	var changes []Change
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if value, ok := have[key]; !ok || value != normal(want[key]) {
			changes = append(changes, Change{Key: key, Value: want[key]})
		}
	}
	return changes
}

// normal replaces the kernel's tabs between fields by one space, and removes the
// trailing newline.
func normal(value string) string { return strings.Join(strings.Fields(value), " ") }
