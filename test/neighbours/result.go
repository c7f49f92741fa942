// Package neighbours stores the results of kube-proxy and of kube-ipvs beside other
// programs that write a node's network, and writes the page from them.
package neighbours

import "time"

// Result is the result of one set-up: one neighbour in one configuration.
type Result struct {
	// Order and Title place the set-up on the page.
	Order int
	Title string
	// What describes which program ran, or whose rules were written, and how. Missing
	// describes what the set-up leaves out.
	What, Missing string
	// Kernel names a kernel other than the lab's usual one.
	Kernel string
	Cells  []Cell
	// Checks are questions outside the matrix.
	Checks []Check
	// Seconds is how long the set-up took, Time when it ended, Version the build of
	// kube-ipvs that ran.
	Seconds int
	Time    time.Time
	Version string
}

// Question is the request of one cell.
type Question struct {
	Client      string
	Destination string
	Policy      string // externalTrafficPolicy
	Protocol    string
	IPv6        bool
}

// Cell is a question with the results under both programs.
type Cell struct {
	Question
	// API is what the Service API promises.
	API       Promise
	KubeProxy Seen
	KubeIPVS  Seen
	Verdict   Verdict
}

// Check is a question outside the matrix, such as whether open connections survive a
// restart.
type Check struct {
	Name                string
	KubeProxy, KubeIPVS string
	Verdict             Verdict `json:",omitempty"`
}

// Promise is the result that the Service API requires.
type Promise string

// The promises.
const (
	// Answered: by any endpoint.
	Answered Promise = "answered"
	// KeepsClient: by an endpoint of this node, which sees the client's own address.
	KeepsClient Promise = "answered here, address kept"
	// Open: the API leaves the result open.
	Open Promise = "not said"
)

// Verdict compares the results under both programs.
type Verdict string

// The verdicts. Worse fails the run, unless it is a known failure.
const (
	Same   Verdict = ""
	Better Verdict = "better"
	Worse  Verdict = "worse"
	// Missing: both fail, and kube-ipvs should work.
	Missing Verdict = "missing"
)

// Seen is the result of a cell's requests under one program.
type Seen struct {
	// Outcomes counts requests by how they ended.
	Outcomes map[string]int
	// Endpoints are those that answered, Sources what they saw: "client", "node", or
	// an address.
	Endpoints, Sources []string
}
