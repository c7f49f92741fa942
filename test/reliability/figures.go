// Package reliability keeps what tests of faults have come to, and makes
// docs/reliability.md of it (make reliability). A test of a fault belongs to the
// package whose fault it is; it is named TestReliability…, and calls Record.
package reliability

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Section is a kind of faults.
type Section struct {
	Key    string // begins the names of its files
	Title  string
	Claims string // what its tests hold to
}

// The sections, in the order of the page.
var (
	Crash    = Section{"crash", "Crash anywhere", "The process is killed between two operations on the kernel. After its next start the kernel equals the plan, nothing of ours is left over, and no connection through an untouched Service has broken."}
	Refusals = Section{"refusals", "The kernel says no", "An operation on the kernel fails. There is one clear error, everything else is programmed, and what failed is tried again until it holds. A list that could not be read is never taken for an empty one. At the start only IPv6 can be left out, where the node has none; anything else that cannot be read ends the process, with everything as it was."}
	Drift    = Section{"drift", "Drift", "Somebody else changes what is programmed. It is seen, counted and repaired, and what is not ours is left alone. The kernel tells of addresses, routes, policy rules and rules of nf_tables: these are repaired within seconds. It tells nobody of IPVS and sets. Once a second their counts are compared, and the real servers of a few virtual servers in turn, so mass deletion is repaired within three seconds, and a single real server that was deleted or changed within 20 minutes at most, on small nodes within seconds. Kernel parameters and rules of iptables-legacy are compared every `--ipvs-sync-period` (30 s). What changes no count, such as one member of a set in place of another or another scheduler, is found by the comparison of everything: every 30 s on nodes with up to 2,000 virtual servers and set members, every minute with up to 4,000, and so on up to every 20 minutes."}
	Source   = Section{"source", "The API server", "The API server is gone, or says what is not so. What is programmed goes on serving."}
	Draining = Section{"draining", "Graceful termination", "An endpoint goes. Its connections have their time, and no more than that."}
	Input    = Section{"input", "Bad input", "What is read is not what it should be. One message names the object and the field; nothing panics, and no other Service waits."}
	Security = Section{"security", "Security", "The process has the privileges that are documented, and a Service's owner those of a Service's owner."}
	Packets  = Section{"packets", "Every packet class", "Whatever packet comes, in every configuration that is checked, beside other programs and between any two writes, the rules do what the API says, or what kube-proxy does. No rule is without a packet that needs it. docs/proof.md says what is proved."}
	Soak     = Section{"soak", "Soak", "All of it at once, for a long time."}
)

var sections = []Section{Crash, Refusals, Drift, Source, Draining, Input, Security, Packets, Soak}

// Figure is one thing that was counted or measured.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit,omitempty"`
	Shows string  `json:"shows,omitempty"` // what it means
}

// Part is what one test has recorded.
type Part struct {
	Test    string    `json:"test"`
	Date    time.Time `json:"date"`
	Version string    `json:"version"`
	Kernel  string    `json:"kernel"`
	Seconds float64   `json:"seconds"` // that the test took
	Figures []Figure  `json:"figures"`
}

// version is that of what is tested; it is empty but in `make reliability`.
func version() string { return os.Getenv("RELIABILITY") }

// Times is how often to do something: in `make reliability` often, and in all
// other runs of the tests as often as these have time for.
func Times(short, long int) int {
	if version() == "" {
		return short
	}
	return long
}

// Begin takes the time, and gives what records a test's figures in the place of
// those of its last run: to be called when all is checked. A test that has failed
// records none. Outside of `make reliability` they are only logged.
func Begin(t testing.TB, s Section, name string) (record func(...Figure)) {
	began := time.Now()
	return func(figures ...Figure) {
		t.Helper()
		for _, f := range figures {
			t.Logf("%s: %s %s", f.Name, Round(f.Value), f.Unit)
		}
		if version() == "" || t.Failed() {
			return
		}
		p := Part{t.Name(), time.Now().UTC().Truncate(time.Second), version(), kernel(), time.Since(began).Seconds(), figures}
		text, err := json.MarshalIndent(p, "", "  ")
		if err == nil {
			err = os.WriteFile(filepath.Join(os.Getenv("LAB_OUT"), s.Key+"-"+name+".json"), append(text, '\n'), 0o644)
		}
		if err != nil {
			t.Errorf("keeping figures: %v", err)
		}
	}
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
}
