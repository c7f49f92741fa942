package trace

import (
	"cmp"
	"fmt"
	"io"
	"strings"
)

// Write prints an explanation as text.
func (x Explanation) Write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, enters by %s\n", x.Request, cmp.Or(x.EntersBy, "the node itself"))
	if x.Service != "" {
		fmt.Fprintf(&b, stepFormat, "Service", x.Service)
	}
	writeSteps(&b, x.Steps)
	for _, r := range x.RealServers {
		fmt.Fprintf(&b, "\nto the real server %s, %sweight %d\n", r.RealServer, r.podName(), r.Weight)
		if r.MaxConnections > 0 {
			fmt.Fprintf(&b, "  %d of at most %d connections\n", r.Connections, r.MaxConnections)
		}
		if r.Doubt != "" {
			fmt.Fprintf(&b, "  %s\n", r.Doubt)
		}
		writeSteps(&b, r.Request)
		if r.LeavesBy != "" {
			returns := ""
			if r.ReturnsBy != "" {
				returns = ", returns by " + r.ReturnsBy
			}
			fmt.Fprintf(&b, "  leaves by %s%s, the endpoint sees %s\n", r.LeavesBy, returns, r.SeenSource)
		}
		if len(r.Reply) > 0 {
			fmt.Fprintf(&b, "the reply, enters by %s\n", cmp.Or(r.ReplyEntersBy, "the node itself"))
			writeSteps(&b, r.Reply)
		}
		if r.ReplyLeavesBy != "" {
			fmt.Fprintf(&b, "  leaves by %s\n", r.ReplyLeavesBy)
			fmt.Fprintf(&b, "  request and reply were matched against %d iptables rules\n", r.Rules)
		}
		fmt.Fprintf(&b, "  %s\n", r.Verdict)
	}
	for _, doubt := range x.Doubts {
		fmt.Fprintf(&b, "\nnot evaluated: %s", doubt)
	}
	fmt.Fprintf(&b, "\n%s\n", x.Verdict)
	_, err := io.WriteString(w, b.String())
	return err
}

// podName returns the pod and its node, if known.
func (out ServerPath) podName() string {
	switch {
	case out.Pod == "":
		return ""
	case out.Host == "":
		return "pod " + out.Pod + ", "
	}
	return "pod " + out.Pod + " on " + out.Host + ", "
}

const stepFormat = "  %-18s %s\n"

// writeSteps prints the packet where a step has changed it.
func writeSteps(b *strings.Builder, steps []Step) {
	packet := ""
	for _, s := range steps {
		fmt.Fprintf(b, stepFormat, s.Where, s.What)
		if s.Rule != "" {
			fmt.Fprintf(b, "  %-18s   %s\n", "", s.Rule)
		}
		if packet != "" && s.Packet != packet {
			fmt.Fprintf(b, "  %-18s   now %s\n", "", s.Packet)
		}
		packet = s.Packet
	}
}
