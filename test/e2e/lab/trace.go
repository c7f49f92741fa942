package lab

import (
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Trace returns the state of the namespace's kernel that "kube-ipvs trace" reads, for
// each family.
func (n *Namespace) Trace() (nodes [2]*trace.Node) {
	n.lab.t.Helper()
	err := n.Do(func() error {
		kernel, err := trace.Read()
		if err != nil {
			return err
		}
		for i, family := range ip.Families {
			if nodes[i], err = kernel.Node(family); err != nil {
				return err
			}
		}
		return nil
	})
	n.lab.must(err, "%s: read the kernel to trace packets", n.Name)
	return nodes
}

// Explained returns an explanation as "kube-ipvs trace" prints it.
func Explained(x *trace.Explanation) string {
	var text strings.Builder
	_ = x.Write(&text)
	return text.String()
}
