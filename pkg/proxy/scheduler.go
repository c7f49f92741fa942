package proxy

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// checkScheduler has a Service do with the node's scheduler where the kernel
// does not have the one that it asks for: a virtual server that the kernel
// refuses would leave the Service without any. What was missing is looked for
// again whenever the Service is planned, and with each comparison with the kernel.
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
