// Package reliability stores the figures of reliability tests and writes
// docs/reliability.md from them (make reliability). A test belongs to the package whose
// fault it injects; its name begins with TestReliability, and it calls Record.
package reliability

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Section is a part of the page about one kind of faults.
type Section struct {
	Key    string // prefix of the names of its files
	Title  string
	Claims string // what its tests check
}

// The sections, in the order of the page.
var (
	Crash    = Section{"crash", "Crashes", "The tests kill the process between two operations on the kernel. After its next start the kernel equals the plan, no stale state of kube-ipvs is left, and no connection through an unchanged Service has broken."}
	Refusals = Section{"refusals", "Kernel errors", "An operation on the kernel fails. kube-ipvs reports the error, programs everything else, and retries the failed operation until it succeeds. It never treats an unreadable list as an empty one. At the start it continues without IPv6 if the kernel or the iptables programs have none, and without the iptables back end that the node does not use, and looks for kube-proxy's nftables tables later if nft fails. If the iptables rules in use cannot be read, the process exits; any other part is read again until that succeeds. Until then the kernel stays unchanged."}
	Drift    = Section{"drift", "Drift", "Another program changes the kernel state that kube-ipvs has written. kube-ipvs detects, counts and repairs the change, and leaves foreign state alone. How soon it does so depends on the state (with the default `--ipvs-sync-period` of 30 s):\n\n- **Addresses, routes, policy rules and nf_tables rules:** within seconds, because the kernel announces their changes.\n- **IPVS and sets, if entries are missing:** a mass deletion within three seconds, because kube-ipvs compares counts once a second. Of each set with more than 256 members it looks for one at random, and counts 2,048 members a second of these sets in turn.\n- **A single real server that was deleted or changed:** within minutes on nodes with up to 1,000 virtual servers, because kube-ipvs checks the real servers of four each second, in turn; on larger ones by the full comparison.\n- **Kernel parameters and rules of iptables-legacy:** within 30 s.\n- **Changes that keep the counts, such as a replaced set member or another scheduler:** by the full comparison. It runs every 30 s on nodes with up to 2,000 virtual servers and set members, every minute with up to 4,000, and so on up to every 20 minutes; and up to once an hour where reading the kernel takes seconds."}
	Source   = Section{"source", "API server failures", "The API server is unreachable or returns wrong data. The kernel continues to serve."}
	Draining = Section{"draining", "Graceful termination", "An endpoint is removed. Its connections may continue for a limited time."}
	Input    = Section{"input", "Invalid input", "kube-ipvs reads invalid data. One message names the object and the field. The process does not panic, and no other Service waits."}
	Security = Section{"security", "Security", "The process has only the documented privileges. The owner of a Service gains no other privileges than those of a Service owner."}
	Packets  = Section{"packets", "Every packet class", "For every class of packets, in every configuration that is checked, beside other programs and between any two writes, the rules do what the API says, or what kube-proxy does. Every rule is needed by some packet. Both statements have exceptions, which the figures count. [What is proved about packets](proof.md) explains the statements and the exceptions."}
	Soak     = Section{"soak", "Soak", "All faults at once, for a long time."}
)

var sections = []Section{Crash, Refusals, Drift, Source, Draining, Input, Security, Packets, Soak}

// Figure is one count or measurement.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit,omitempty"`
	Shows string  `json:"shows,omitempty"` // what it means
}

// Part is the record of one test.
type Part struct {
	Test    string    `json:"test"`
	Date    time.Time `json:"date"`
	Version string    `json:"version"`
	Kernel  string    `json:"kernel"`
	Seconds float64   `json:"seconds"` // duration of the test
	Figures []Figure  `json:"figures"`
}

// version returns the version under test. It is empty except in `make reliability`.
func version() string { return os.Getenv("RELIABILITY") }

// Times returns how often a test repeats its fault: long in `make reliability`, short
// otherwise.
func Times(short, long int) int {
	if version() == "" {
		return short
	}
	return long
}

// Begin starts the clock of a test and returns a function that records its figures,
// replacing those of its last run. Call it after all checks. A failed test records
// nothing. Outside of `make reliability` the figures are only logged.
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
