package metrics

import "time"

// Observer is what the proxy's loop tells; proxy.Observer is the same.
type Observer interface {
	Queued()
	Passed(took time.Duration, services, problems int)
	Failing(node bool, services, all int)
	Compared(took time.Duration, differences int)
	Held(virtualServers, realServers, draining int)
	Conflicts(count int)
	Node(exists, deleting, excludedFromAutoscaling bool)
}

// Observers are told one after another, in their order, so that none of them
// may block.
type Observers []Observer

// Queued tells that there is work.
func (o Observers) Queued() {
	for _, each := range o {
		each.Queued()
	}
}

// Passed tells that a pass has ended.
func (o Observers) Passed(took time.Duration, services, problems int) {
	for _, each := range o {
		each.Passed(took, services, problems)
	}
}

// Failing tells what the kernel refuses.
func (o Observers) Failing(node bool, services, all int) {
	for _, each := range o {
		each.Failing(node, services, all)
	}
}

// Compared tells that the kernel was compared with the plan.
func (o Observers) Compared(took time.Duration, differences int) {
	for _, each := range o {
		each.Compared(took, differences)
	}
}

// Held tells how much the kernel holds.
func (o Observers) Held(virtualServers, realServers, draining int) {
	for _, each := range o {
		each.Held(virtualServers, realServers, draining)
	}
}

// Conflicts tells how much is claimed in vain.
func (o Observers) Conflicts(count int) {
	for _, each := range o {
		each.Conflicts(count)
	}
}

// Node tells what the Node object says.
func (o Observers) Node(exists, deleting, excludedFromAutoscaling bool) {
	for _, each := range o {
		each.Node(exists, deleting, excludedFromAutoscaling)
	}
}
