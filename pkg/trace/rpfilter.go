package trace

// reversePathMatch is the match rpfilter with its options.
type reversePathMatch struct {
	loose, validMark, acceptLocal, invert bool
}

func (m *reversePathMatch) set(option string) {
	switch option {
	case "--loose":
		m.loose = true
	case "--validmark":
		m.validMark = true
	case "--accept-local":
		m.acceptLocal = true
	case "--invert":
		m.invert = true
	}
}

// holds reports whether there is a route back to the source, by the interface on which the
// packet entered unless the match is loose (rpfilter_mt of ipt_rpfilter.c and ip6t_rpfilter.c).
func (m *reversePathMatch) holds(w *walk, p *packet) (bool, error) {
	if p.in == "lo" {
		return !m.invert, nil
	}
	q := lookup{src: p.dst.Addr(), dst: p.src.Addr(), in: "lo"}
	if m.validMark {
		q.mark = p.mark
	}
	way, ok := w.lookUp(q)
	passes := ok && (!way.Local || m.acceptLocal) && (m.loose || way.Link == p.in)
	return passes != m.invert, nil
}
