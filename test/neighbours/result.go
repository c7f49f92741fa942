// Package neighbours holds what was seen of kube-proxy and of kube-ipvs beside
// other programs that write a node's network, and the page made from it.
package neighbours

import "time"

// Result is what was seen in one set-up: one neighbour in one configuration.
type Result struct {
	// Order and Title place the set-up on the page.
	Order int
	Title string
	// What says which program ran, or whose rules were written, and how. Missing says
	// what the set-up leaves out.
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

// Question is one cell's.
type Question struct {
	Client      string
	Destination string
	Policy      string // externalTrafficPolicy
	Protocol    string
	IPv6        bool
}

// Cell is a question with both programs' answers.
type Cell struct {
	Question
	// API is what the Service API promises.
	API       Promise
	KubeProxy Seen
	KubeIPVS  Seen
	Verdict   Verdict
}

// Check is a question that is not one of the matrix, such as whether open
// connections outlive a restart.
type Check struct {
	Name                string
	KubeProxy, KubeIPVS string
	Verdict             Verdict `json:",omitempty"`
}

// Promise is what the Service API says of a question.
type Promise string

// The promises.
const (
	// Answered: by any endpoint.
	Answered Promise = "answered"
	// KeepsClient: by an endpoint of this node, which sees the client's own address.
	KeepsClient Promise = "answered here, address kept"
	// Open: the API does not say.
	Open Promise = "not said"
)

// Verdict compares what was seen.
type Verdict string

// The verdicts. Worse fails the run, unless it is a known failure.
const (
	Same   Verdict = ""
	Better Verdict = "better"
	Worse  Verdict = "worse"
	// Missing: both fail, where this project wants to work.
	Missing Verdict = "missing"
)

// Seen is what became of a cell's requests under one program.
type Seen struct {
	// Outcomes counts requests by how they ended.
	Outcomes map[string]int
	// Endpoints are those that answered, Sources what they saw: "client", "node", or
	// an address.
	Endpoints, Sources []string
}
