package neighbours

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// ok is the outcome of an answered request.
const ok = "ok"

// Always reports whether every request was answered.
func (s Seen) Always() bool { return len(s.Outcomes) == 1 && s.Outcomes[ok] > 0 }

// keepsClient reports whether endpoints saw the client's address and no other.
func (s Seen) keepsClient() bool { return len(s.Sources) == 1 && s.Sources[0] == "client" }

// Keeps reports whether a promise was kept.
func (s Seen) Keeps(p Promise) bool {
	here := func(endpoint string) bool { return strings.HasPrefix(endpoint, "here") }
	return s.Always() && (p != KeepsClient || s.keepsClient() && !slices.ContainsFunc(s.Endpoints, func(e string) bool { return !here(e) }))
}

// Compare returns the verdict on a cell. An address that kube-proxy keeps must be
// kept, where the same endpoints answer. Where kube-proxy answers some requests, kube-ipvs must
// answer some. wanted reports whether the cell must be
// answered even if kube-proxy fails.
func Compare(p Promise, proxy, own Seen, wanted bool) Verdict {
	switch {
	case proxy.Keeps(p) && !own.Keeps(p):
		return Worse
	case proxy.Outcomes[ok] > 0 && own.Outcomes[ok] == 0:
		return Worse
	case proxy.Always() && own.Always() && proxy.keepsClient() && !own.keepsClient() && where(proxy.Endpoints) == where(own.Endpoints):
		return Worse
	case !proxy.Keeps(p) && own.Keeps(p):
		return Better
	case wanted && !own.Keeps(p):
		return Missing
	}
	return Same
}

// String formats the results for a table's cell.
func (s Seen) String() string {
	if s.Always() {
		return fmt.Sprintf("%s; sees %s", where(s.Endpoints), strings.Join(s.Sources, ", "))
	}
	text := strings.Join(slices.Sorted(maps.Keys(s.Outcomes)), " or ")
	text = strings.ReplaceAll(text, ok, "answered")
	if len(s.Endpoints) > 0 {
		text += fmt.Sprintf(" (%s; sees %s)", where(s.Endpoints), strings.Join(s.Sources, ", "))
	}
	return text
}
