package proxy

import "time"

// Observers calls several observers in order. None of them may block.
type Observers []Observer

// Queued reports pending work.
func (o Observers) Queued() {
	for _, each := range o {
		each.Queued()
	}
}

// Idle reports that no work is pending any more.
func (o Observers) Idle() {
	for _, each := range o {
		each.Idle()
	}
}

// Serving reports that the kernel serves what an earlier process programmed.
func (o Observers) Serving() {
	for _, each := range o {
		each.Serving()
	}
}

// Passed reports the end of a sync.
func (o Observers) Passed(took time.Duration, services, problems int) {
	for _, each := range o {
		each.Passed(took, services, problems)
	}
}

// Failing reports what the kernel refuses.
func (o Observers) Failing(node bool, services, all int) {
	for _, each := range o {
		each.Failing(node, services, all)
	}
}

// Compared reports a comparison with the kernel.
func (o Observers) Compared(took time.Duration, differences int) {
	for _, each := range o {
		each.Compared(took, differences)
	}
}

// Held reports the size of the kernel's state.
func (o Observers) Held(virtualServers, realServers, draining int) {
	for _, each := range o {
		each.Held(virtualServers, realServers, draining)
	}
}

// Conflicts reports the number of virtual servers that several Services want.
func (o Observers) Conflicts(count int) {
	for _, each := range o {
		each.Conflicts(count)
	}
}

// Node reports the state of the Node object.
func (o Observers) Node(exists, deleting, excludedFromAutoscaling bool) {
	for _, each := range o {
		each.Node(exists, deleting, excludedFromAutoscaling)
	}
}
