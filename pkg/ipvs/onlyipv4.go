package ipvs

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The kernel counts IPv4 virtual servers, and lists only these by a socket option. To list
// those of IPv6 it walks all virtual servers again for each page of the answer, so they are
// not requested if there are none.
//
// Each virtual server of any family and network namespace holds a reference to the module
// ip_vs, and so does each module that uses it. A scheduler holds a second one because it
// is registered (register_ip_vs_scheduler). If the references are exactly these and one
// for each IPv4 virtual server, there is no IPv6 virtual server. If another network
// namespace has virtual servers, or IPVS is built into the kernel, the answer is unknown.

// moduleDir describes the module ip_vs.
const moduleDir = "/sys/module/ip_vs/"

// schedulers are the modules that register one scheduler each.
var schedulers = strings.Fields("ip_vs_rr ip_vs_wrr ip_vs_lc ip_vs_wlc ip_vs_fo ip_vs_ovf ip_vs_lblc ip_vs_lblcr ip_vs_dh ip_vs_sh ip_vs_mh ip_vs_sed ip_vs_nq ip_vs_twos")

// onlyIPv4 reports whether there are certainly no IPv6 virtual servers. It reads the count
// again after the references, to detect a concurrent change.
func onlyIPv4(count func() (int, error), users func() (all, modules int, err error)) bool {
	before, err := count()
	if err != nil || before == 0 {
		return false
	}
	all, modules, err := users()
	if err != nil {
		return false
	}
	after, err := count()
	return err == nil && before == after && all == modules+before
}

// moduleUsers returns the number of references to the module, and how many of them other
// modules hold.
func moduleUsers() (all, modules int, err error) {
	text, err := os.ReadFile(moduleDir + "refcnt")
	if err != nil {
		return 0, 0, err
	}
	if all, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil {
		return 0, 0, fmt.Errorf("%srefcnt: %q: %w", moduleDir, text, unix.EINVAL)
	}
	holders, err := os.ReadDir(moduleDir + "holders")
	if err != nil {
		return 0, 0, err
	}
	for _, holder := range holders {
		modules++
		if slices.Contains(schedulers, holder.Name()) {
			modules++
		}
	}
	return all, modules, nil
}
