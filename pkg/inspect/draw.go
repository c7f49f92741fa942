package inspect

import (
	"cmp"
	"fmt"
	"html"
	"io"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// box is a box of a drawing: a heading and lines of text.
type box struct {
	title string
	lines []string
	bad   bool // the path ends here, or is asymmetric
}

// boxes returns the boxes of an explanation: the request up to IPVS, one row per real
// server, and the verdict.
func boxes(x trace.Explanation) (request box, servers []box, end box) {
	request = box{title: x.Request, lines: []string{"enters by " + cmp.Or(x.EntersBy, "the node itself")}}
	if x.Service != "" {
		request.lines = append(request.lines, "Service "+x.Service)
	}
	request.lines = append(request.lines, stations(x.Steps)...)
	for _, b := range x.RealServers {
		server := box{title: "real server " + b.RealServer, bad: b.Verdict.Outcome != trace.Answered && b.Verdict.Outcome != trace.Draining && b.Verdict.Outcome != trace.Full}
		if b.Pod != "" {
			server.lines = append(server.lines, "pod "+b.Pod)
		}
		if b.Host != "" {
			server.lines = append(server.lines, "on "+b.Host)
		}
		server.lines = append(server.lines, stations(b.Request)...)
		if b.LeavesBy != "" {
			server.lines = append(server.lines, "leaves by "+b.LeavesBy+" as "+b.SeenSource)
		}
		if len(b.Reply) > 0 {
			server.lines = append(server.lines, "the reply enters by "+cmp.Or(b.ReplyEntersBy, "the node itself"))
			server.lines = append(server.lines, stations(b.Reply)...)
		}
		if b.ReplyLeavesBy != "" {
			server.lines = append(server.lines, "the reply leaves by "+b.ReplyLeavesBy)
		}
		server.lines = append(server.lines, b.Verdict.String())
		servers = append(servers, server)
	}
	end = box{title: string(x.Verdict.Outcome), bad: x.Verdict.Outcome != trace.Answered}
	if x.Verdict.Reason != "" {
		end.lines = []string{x.Verdict.Reason}
	}
	return request, servers, end
}

func stations(steps []trace.Step) []string {
	var out []string
	for _, s := range steps {
		out = append(out, s.Where+": "+s.What)
	}
	return out
}

// WriteMermaid writes an explanation as a Mermaid flowchart, which many issue trackers
// render.
func WriteMermaid(w io.Writer, x trace.Explanation) error {
	var b strings.Builder
	request, servers, end := boxes(x)
	b.WriteString("flowchart TD\n")
	node := func(id string, of box) {
		lines := []string{"<b>" + mermaid(of.title) + "</b>"}
		for _, line := range of.lines {
			lines = append(lines, mermaid(line))
		}
		fmt.Fprintf(&b, "  %s[\"%s\"]\n", id, strings.Join(lines, "<br/>"))
		if of.bad {
			fmt.Fprintf(&b, "  style %s stroke:#c00,stroke-width:3px\n", id)
		}
	}
	node("request", request)
	node("verdict", end)
	for i, s := range servers {
		id := fmt.Sprintf("server%d", i+1)
		node(id, s)
		fmt.Fprintf(&b, "  request --> %s --> verdict\n", id)
	}
	if len(servers) == 0 {
		b.WriteString("  request --> verdict\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// mermaid escapes special characters in a label.
func mermaid(text string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;", "#", "#35;").Replace(text)
}

// Sizes of an SVG in pixels. The font is monospace, so the width of text is known.
const (
	svgFont    = 12
	svgLetter  = 7.3 // width of a character
	svgLine    = 17
	svgPadding = 12
	svgGap     = 34
	svgLetters = 76 // per line of a box; longer lines are broken
)

// WriteSVG writes an explanation as a self-contained picture that is legible in light
// and dark mode.
func WriteSVG(w io.Writer, x trace.Explanation) error {
	request, servers, end := boxes(x)
	all := []*box{&request}
	for i := range servers {
		all = append(all, &servers[i])
	}
	all = append(all, &end)
	width, y := 2*svgPadding+svgLetters*svgLetter, float64(svgPadding)
	var body strings.Builder
	for i, each := range all {
		lines := broken(each.lines)
		titles := broken([]string{each.title})
		height := 2*svgPadding + float64(svgLine*(len(lines)+len(titles)))
		colour := "#57606a"
		if each.bad {
			colour = "#cf222e"
		} else if i == len(all)-1 {
			colour = "#1a7f37"
		}
		fmt.Fprintf(&body, "<rect x=\"%d\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\" rx=\"6\" fill=\"#f6f8fa\" stroke=\"%s\" stroke-width=\"2\"/>\n", svgPadding, y, width, height, colour)
		at := y + svgPadding + svgFont
		for j, line := range append(titles, lines...) {
			weight := "normal"
			if j < len(titles) {
				weight = "bold"
			}
			fmt.Fprintf(&body, "<text x=\"%d\" y=\"%.0f\" font-weight=\"%s\" xml:space=\"preserve\">%s</text>\n", 2*svgPadding, at, weight, html.EscapeString(line))
			at += svgLine
		}
		y += height
		switch {
		case i == 0 || i == len(all)-2: // arrows into and out of the real servers
			fmt.Fprintf(&body, "<path d=\"M%.0f %.0f v%d m-5 -7 l5 7 l5 -7\" fill=\"none\" stroke=\"#57606a\" stroke-width=\"2\"/>\n", svgPadding+width/2, y+3, svgGap-6)
			y += svgGap
		case i < len(all)-1: // alternatives
			y += svgPadding
		}
	}
	_, err := fmt.Fprintf(w, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" font-family=\"monospace\" font-size=\"%d\" fill=\"#1f2328\">\n<title>%s</title>\n%s</svg>\n",
		width+2*svgPadding, y+svgPadding, svgFont, html.EscapeString(x.Request), body.String())
	return err
}

// broken breaks lines that are too long for a box, at spaces if possible.
func broken(lines []string) []string {
	var out []string
	for _, line := range lines {
		for len(line) > svgLetters {
			at := strings.LastIndex(line[:svgLetters], " ")
			if at <= 2 {
				at = svgLetters
			}
			out = append(out, line[:at])
			line = "  " + strings.TrimSpace(line[at:])
		}
		out = append(out, line)
	}
	return out
}
