package sysctl

import (
	"maps"
	"slices"
	"strings"
)

// Diff lists the keys of want that have does not hold with the same value,
// by name. A key that only have holds is left as it is: the kernel's
// parameters cannot be removed.
func Diff(have, want State) []Change {
	var changes []Change
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if value, ok := have[key]; !ok || value != normal(want[key]) {
			changes = append(changes, Change{Key: key, Value: want[key]})
		}
	}
	return changes
}

// normal puts one space between fields, where the kernel prints tabs, and
// takes the closing newline off.
func normal(value string) string { return strings.Join(strings.Fields(value), " ") }
