package neighbours

import (
	"slices"
	"time"
)

// Summary is the part of a result that the page shows. Summaries in the directory results
// are stored with the page, so that one set-up can run again without the others.
type Summary struct {
	Order         int
	Title         string
	What          string
	Missing       string `json:",omitempty"`
	Kernel        string `json:",omitempty"`
	Cells, Same   int
	Better, Worse int
	Lacking       int
	Rows          []Row `json:",omitempty"`
	Checks        []Check
	Seconds       int
	Time          time.Time
	Version       string
}

// Row is a table row: cells that differ only in protocol and family.
type Row struct {
	Client, Destination, Policy, Protocols string
	KubeProxy, KubeIPVS                    string
	Verdict                                string `json:",omitempty"`
}

// Summarize counts the results and keeps the cells that differ.
func Summarize(r Result) Summary {
	return Summary{
		Order: r.Order, Title: r.Title, What: r.What, Missing: r.Missing, Kernel: r.Kernel,
		Cells: len(r.Cells), Same: count(r, Same), Better: count(r, Better), Worse: count(r, Worse), Lacking: count(r, Missing),
		Rows: rows(r), Checks: r.Checks, Seconds: r.Seconds, Time: r.Time, Version: r.Version,
	}
}

func count(r Result, v Verdict) (n int) {
	for _, c := range r.Cells {
		if c.Verdict == v {
			n++
		}
	}
	for _, c := range r.Checks {
		if v != Same && c.Verdict == v {
			n++
		}
	}
	return n
}

// rows returns the cells in which the programs differ, or deviate from the API.
func rows(r Result) []Row {
	var all []Row
	protocols := map[Row][]string{}
	for _, c := range r.Cells {
		if c.Verdict == Same && c.KubeIPVS.Keeps(c.API) {
			continue
		}
		key := Row{
			Client: c.Client, Destination: c.Destination, Policy: c.Policy,
			KubeProxy: c.KubeProxy.String(), KubeIPVS: c.KubeIPVS.String(), Verdict: mark(c.Verdict),
		}
		if !slices.Contains(all, key) {
			all = append(all, key)
		}
		protocols[key] = append(protocols[key], c.Protocol+map[bool]string{false: "/IPv4", true: "/IPv6"}[c.IPv6])
	}
	for i, key := range all {
		all[i].Protocols = joinProtocols(protocols[key])
	}
	return all
}
