//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Product is kube-ipvs on a Kernel: packages plan and reconcile, connected as in package
// proxy.
type Product struct {
	*Kernel
	reconciler *reconcile.Reconciler
	facts      plan.Facts
	have       map[string]*service.Service
	resyncs    int
}

// NewProduct programs a scenario into a kernel.
func NewProduct(s *Scenario) (*Product, error) {
	p := &Product{Kernel: NewKernel(s)}
	return p, p.Start()
}

// Start does what the process does at its start, with the current state of the kernel.
func (p *Product) Start() error {
	cfg := &p.scenario.Config
	p.reconciler = reconcile.New(cfg, p.apply(), reconcile.Periods{Sync: time.Hour})
	p.have = map[string]*service.Service{}
	p.setNode()
	if _, err := p.reconciler.Load(); err != nil {
		return err
	}
	if err := p.flush(); err != nil {
		return err
	}
	if err := p.setServices(); err != nil {
		return err
	}
	if err := p.flush(); err != nil {
		return err
	}
	return p.named(p.reconciler.Prune())
}

// Change programs another scenario, as a running process does.
func (p *Product) Change(to *Scenario) error {
	p.scenario = to
	p.setNode()
	if err := p.setServices(); err != nil {
		return err
	}
	return p.flush()
}

// Look does what a running process does each second: it writes rules that a packet demanded.
func (p *Product) Look() error {
	done := p.reconciler.Step(time.Now().Add(time.Second), reconcile.External{})
	if len(done.Demanded) == 0 {
		return fmt.Errorf("%s: no rules are written on demand", p.scenario.Name)
	}
	return done.Problems.Err()
}

// Resync compares the kernel with the state, as after a change by another program.
func (p *Product) Resync() error { return p.compare(reconcile.External{MaybeDeleted: true}) }

// compare compares the kernel with the state after a change that is announced.
func (p *Product) compare(change reconcile.External) error {
	p.resyncs++
	now := time.Now().Add(time.Duration(p.resyncs) * time.Minute) // beyond the pause between comparisons
	for {
		done := p.reconciler.Step(now, change)
		change = reconcile.External{}
		if err := cmp.Or(done.ReadErr, done.Problems.Err()); err != nil {
			return fmt.Errorf("%s: %w", p.scenario.Name, err)
		}
		if done.Compared != nil {
			return nil
		}
		if _, ready := p.reconciler.Next(now); ready != nil {
			<-ready
		}
	}
}

func (p *Product) flush() error { return p.named(p.reconciler.Flush()) }

// named returns the error of some problems, with the scenario's name.
func (p *Product) named(problems reconcile.Problems) error {
	if err := problems.Err(); err != nil {
		return fmt.Errorf("%s: %w", p.scenario.Name, err)
	}
	return nil
}

func (p *Product) setNode() {
	s := p.scenario
	node := s.Node
	// With our own policy rules, from which a restarted process learns the marks of
	// interfaces.
	node.Inventory, _ = p.Routing.Inventory()
	p.facts = plan.NewFacts(&s.Config, &node)
	running := node
	running.Started = true // which plans fewer rules, and the same parameters
	for key := range plan.ForNode(&s.Config, &running).Sysctls {
		if _, there := p.Sysctl.Values()[key]; !there {
			p.Sysctl.Set(key, "0")
		}
	}
	p.reconciler.SetNode(node, 0) // setServices plans every Service
}

func (p *Product) setServices() error {
	s := p.scenario
	now := map[string]*service.Service{}
	for i := range s.Services {
		svc := &s.Services[i]
		now[svc.Name.String()] = svc
		part := plan.ForService(&s.Config, &p.facts, svc)
		if err := p.reconciler.Set(&reconcile.Owner{Name: svc.Name, Created: svc.Created}, part); err != nil {
			return fmt.Errorf("%s: %w", svc.Name, err)
		}
	}
	for name, svc := range p.have {
		if now[name] == nil {
			p.reconciler.Delete(svc.Name)
		}
	}
	p.have = now
	return nil
}
