package proxy

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// checkScheduler falls back to the node's scheduler if the kernel does not have the one
// that a Service requests: a virtual server that the kernel refuses would leave the
// Service without any. A missing scheduler is probed again whenever the Service is
// planned, and after each comparison with the kernel.
func (p *Proxy) checkScheduler(s *service.Service) error {
	name := s.Scheduling.Scheduler
	if name == "" || p.schedulers[name] {
		return nil
	}
	if err := p.ProbeScheduler(name); err != nil {
		s.Scheduling = service.Scheduling{}
		object := "Service " + s.Name.String()
		return fmt.Errorf("%s: metadata.annotations[%s]: %w", object, service.AnnotationScheduler, err)
	}
	p.schedulers[name] = true
	return nil
}
