//go:build prove

package prove

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/apply"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Product is kube-ipvs on a Kernel: packages plan and apply as package proxy puts
// them together.
type Product struct {
	*Kernel
	applier *apply.Applier
	facts   plan.Facts
	bound   []plan.Binding
	uses    plan.SetsInUse
	numbers map[ipvs.Key]uint32
	have    map[string]*service.Service
}

// NewProduct programs a scenario into a kernel.
func NewProduct(s *Scenario) (*Product, error) {
	p := &Product{Kernel: NewKernel(s)}
	return p, p.Start()
}

// Start does what the program does when it begins, on the kernel as it is.
func (p *Product) Start() error {
	p.applier = apply.New(&p.scenario.Config, p.apply())
	p.uses = plan.SetsInUse{}
	p.numbers, p.have = map[ipvs.Key]uint32{}, map[string]*service.Service{}
	p.setNode()
	o, err := p.applier.BeginObserve()()
	if err != nil {
		return err
	}
	p.applier.Adopt(o)
	if err := p.applier.Flush().Err(); err != nil {
		return fmt.Errorf("%s: %w", p.scenario.Name, err)
	}
	p.setServices()
	if err := p.applier.Flush().Err(); err != nil {
		return fmt.Errorf("%s: %w", p.scenario.Name, err)
	}
	p.applier.Sweep()
	return p.applier.Flush().Err()
}

// Change programs another scenario, as a running program does.
func (p *Product) Change(to *Scenario) error {
	p.scenario = to
	p.setNode()
	p.setServices()
	return p.applier.Flush().Err()
}

func (p *Product) setNode() {
	s := p.scenario
	node := s.Node
	node.Bound, node.Uses = p.bound, p.uses
	p.facts = plan.NewFacts(&s.Config, &node)
	part := plan.ForNode(&s.Config, &node)
	p.bound = plan.MergeBindings(p.bound, part.Bound)
	for key := range part.Sysctls {
		if _, there := p.sysctl.Values()[key]; !there {
			p.sysctl.Set(key, "0")
		}
	}
	p.applier.SetNode(part)
}

func (p *Product) setServices() {
	s := p.scenario
	now, replan := map[string]*service.Service{}, false
	for i := range s.Services {
		svc := &s.Services[i]
		now[svc.Name.String()] = svc
		part := plan.ForService(&s.Config, &p.facts, svc)
		for _, o := range part.Internal {
			if p.numbers[o.Key] == 0 {
				p.numbers[o.Key] = uint32(len(p.numbers) + 1)
			}
		}
		part = plan.AssignMarks(&s.Config, part, p.numbers)
		replan = p.uses.Add(part.Members) || replan
		p.applier.Set(&apply.Owner{Name: svc.Name, Created: svc.Created}, part)
	}
	if replan {
		p.setNode() // rules for sets that came into use
	}
	for name, svc := range p.have {
		if now[name] == nil {
			p.applier.Delete(svc.Name)
		}
	}
	p.have = now
}
