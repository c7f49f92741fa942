package reconcile

import "time"

// pace limits how many drained real servers are deleted.
//
// The kernel keeps each deleted real server for two to three minutes. It looks each added one up
// among them, one by one (ip_vs_trash_get_dest in net/netfilter/ipvs/ip_vs_ctl.c). That takes 17
// instructions for each deleted one; the addition itself takes 40,000 (BenchmarkAddBesideDeleted of
// pkg/ipvs). After 60,000 deletions within a minute, an addition takes a million. So the first
// paceBurst deletions are made at once. The others are made at paceFloor a second or, if that is
// faster, at the rate that deletes all waiting ones within pacePeriod. While a real server waits,
// its endpoint can come back by a change of its weight.
type pace struct {
	allowed float64   // deletions
	at      time.Time // of the last refill; zero: there was none
}

const (
	paceBurst  = 2000
	paceFloor  = 50
	pacePeriod = 10 * time.Minute
)

// refill allows the deletions of the time that has passed. waiting is the number of draining real
// servers.
func (p *pace) refill(now time.Time, waiting int) {
	passed := max(now.Sub(p.at), 0).Seconds()
	if p.at.IsZero() {
		p.allowed = paceBurst
		passed = 0
	}
	p.at = now
	rate := max(paceFloor, float64(waiting)/pacePeriod.Seconds())
	p.allowed = min(p.allowed+passed*rate, paceBurst)
}

// left reports whether a deletion is allowed.
func (p *pace) left() bool { return p.allowed >= 1 }

// spend counts a deletion.
func (p *pace) spend() { p.allowed = max(p.allowed-1, 0) }
